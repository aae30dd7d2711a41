"""Cancelling the work of a request whose client disconnects, or whose server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from llamatap.serve.app_state import app_state_of
from llamatap.serve.drain_deadline import shutting_down

__all__ = ["ClientGoneError", "unless_gone"]

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client disconnected, so no response can be sent."""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Run some work for a request; cancel it if the client disconnects.

    :raises ClientGoneError: the client disconnected.
    :raises ApiError: 503, the server stopped before the work was done.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    ended = asyncio.create_task(app_state_of(request).drain_deadline.wait())
    try:
        await asyncio.wait((task, gone, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise shutting_down("the server stopped before the request was finished")
    finally:
        for one in (task, gone, ended):
            if not one.done():
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await one
