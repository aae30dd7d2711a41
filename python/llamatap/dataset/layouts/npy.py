"""Layout for memory mapping: one array per layer, the tokens of all samples concatenated.

``layer_{k}.npy`` [n_tokens, hidden] for each layer (``layer_norm.npy`` for norm(H_n)), in the data set's
dtype. NumPy has no bfloat16, so that one is written as uint16; to read it: ``numpy.load(..., mmap_mode="r")``
and ``.view(ml_dtypes.bfloat16)``. ``tokens.npy`` [n_tokens] int32, ``loss_mask.npy`` [n_tokens] bool, and
``index.npy`` [n_samples, 3] int64: a sample's first row in the arrays, its number of rows, and its row of
the input. Rows that belong to no sample of the index are zero: their states were not finite. The arrays have
their full size from the start, and are zero where samples are still missing.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.batch_journal import boot_id
from llamatap.dataset.layouts.layout import Layout
from llamatap.layers import LayerId
from llamatap.states import DTYPES
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["NpyLayout"]

# Marks of samples: written, which a power failure may undo; and synced to the disk.
_WRITTEN, _SYNCED = 1, 2
# Seconds between syncs.
_INTERVAL = 30.0


class NpyLayout(Layout):
    """Layout ``npy``: see the module."""

    name = "npy"

    @property
    def _marks(self) -> Path:
        # One byte per sample, set once the sample is written.
        return self.folder / ".llamatap" / "written"

    @property
    def _boot(self) -> Path:
        return self.folder / ".llamatap" / "boot"

    def _path(self, layer: LayerId) -> Path:
        return self.folder / f"layer_{layer}.npy"

    def _header(self) -> bytes:
        dtype = np.dtype(np.uint16) if self.dtype == "bfloat16" else DTYPES[self.dtype]
        shape = (self.samples.n_tokens, self.n_embd)
        buffer = io.BytesIO()
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, header)
        return buffer.getvalue()

    def _file_bytes(self) -> int:
        return len(self._header()) + self.samples.n_tokens * self.n_embd * self.item_bytes

    def n_bytes(self) -> int:
        return len(set(self.columns)) * self._file_bytes()

    def n_bytes_there(self) -> int:
        return sum(path.stat().st_size for path in map(self._path, set(self.columns)) if path.exists())

    def open(self, indices: Iterable[int]) -> None:
        for layer in set(self.columns):
            path = self._path(layer)
            if path.exists() and path.stat().st_size == self._file_bytes():
                continue
            # Leftover marks are stale: the rows that they mark are missing.
            self._marks.unlink(missing_ok=True)
            with atomic_path(path) as scratch, scratch.open("wb") as file:
                file.write(self._header())
                file.flush()
                # Allocate the space now, or fail now.
                os.posix_fallocate(file.fileno(), 0, self._file_bytes())
        marks = self.written()
        if not self._marks.exists() or self._rebooted():
            with atomic_path(self._marks) as scratch:
                scratch.write_bytes((marks * np.uint8(_SYNCED)).tobytes())
            with atomic_path(self._boot) as scratch:
                scratch.write_text(boot_id())
        self._unsynced: list[int] = []
        self._last_sync = time.monotonic()

    def _rebooted(self) -> bool:
        """Whether the machine was rebooted since the marks were started."""
        try:
            return self._boot.read_text() != boot_id()
        except FileNotFoundError:
            return True

    def written(self) -> NDArray[np.bool_]:
        try:
            marks = np.frombuffer(self._marks.read_bytes(), np.uint8)
        except FileNotFoundError:
            return np.zeros(len(self.samples), np.bool_)
        if len(marks) != len(self.samples):
            return np.zeros(len(self.samples), np.bool_)
        return marks >= (_SYNCED if self._rebooted() else _WRITTEN)

    def write(self, index: int, states: NDArray[Any]) -> None:
        start = len(self._header()) + int(self.samples.offsets[index]) * self.n_embd * self.item_bytes
        for column, layer in enumerate(self.columns):
            _write_at(self._path(layer), start, np.ascontiguousarray(states[:, column]).tobytes())
        _write_at(self._marks, index, bytes([_WRITTEN]))
        self._unsynced.append(index)
        if time.monotonic() - self._last_sync > _INTERVAL:
            self.sync()

    def sync(self) -> None:
        self._last_sync = time.monotonic()
        for layer in self.columns:
            with self._path(layer).open("rb") as file:
                os.fsync(file.fileno())
        for index in self._unsynced:
            _write_at(self._marks, index, bytes([_SYNCED]))
        self._unsynced.clear()

    def finish(self, lost: Sequence[int]) -> None:
        tokens = np.concatenate([sample.tokens for sample in self.samples])
        mask = np.concatenate([sample.loss_mask for sample in self.samples])
        kept = np.setdiff1d(np.arange(len(self.samples)), np.array(lost, np.int64))
        columns = (self.samples.offsets[:-1], self.samples.lengths, self.samples.rows)
        index = np.stack([column[kept] for column in columns], 1)
        for name, array in (("tokens", tokens), ("loss_mask", mask), ("index", index)):
            with atomic_path(self.folder / f"{name}.npy") as scratch, scratch.open("wb") as file:
                np.save(file, array)


def _write_at(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
