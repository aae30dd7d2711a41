"""The folder of a data set: what it is of, who writes to it, and what could not be computed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamatap.errors import BusyError, InvalidInputError
from llamatap.storage import locks
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["MANIFEST", "SKIPPED", "STATUSES", "Folder"]

#: Name of the manifest in the data set's folder.
MANIFEST = "llamatap.json"
#: Rows of the input that are not in it, and why: a JSON object a line.
SKIPPED = "skipped.jsonl"
#: Statuses of a data set: samples are missing; files are being put in order; complete.
STATUSES = ("writing", "finishing", "complete")
# Locks, and reasons of samples without finite states, until all is written.
_WORK = ".llamatap"


class Folder:
    """The folder, and how one process writes to it.

    :ivar work: a folder in it, for what is there while the data set is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / _WORK

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of the data set; None when the folder is empty or missing.

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
            raise InvalidInputError(f"{self.path / MANIFEST} cannot be read: {error}") from error
        if (
            not isinstance(found, dict)
            or not isinstance(found.get("made_with"), dict)
            or found.get("status") not in STATUSES
        ):
            raise InvalidInputError(f"{self.path / MANIFEST} is not of a data set of llamatap")
        return found

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """:raises OSError: it cannot be written."""
        with atomic_path(self.path / MANIFEST) as scratch:
            scratch.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")

    def write_skipped(self, skipped: Mapping[int, str]) -> None:
        """Rows that are not in the data set.

        :param skipped: the reason of each row.
        :raises OSError: it cannot be written.
        """
        # Half a surrogate pair becomes a backslash escape, which is valid JSON too.
        with (
            atomic_path(self.path / SKIPPED) as scratch,
            scratch.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            for row in sorted(skipped):
                file.write(json.dumps({"row": row, "reason": skipped[row]}, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def used(self, rank: int, world_size: int) -> Iterator[None]:
        """Keep other runs out: all but workers of the same number of workers, and of another rank.

        :raises BusyError: another run is at it.
        :raises OSError: the folder cannot be made or written to.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with self.settled():
                # Workers of another number share the samples out otherwise.
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
            raise BusyError(f"another run is writing to {self.path}; wait for its end") from None
        try:
            yield
        finally:
            locks.release(handle)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """One process at a time: to begin a data set, and to finish it."""
        with locks.locked(self.work / "settle.lock", make=True):
            # A run that was killed while it had this lock left them: atomic_path's .NAME.XXXXXXXX
            for folder in (self.path, self.work):
                for leftover in folder.glob(".*.????????"):
                    shutil.rmtree(leftover, ignore_errors=True)
            yield

    def forget(self) -> None:
        """Remove what is there while a data set is written, but for locks."""
        for entry in self.work.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.suffix != ".lock":
                entry.unlink()

    def lose(self, index: int, reason: str) -> None:
        """Remember that a sample has no finite states.

        :raises OSError: it cannot be written.
        """
        folder = self.work / "lost"
        folder.mkdir(exist_ok=True)
        with atomic_path(folder / str(index)) as scratch:
            scratch.write_text(reason, "utf-8", "backslashreplace")

    def lost(self) -> dict[int, str]:
        """The samples without finite states, and why."""
        found = {}
        for path in (self.work / "lost").glob("*"):
            if path.name.isdecimal():
                found[int(path.name)] = path.read_text("utf-8", "replace")
        return dict(sorted(found.items()))

    def free_bytes(self) -> tuple[int, int]:
        """Bytes that are free where the folder is or will be, and bytes of a block of its file system."""
        place = self.path.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free, os.statvfs(place).f_frsize
