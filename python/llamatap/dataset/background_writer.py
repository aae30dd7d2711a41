"""Writing batches in a background thread, so that computing does not wait for the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

from llamatap.states import States

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BackgroundWriter"]

#: Indices of samples, and their states.
Batch = Sequence[tuple[int, States]]


class BackgroundWriter:
    """Thread that writes batches in order of arrival. After an error it writes no more.

    :param write: writes one sample.
    :param wrote: called after each batch with the indices of its samples.
    :param room: maximum number of batches that are computed and not yet written.
    """

    def __init__(
        self, write: Callable[[int, States], None], wrote: Callable[[Sequence[int]], None], room: int
    ) -> None:
        self._write = write
        self._wrote = wrote
        self._room = room
        self._thread = ThreadPoolExecutor(1, "llamatap-dataset")
        self._queued: deque[Future[None]] = deque()
        self._failed = False

    def reserve(self) -> None:
        """Wait for room for one more batch.

        :raises BaseException: the error that writing raised.
        """
        while self._queued and (len(self._queued) >= self._room or self._queued[0].done()):
            self._queued.popleft().result()

    def put(self, batch: Batch) -> None:
        """Queue a batch, after :meth:`reserve`."""
        self._queued.append(self._thread.submit(self._write_batch, batch))

    def _write_batch(self, batch: Batch) -> None:
        if self._failed:
            return
        self._failed = True
        for index, states in batch:
            self._write(index, states)
        self._wrote([index for index, _ in batch])
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is queued, also after an error elsewhere, and end the thread."""
        self._thread.shutdown()
        if error is None:
            for written in self._queued:
                written.result()
