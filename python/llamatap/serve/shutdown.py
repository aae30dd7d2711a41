"""The end of a server: what is in flight ends with an answer, not with a cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from llamatap.serve.errors import ApiError

__all__ = ["Ending", "shutting_down"]


def shutting_down(message: str = "the server is shutting down") -> ApiError:
    """The error of a request that a stopping server does not take, or cannot finish."""
    return ApiError(503, "unavailable_error", "shutting_down", message, retry_after=5)


class Ending:
    """The moment at which requests in flight must end, finished or not. Of one event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._told: set[Callable[[], object]] = set()

    @property
    def begun(self) -> bool:
        """Whether it has come."""
        return self._begun.is_set()

    def begin(self) -> None:
        """End what is in flight."""
        self._begun.set()
        for tell in tuple(self._told):
            tell()

    async def wait(self) -> None:
        """Return when it has come."""
        await self._begun.wait()

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Call a function when the end comes during the block, or has come before it."""
        if self.begun:
            tell()
        self._told.add(tell)
        try:
            yield
        finally:
            self._told.discard(tell)
