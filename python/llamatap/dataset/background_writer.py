"""Writing batches in a background thread, so that computing does not wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

from llamatap.states import States

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BackgroundWriter"]

#: Indices of samples, and their states.
Batch = Sequence[tuple[int, States]]


class BackgroundWriter:
    """Thread that writes batches in the order in which they arrive.

    :param write: writes one sample.
    :param wrote: called after each batch with the indices of its samples.
    :param room: the most batches that are computed and not yet written.
    """

    def __init__(
        self, write: Callable[[int, States], None], wrote: Callable[[Sequence[int]], None], room: int
    ) -> None:
        self._write = write
        self._wrote = wrote
        self._room = threading.Semaphore(room)
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="llamatap-dataset", daemon=True)

    def reserve(self) -> None:
        """Wait for room for one more batch.

        :raises BaseException: the error that writing raised.
        """
        self._room.acquire()
        if self._error is not None:
            raise self._error

    def put(self, batch: Batch) -> None:
        """Queue a batch, after :meth:`reserve`."""
        self._batches.put(batch)

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            # After an error batches are dropped, but still make room: the producer may be waiting for it.
            if self._error is None:
                self._write_batch(batch)
            self._room.release()

    def _write_batch(self, batch: Batch) -> None:
        try:
            for index, states in batch:
                self._write(index, states)
            self._wrote([index for index, _ in batch])
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is queued, also after an error elsewhere, and end the thread."""
        self._batches.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
