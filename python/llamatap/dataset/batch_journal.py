"""Journal of computed batches that are not yet in the layout's files, so that none is lost when killed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.states import DTYPES, States

__all__ = ["BatchJournal", "boot_id"]


class BatchJournal:
    """A folder with a file for each computed batch: a line of JSON, then the states of its samples in order.

    The page cache outlives the process, so a file costs one copy in memory. It is removed once the layout's
    files are written, usually before it reaches the disk.

    :param folder: created with the first batch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, batch: Sequence[tuple[int, States]]) -> None:
        """Write a batch to the journal atomically.

        :raises OSError: it cannot be written.
        """
        self._folder.mkdir(exist_ok=True)
        arrays = [np.ascontiguousarray(states.array) for _, states in batch]
        head = {
            "samples": [index for index, _ in batch],
            "shapes": [array.shape for array in arrays],
            "dtype": str(arrays[0].dtype),
            "boot": boot_id(),
        }
        path = self._path(batch[0][0])
        scratch = path.with_name(f".{path.name}")
        try:
            with scratch.open("wb", buffering=0) as file:
                for left in (
                    memoryview(json.dumps(head).encode() + b"\n"),
                    *(array.reshape(-1).view(np.uint8).data for array in arrays),
                ):
                    while left:
                        left = left[file.write(left) :]
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise

    def drop(self, first: int) -> None:
        """Remove a batch from the journal.

        :param first: the index of its first sample.
        """
        self._path(first).unlink(missing_ok=True)

    def batches(self) -> Iterator[list[tuple[int, NDArray[Any]]]]:
        """The batches in the journal: indices of samples and their states, ``(n_tokens, n_layers, n_embd)``.

        Incomplete files, and files from before the last boot, are left out.
        """
        for path in sorted(self._folder.glob("[0-9]*")):
            # Another worker may remove it at the same moment.
            with contextlib.suppress(FileNotFoundError):
                if batch := _read(path.read_bytes()):
                    yield batch

    def clear(self) -> None:
        """Remove the journal."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, first: int) -> Path:
        return self._folder / str(first)


def _read(data: bytes) -> list[tuple[int, NDArray[Any]]]:
    try:
        line, _, rest = data.partition(b"\n")
        head = json.loads(line)
        dtype = DTYPES[head["dtype"]]
        ends = np.cumsum([int(np.prod(shape)) for shape in head["shapes"]])
        flat = np.frombuffer(rest, dtype)
        if head["boot"] != boot_id() or len(flat) != ends[-1]:
            return []
        parts = np.split(flat, ends[:-1])
        return [
            (index, part.reshape(shape))
            for index, part, shape in zip(head["samples"], parts, head["shapes"], strict=True)
        ]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


def boot_id() -> str:
    """Identifier of this boot of the machine: parts of files from before a power failure may be zero.

    Empty if the system has none.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
