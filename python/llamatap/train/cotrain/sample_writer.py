"""Writer of samples: a thread that puts finished texts into the folder, within bounds of memory and disk."""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections import Counter, deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamatap.states import States

__all__ = ["SampleWriter", "sample_numbers"]

_logger = logging.getLogger("llamatap")

_NAME = re.compile(r"hs_(\d+)\.safetensors")
# Generously, for the header of a file: names, shapes, provenance.
_HEADER_BYTES = 8192


def sample_numbers(folder: Path) -> list[int]:
    """The numbers of the samples in a folder, oldest first."""
    return sorted(int(found[1]) for one in folder.iterdir() if (found := _NAME.fullmatch(one.name)))


class SampleWriter:
    """Writes samples in a thread of its own, through a connector of files. :meth:`put` never waits.

    :param folder: the folder of the samples; what an earlier process left there counts, too.
    :param max_bytes: size limit of all samples. The oldest are removed before a new one is written.
    :param queue_bytes: limit for the states of samples that wait to be written.
    :ivar written: number of samples written.
    """

    def __init__(self, folder: Path, max_bytes: int, queue_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._queue_bytes = queue_bytes
        #: Size of each sample, oldest first.
        self._sizes = {number: self._size(number) for number in sample_numbers(folder)}
        self._next = max(self._sizes, default=-1) + 1
        self.written = 0
        self._dropped: Counter[str] = Counter()
        self._queue: deque[tuple[States, NDArray[np.float32]]] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="llamatap-samples", daemon=True)
        self._thread.start()

    def put(self, states: States, loss_mask: NDArray[np.float32]) -> None:
        """Queue a sample, or drop it."""
        with self._changed:
            if self._closing or self._waiting_bytes + states.array.nbytes > self._queue_bytes:
                self._dropped["queue full"] += 1
                return
            self._queue.append((states, loss_mask))
            self._waiting_bytes += states.array.nbytes
            self._changed.notify_all()

    def drop(self, reason: str) -> None:
        """Count a text that gives no sample."""
        with self._changed:
            self._dropped[reason] += 1

    @property
    def dropped(self) -> dict[str, int]:
        """Number of samples that are gone, or never were, by reason: "oldest" for those removed to make room,
        "queue full", "too large", "not finite", "no room on the disk", "cannot be written"."""
        with self._changed:
            return dict(self._dropped)

    @property
    def n_bytes(self) -> int:
        """Size of all samples in the folder."""
        with self._changed:
            return sum(self._sizes.values())

    def flush(self, seconds: float = 30.0) -> bool:
        """Wait until all queued samples are written or dropped. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                states, loss_mask = self._queue.popleft()
                self._waiting_bytes -= states.array.nbytes
                self._busy = True
            try:
                reason = self._write(states, loss_mask)
            except Exception:
                # The next ones may do better.
                _logger.exception("a sample of co-training cannot be written")
                reason = "cannot be written"
            del states, loss_mask
            with self._changed:
                self._busy = False
                self.written += reason is None
                if reason is not None:
                    self._dropped[reason] += 1
                self._changed.notify_all()

    def _write(self, states: States, loss_mask: NDArray[np.float32]) -> str | None:
        """Write a sample. Returns the reason if it was dropped."""
        # Connectors import this package.
        from llamatap.connectors.files import FileConnector

        if states.nonfinite_layers():
            return "not finite"
        n_bytes = states.array.nbytes + 12 * len(states) + _HEADER_BYTES
        if n_bytes > self._max_bytes:
            return "too large"
        number = self._next
        self._next += 1
        try:
            self._make_room(n_bytes)
            FileConnector(self._folder).put(states, index=number, loss_mask=loss_mask)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return "no room on the disk"
            _logger.warning("a sample of co-training cannot be written: %s", error)
            return "cannot be written"
        with self._changed:
            self._sizes[number] = self._size(number)
        return None

    def _make_room(self, n_bytes: int) -> None:
        with self._changed:
            taken = sum(self._sizes.values())
            while self._sizes and taken + n_bytes > self._max_bytes:
                oldest = next(iter(self._sizes))
                taken -= self._sizes.pop(oldest)
                self._path(oldest).unlink(missing_ok=True)
                self._dropped["oldest"] += 1

    def _path(self, number: int) -> Path:
        return self._folder / f"hs_{number}.safetensors"

    def _size(self, number: int) -> int:
        try:
            return self._path(number).stat().st_size
        except FileNotFoundError:
            return 0
