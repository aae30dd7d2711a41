"""Folder of a data set: its manifest, its locks, and the samples that have no finite states."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamatap.dataset.batch_journal import BatchJournal
from llamatap.errors import BusyError, InvalidInputError
from llamatap.storage import locks
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["MANIFEST", "SKIPPED", "STATUSES", "DatasetFolder"]

#: Name of the manifest in the data set's folder.
MANIFEST = "llamatap.json"
#: Name of the file of skipped rows and reasons: one JSON object per line.
SKIPPED = "skipped.jsonl"
#: Statuses of a data set: samples are missing; files are being renumbered; complete.
STATUSES = ("writing", "finishing", "complete")
# Folder of locks, of the journal, and of reasons of samples without finite states, until all is written.
_WORK = ".llamatap"


class DatasetFolder:
    """Folder of a data set, and a process that writes to it.

    :ivar work: subfolder for temporary files while the data set is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / _WORK

    @property
    def journal(self) -> BatchJournal:
        """The journal of batches that are computed and not yet in the layout's files."""
        return BatchJournal(self.work / "computed")

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the data set; None if the folder is empty or missing.

        :raises InvalidInputError: the folder holds something else.
        """
        try:
            found = json.loads((self.path / MANIFEST).read_text("utf-8"))
        except FileNotFoundError:
            if self.path.is_dir() and any(not entry.name.startswith(_WORK) for entry in self.path.iterdir()):
                raise InvalidInputError(
                    f"{self.path} is not empty and holds no {MANIFEST}: give another folder"
                ) from None
            return None
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"{self.path / MANIFEST} cannot be read ({error}): restore it, or give another folder"
            ) from error
        if (
            not isinstance(found, dict)
            or not isinstance(found.get("made_with"), dict)
            or found.get("status") not in STATUSES
        ):
            raise InvalidInputError(
                f"{self.path / MANIFEST} is not the manifest of a llamatap data set: give another folder"
            )
        return found

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the manifest.

        :raises OSError: it cannot be written.
        """
        with atomic_path(self.path / MANIFEST) as scratch:
            scratch.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")

    def write_skipped(self, skipped: Mapping[int, str]) -> None:
        """Write the rows that are not in the data set.

        :param skipped: the reason for each row.
        :raises OSError: it cannot be written.
        """
        # A lone surrogate becomes a backslash escape, which is valid JSON as well.
        with (
            atomic_path(self.path / SKIPPED) as scratch,
            scratch.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            for row in sorted(skipped):
                file.write(json.dumps({"row": row, "reason": skipped[row]}, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def used(self, rank: int, world_size: int) -> Iterator[None]:
        """Lock out other runs, except workers of other ranks with the same world size.

        :raises BusyError: another run is writing to the folder.
        :raises OSError: the folder cannot be created or written to.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with self.settled():
                # Workers of another world size divide the samples differently.
                for other in self.work.glob("world-*.lock"):
                    if other.name != f"world-{world_size}.lock":
                        with self._locked(other.name):
                            pass
                stack.enter_context(self._locked(f"world-{world_size}.lock", shared=True))
                stack.enter_context(self._locked(f"rank-{rank}.lock"))
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, *, shared: bool = False) -> Iterator[None]:
        try:
            handle = locks.acquire(self.work / name, make=True, shared=shared, wait=False)
        except BlockingIOError:
            raise BusyError(f"another run is writing to {self.path}; wait until it ends") from None
        try:
            yield
        finally:
            locks.release(handle)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Lock for starting and finishing a data set, one process at a time."""
        with locks.locked(self.work / "settle.lock", make=True):
            # Left by runs that were killed while they held this lock: atomic_path's .NAME.XXXXXXXX
            for folder in (self.path, self.work):
                for leftover in folder.glob(".*.????????"):
                    shutil.rmtree(leftover, ignore_errors=True)
            yield

    def clear_work(self) -> None:
        """Remove the temporary files of writing, except locks."""
        for entry in self.work.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.suffix != ".lock":
                entry.unlink()

    def mark_lost(self, index: int, reason: str) -> None:
        """Record that a sample has no finite states.

        :raises OSError: it cannot be written.
        """
        folder = self.work / "lost"
        folder.mkdir(exist_ok=True)
        with atomic_path(folder / str(index)) as scratch:
            scratch.write_text(reason, "utf-8", "backslashreplace")

    def lost(self) -> dict[int, str]:
        """The samples without finite states, and the reasons."""
        found = {}
        for path in (self.work / "lost").glob("*"):
            if path.name.isdecimal():
                found[int(path.name)] = path.read_text("utf-8", "replace")
        return dict(sorted(found.items()))

    def free_bytes(self) -> tuple[int, int]:
        """Free bytes of the file system where the folder is or will be, and the bytes of its blocks."""
        place = self.path.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free, os.statvfs(place).f_frsize
