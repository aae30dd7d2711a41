"""The open connections of a server: their number, their time limits, and the order of closing them."""

from __future__ import annotations

import asyncio
import os
from typing import Literal, Protocol

from llamatap.serve.errors import ApiError
from llamatap.serve.http.connection_options import ConnectionOptions
from llamatap.serve.logs import logger

__all__ = ["Connections", "OpenConnection", "Phase", "crowded"]

# Connections beyond the limit, for quick answers while all others are busy.
_RESERVE = 16
# Connections that are being closed: until their client was told why, and has no more to say.
_MOST_PARTING = 1024

Phase = Literal["idle", "headers", "body", "busy", "closing"]


def crowded(message: str = "the server has too many connections") -> ApiError:
    """The error of a connection or request for which there is no room."""
    return ApiError(503, "unavailable_error", "too_many_connections", message, retry_after=1)


class OpenConnection(Protocol):
    """One connection, as :class:`Connections` sees it.

    :ivar since: when its phase began, on the event loop's clock.
    """

    transport: asyncio.Transport
    since: float

    @property
    def phase(self) -> Phase:
        """Idle, reading headers or a body, busy with a response, or closing."""

    @property
    def waits(self) -> bool:
        """Whether the client has to send something."""

    def part(self) -> None:
        """Close the connection, for there are too many."""

    def refuse(self, error: ApiError) -> None:
        """Close the connection; a request that was begun is answered with an error."""

    def check(self) -> None:
        """Close the connection if it is beyond a time limit."""


def _free_descriptors() -> int | None:
    """Files that this process may still open; None where there is no limit."""
    try:
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return None
    return None if most == resource.RLIM_INFINITY else max(most - used, 8)


class Connections:
    """The open connections of a server, all in one event loop.

    :ivar most: ``max_connections``, or fewer where the process may not open so many files.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.most = options.max_connections
        self.reserve = _RESERVE
        self.most_parting = _MOST_PARTING
        self.backlog = 2048
        self._open: set[OpenConnection] = set()
        # In the order in which they came.
        self._parting: dict[OpenConnection, None] = {}
        if (free := _free_descriptors()) is not None:
            # The rest is for files of other kinds.
            self.most = min(self.most, max(free // 2, 1))
            self.reserve = min(self.reserve, max(free // 8, 1))
            self.backlog = min(self.backlog, max(free // 4, 1))
            left = free - self.most - self.reserve - self.backlog
            self.most_parting = min(self.most_parting, max(left // 2, 1))
        if self.most < options.max_connections:
            logger.warning(
                "%d connections at most, not %d: this process may open %d more files (ulimit -n)",
                self.most,
                options.max_connections,
                free,
            )

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether there are more of them than the limit, all of them busy."""
        return len(self._open) > self.most

    def waiting(self) -> list[OpenConnection]:
        """The connections whose client has to send something, the one that has waited longest first."""
        return sorted((one for one in self._open if one.waits), key=lambda one: one.since)

    def admit(self, new: OpenConnection) -> None:
        """Register a new connection; where there are too many, part with one that waits, or the new one."""
        self._open.add(new)
        if len(self._open) <= self.most:
            return
        waiting = [one for one in self.waiting() if one is not new][:1]
        if not waiting and len(self._open) > self.most + self.reserve:
            waiting = [new]
        for one in waiting:
            one.part()

    def parting(self, one: OpenConnection) -> None:
        """Count a connection no longer, for it is being closed; of too many such, close the oldest now."""
        self._open.discard(one)
        self._parting[one] = None
        if len(self._parting) > self.most_parting:
            oldest = next(iter(self._parting))
            self.forget(oldest)
            oldest.transport.abort()

    def drop(self, count: int) -> int:
        """Close connections at once, those that are parting and then those that wait longest.

        :returns: how many were closed.
        """
        dropped = [*self._parting, *self.waiting()][:count]
        for one in dropped:
            one.refuse(crowded())
            one.transport.abort()
            self.forget(one)
        return len(dropped)

    def forget(self, one: OpenConnection) -> None:
        """Remove a connection that was closed."""
        self._open.discard(one)
        self._parting.pop(one, None)

    def abort(self) -> None:
        """Close all connections at once, also those in the middle of a response."""
        for one in (*self._open, *self._parting):
            one.transport.abort()

    async def watch(self) -> None:
        """Close connections beyond their time limits, again and again until cancelled."""
        options = self.options
        shortest = min(options.header_timeout, options.body_timeout, options.send_timeout)
        while True:
            await asyncio.sleep(min(shortest / 4, 1.0))
            for one in (*self._open, *self._parting):
                self._check(one)

    def _check(self, one: OpenConnection) -> None:
        try:
            one.check()
        except Exception as error:
            # It reads uvicorn's private state. The time limits of all others must hold.
            logger.error("a connection is closed, for its time limits cannot be checked: %r", error)
            one.transport.abort()
            self.forget(one)
