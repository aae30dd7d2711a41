"""Registry of a server's open connections: their number, and the order of closing them beyond the limit.

Their deadlines are in :mod:`http_protocol`; the registry asks each connection to check them.
"""

from __future__ import annotations

import asyncio
import os
from typing import Literal, Protocol

from llamatap.serve.errors import ApiError
from llamatap.serve.logs import logger
from llamatap.serve.options import ConnectionOptions

__all__ = ["ConnectionRegistry", "OpenConnection", "Phase", "too_many_connections"]

# Connections beyond the limit, for quick answers while all others are busy.
_RESERVE = 16
# Closing connections, kept open until the client has read the reason.
_MOST_LINGERING = 1024

Phase = Literal["idle", "headers", "body", "busy", "closing"]


def too_many_connections(message: str = "the server has too many connections") -> ApiError:
    """503: there is no room for a connection, or for its request."""
    return ApiError(503, "unavailable_error", "too_many_connections", message, retry_after=1)


class OpenConnection(Protocol):
    """One connection, as :class:`ConnectionRegistry` sees it.

    :ivar since: when its phase began, on the event loop's clock.
    """

    transport: asyncio.Transport
    since: float

    @property
    def phase(self) -> Phase:
        """Idle, reading headers or a body, busy with a response, or closing."""

    @property
    def waits(self) -> bool:
        """Whether the server is waiting for the client."""

    def evict(self) -> None:
        """Close it because there are too many."""

    def refuse(self, error: ApiError) -> None:
        """Close it; a request that has begun is answered with an error."""

    def check(self) -> None:
        """Close it if it is beyond a time limit."""


class ConnectionRegistry:
    """The open connections of a server, all in one event loop.

    :ivar most: ``max_connections``, lowered to fit the file-descriptor limit.
    :ivar reserve: connections beyond ``most``, for quick answers.
    :ivar backlog: connections that the kernel may queue.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.most = options.max_connections
        self.reserve = _RESERVE
        self.most_lingering = _MOST_LINGERING
        self.backlog = 2048
        self._open: set[OpenConnection] = set()
        # In the order in which they came.
        self._lingering: dict[OpenConnection, None] = {}
        if (free := _free_descriptors()) is not None:
            # The rest is for other files.
            self.most = min(self.most, max(free // 2, 1))
            self.reserve = min(self.reserve, max(free // 8, 1))
            self.backlog = min(self.backlog, max(free // 4, 1))
            left = free - self.most - self.reserve - self.backlog
            self.most_lingering = min(self.most_lingering, max(left // 2, 1))
        if self.most < options.max_connections:
            logger.warning(
                "limited to %d connections instead of %d: this process may open %d more files (ulimit -n)",
                self.most,
                options.max_connections,
                free,
            )

    def __len__(self) -> int:
        """The number of open connections, lingering ones excluded."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded; then every connection is busy."""
        return len(self._open) > self.most

    def waiting(self) -> list[OpenConnection]:
        """The connections that wait for their client, the longest wait first."""
        return sorted((one for one in self._open if one.waits), key=lambda one: one.since)

    def admit(self, new: OpenConnection) -> None:
        """Register a new connection. If there are too many, evict the one that has waited longest for its
        client; if none waits and the reserve is used up, evict the new one."""
        self._open.add(new)
        if len(self._open) <= self.most:
            return
        oldest = next((one for one in self.waiting() if one is not new), None)
        if oldest is not None:
            oldest.evict()
        elif len(self._open) > self.most + self.reserve:
            new.evict()

    def linger(self, connection: OpenConnection) -> None:
        """Stop counting a connection that is being closed. If too many linger, close the oldest of them
        now."""
        self._open.discard(connection)
        self._lingering[connection] = None
        if len(self._lingering) > self.most_lingering:
            oldest = next(iter(self._lingering))
            self.forget(oldest)
            oldest.transport.abort()

    def drop(self, count: int) -> int:
        """Close connections at once: lingering ones, then those that have waited longest for their client.

        :returns: the number of closed connections.
        """
        dropped = [*self._lingering, *self.waiting()][:count]
        for connection in dropped:
            connection.refuse(too_many_connections())
            connection.transport.abort()
            self.forget(connection)
        return len(dropped)

    def forget(self, connection: OpenConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self._lingering.pop(connection, None)

    def abort(self) -> None:
        """Close all connections at once, even in the middle of a response."""
        for connection in (*self._open, *self._lingering):
            connection.transport.abort()

    async def watch(self) -> None:
        """Close connections beyond their time limits, until cancelled."""
        options = self.options
        shortest = min(options.header_timeout, options.body_timeout, options.send_timeout)
        while True:
            await asyncio.sleep(min(shortest / 4, 1.0))
            for connection in (*self._open, *self._lingering):
                self._check(connection)

    def _check(self, connection: OpenConnection) -> None:
        try:
            connection.check()
        except Exception as error:
            # check() reads uvicorn's private state and may fail; still check the others.
            logger.error("closed a connection whose deadlines could not be checked: %r", error)
            connection.transport.abort()
            self.forget(connection)


def _free_descriptors() -> int | None:
    """The number of files that this process may still open; None where there is no limit."""
    try:
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return None
    return None if most == resource.RLIM_INFINITY else max(most - used, 8)
