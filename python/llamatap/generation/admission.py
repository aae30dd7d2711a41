"""Admission: which requests wait, and which are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from llamatap.context import Context
from llamatap.generation.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """The waiting and in-flight requests of a context. Requests are admitted in order of arrival.

    :param n_sequences: maximum number of in-flight requests.
    :ivar in_flight: the admitted requests, oldest first.
    """

    def __init__(self, context: Context, n_sequences: int) -> None:
        self._context = context
        self._n_sequences = n_sequences
        # Other threads may append to it.
        self._waiting: deque[Request] = deque()
        # Set after a request was cancelled that may still be waiting.
        self._cancelling = False
        self.in_flight: list[Request] = []
        self._free_ids = self._all_ids()

    def __bool__(self) -> bool:
        """Whether any request waits or is in flight."""
        return bool(self._waiting or self.in_flight)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting requests, next one first."""
        return tuple(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Can be called from any thread."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Cancel a request, waiting or in flight: :meth:`take_cancelled` returns it. Can be called from any
        thread."""
        request.cancelled.set()
        self._cancelling = True

    def upcoming(self) -> list[Request]:
        """The requests in flight, and the waiting ones that may be admitted next."""
        return [*self.in_flight, *list(self._waiting)[: len(self._free_ids)]]

    def take_cancelled(self) -> list[Request]:
        """The cancelled requests, in flight or waiting; the latter leave the queue."""
        found = [request for request in self.in_flight if request.cancelled.is_set()]
        if self._cancelling:
            # Reset before the scan, so that a request cancelled during it is found in the next round.
            self._cancelling = False
            for request in list(self._waiting):
                if request.cancelled.is_set():
                    self._waiting.remove(request)
                    found.append(request)
        return found

    def admit(self) -> Iterator[Request]:
        """Admit waiting requests while a sequence id is free and the memory has room for the whole text."""
        while self._waiting and self._free_ids:
            request = self._waiting[0]
            if self._context.kv_unified and self.in_flight:
                taken = sum(one.capacity for one in self.in_flight)
                if taken + request.capacity > self._context.n_ctx:
                    return
            self._waiting.popleft()
            request.seq = self._free_ids.pop()
            self.in_flight.append(request)
            yield request

    def retire(self, request: Request) -> None:
        """Remove a finished request from those in flight, and free its sequence id."""
        self.in_flight.remove(request)
        self._free_ids.append(request.seq)

    def drop_in_flight(self) -> list[int]:
        """Drop all requests in flight. Returns their sequence ids, which are now free."""
        seqs = [request.seq for request in self.in_flight]
        self.in_flight = []
        self._free_ids = self._all_ids()
        return seqs

    def drop_waiting(self) -> None:
        """Drop all waiting requests."""
        self._waiting.clear()

    def _all_ids(self) -> list[int]:
        # The lowest is taken first.
        return list(range(self._n_sequences))[::-1]
