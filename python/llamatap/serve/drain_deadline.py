"""The deadline of a stopping server: when requests in flight must end, and the error that they get.

:mod:`llamatap.serve.http.server_lifecycle` sets it off, after SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from llamatap.serve.errors import ApiError

__all__ = ["DrainDeadline", "shutting_down"]


def shutting_down(message: str = "the server is shutting down") -> ApiError:
    """The error of a request that a server refuses or cannot finish because it is stopping."""
    return ApiError(503, "unavailable_error", "shutting_down", message, retry_after=5)


class DrainDeadline:
    """Time limit of requests in flight when the server stops. For one event loop."""

    def __init__(self) -> None:
        self._expired = asyncio.Event()
        self._callbacks: set[Callable[[], object]] = set()

    @property
    def expired(self) -> bool:
        """Whether requests in flight must end now, finished or not."""
        return self._expired.is_set()

    def expire(self) -> None:
        """End the requests in flight: wake :meth:`wait` and run the callbacks."""
        self._expired.set()
        for callback in tuple(self._callbacks):
            callback()

    async def wait(self) -> None:
        """Wait until requests in flight must end."""
        await self._expired.wait()

    @contextlib.contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Context manager: runs a callback if the deadline expires during the block, or has expired."""
        if self.expired:
            callback()
        self._callbacks.add(callback)
        try:
            yield
        finally:
            self._callbacks.discard(callback)
