"""Memory budget of the responses of all requests together."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llamatap.serve.errors import ApiError

__all__ = ["Budget", "ResponseEnd"]

# Key of a request's scope: callbacks for the end of its response.
_ENDS = "llamatap.ends"


class ResponseEnd:
    """Middleware: returns the memory of a request to the budget once its response was sent or has failed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as ends:
            scope[_ENDS] = ends
            await self.app(scope, receive, send)


class Budget:
    """Memory for the states and prompt log-probabilities of all requests, from before they are computed until
    they are sent. For one event loop.

    :param total: bytes.
    :param most_waiting: requests that may wait for memory; further ones get 429.
    """

    def __init__(self, total: int, most_waiting: int) -> None:
        self.total = total
        self.free = total
        self.most_waiting = most_waiting
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, request: Request, n_bytes: int) -> None:
        """Take bytes for a request, until its response was sent. Requests are served in order.

        :raises ApiError: 413, more than the total; 429, too many requests wait.
        """
        if n_bytes > self.total:
            raise ApiError(
                413,
                "invalid_request_error",
                "response_too_large",
                f"the states or log-probabilities, with their encoded form, would take {n_bytes} bytes; this "
                f"server has {self.total} for all requests: request fewer of them, float16, or another "
                "encoding_format",
            )
        if self.waiting >= self.most_waiting:
            raise ApiError.queue_full("too many requests are waiting for memory", retry_after=1)
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
