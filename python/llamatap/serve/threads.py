"""Threads for long work of requests: tokenising prompts, encoding states."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from llamatap.serve.errors import ApiError

__all__ = ["Threads"]

_T = TypeVar("_T")


class Threads:
    """A few threads that requests share.

    :param most_waiting: requests that may wait for a thread; further ones get 429.
    """

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        n_threads = min(os.cpu_count() or 1, 4)
        self._places = anyio.CapacityLimiter(n_threads)
        self._threads = anyio.CapacityLimiter(n_threads)

    @property
    def occupied(self) -> int:
        """The number of requests that have a thread or wait for one."""
        found = self._places.statistics()
        return found.borrowed_tokens + found.tasks_waiting

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run some work in a thread. If cancelled, returns only after the work is done: a thread cannot be
        stopped, and until then the request keeps its place and its memory.

        :raises ApiError: too many requests are waiting.
        """
        if self._places.statistics().tasks_waiting >= self.most_waiting:
            raise ApiError.queue_full("too many requests are waiting for a thread", retry_after=1)
        async with self._places:
            task = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=self._threads))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task])
                raise
