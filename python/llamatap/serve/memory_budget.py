"""Resources of requests in flight: memory for states, and threads for texts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llamatap.serve.errors import ApiError

__all__ = ["Budget", "ResponseEnd", "Threads"]

_T = TypeVar("_T")

_ENDS = "llamatap.ends"


class ResponseEnd:
    """Middleware: gives back the memory of a request once its response was sent, or cannot be."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as ends:
            scope[_ENDS] = ends
            await self.app(scope, receive, send)


def _too_many(what: str) -> ApiError:
    return ApiError(
        429, "rate_limit_error", "queue_full", f"too many requests wait for {what}", retry_after=1
    )


class Budget:
    """Bytes that the states of all requests, and their prompts' log-probabilities, may take together, from
    before they are computed until they are sent. Of one event loop.

    :param total: bytes.
    :param most_waiting: requests that may wait for their share; further ones get 429.
    """

    def __init__(self, total: int, most_waiting: int) -> None:
        self.total = total
        self.free = total
        self.most_waiting = most_waiting
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, request: Request, n_bytes: int) -> None:
        """Take bytes until the end of a request's response; in the order in which they are asked for.

        :raises ApiError: there are never so many, or too many requests wait.
        """
        if n_bytes > self.total:
            raise ApiError(
                413,
                "invalid_request_error",
                "response_too_large",
                f"the states or log-probabilities, and what they are encoded to, would take {n_bytes} bytes; "
                f"this server has {self.total} for those of all requests: ask for fewer of them, for "
                "float16, or for another encoding_format",
            )
        if self.waiting >= self.most_waiting:
            raise _too_many("memory")
        self.waiting += 1
        try:
            async with self._turn:
                while n_bytes > self.free:
                    self._freed.clear()
                    await self._freed.wait()
                self.free -= n_bytes
        finally:
            self.waiting -= 1
        ends: contextlib.ExitStack = request.scope[_ENDS]
        ends.callback(self._give, n_bytes)

    def _give(self, n_bytes: int) -> None:
        self.free += n_bytes
        self._freed.set()


class Threads:
    """Threads for long work: texts that are tokenised, states that are encoded.

    :param most_waiting: requests that may wait for one; further ones get 429.
    """

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        n_threads = min(os.cpu_count() or 1, 4)
        self._places = anyio.CapacityLimiter(n_threads)
        self._threads = anyio.CapacityLimiter(n_threads)

    @property
    def occupied(self) -> int:
        """Requests that have a thread, or wait for one."""
        found = self._places.statistics()
        return found.borrowed_tokens + found.tasks_waiting

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run some work in a thread. Cancelled, it returns when the work is done: a thread cannot be stopped,
        and until then the request keeps its place and its memory.

        :raises ApiError: too many requests wait.
        """
        if self._places.statistics().tasks_waiting >= self.most_waiting:
            raise _too_many("a thread")
        async with self._places:
            task = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=self._threads))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait([task])
                raise
