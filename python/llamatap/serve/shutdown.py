"""Shutdown: the moment at which requests in flight must end, and their answer then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from llamatap.serve.errors import ApiError

__all__ = ["Ending", "shutting_down"]


def shutting_down(message: str = "the server is shutting down") -> ApiError:
    """The error of a request that a server refuses or cannot finish because it is stopping."""
    return ApiError(503, "unavailable_error", "shutting_down", message, retry_after=5)


class Ending:
    """The moment at which requests in flight must end, finished or not. For one event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._told: set[Callable[[], object]] = set()

    @property
    def begun(self) -> bool:
        """Whether requests in flight must end."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Tell all requests in flight to end."""
        self._begun.set()
        for tell in tuple(self._told):
            tell()

    async def wait(self) -> None:
        """Wait until requests in flight must end."""
        await self._begun.wait()

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Context manager: calls a function if the moment comes during the block, or came before it."""
        if self.begun:
            tell()
        self._told.add(tell)
        try:
            yield
        finally:
            self._told.discard(tell)
