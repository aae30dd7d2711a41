"""Life of the HTTP server around the app: startup, signals (SIGTERM, Ctrl-C), shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from llamatap.errors import InvalidInputError
from llamatap.serve.app_state import AppState
from llamatap.serve.http.http_protocol import HttpConfig
from llamatap.serve.logs import logger
from llamatap.serve.options import ConnectionOptions

__all__ = ["HttpServer", "check_port"]

# Time for sending the responses that a request was not finished.
_GRACE_SECONDS = 5.0

_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def check_port(host: str, port: int) -> None:
    """Check that a server can listen at an address: before models are loaded, which takes long.

    :raises InvalidInputError: it cannot.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                # As asyncio makes its sockets.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(
                f"--port {port} of {host} is in use; choose another one, or 0 for any free one"
            ) from None
        raise InvalidInputError(f"--host {host} --port {port}: {error.strerror}") from None


class HttpServer(uvicorn.Server):
    """Serves an app until SIGTERM or Ctrl-C.

    :param app: of :func:`llamatap.serve.create_app`.
    :param drain: seconds that requests in flight have to finish when the server stops; a second signal ends
        them at once.
    :param more: options of :class:`uvicorn.Config`.
    """

    def __init__(
        self, app: FastAPI, options: ConnectionOptions | None = None, *, drain: float = 60.0, **more: Any
    ) -> None:
        config = HttpConfig(app, options or ConnectionOptions(), **more)
        # By then all requests have been ended and all connections closed.
        config.timeout_graceful_shutdown = math.ceil(drain + 2 * _GRACE_SECONDS)
        super().__init__(config)
        self.drain = drain
        self.connections = config.connections
        self.app_state: AppState = app.state.server
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._refused_at = -math.inf

    async def startup(self, sockets: Any = None) -> None:
        """Start listening and watching the connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._failed)
        await super().startup(sockets)
        self._watch = asyncio.create_task(self.connections.watch())
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        logger.info("running on http://%s:%d (Ctrl-C ends it)", f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one stops the server, the second one ends requests in flight, the third
        one ends the process."""
        if self.should_exit and not self._hurry.is_set() and self._loop is not None:
            self._captured_signals.append(sig)
            self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            super().handle_exit(signal.SIGINT if self._hurry.is_set() else sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse new requests, drop half-open connections, finish or end requests in flight."""
        half_open = sum(one.phase != "idle" for one in self.connections.waiting())
        busy = len(self.connections) - len(self.connections.waiting())
        logger.info(
            "stopping: %d requests in flight have %g s%s; %d half-open connections were dropped",
            busy,
            self.drain,
            " (a second Ctrl-C ends them at once)" if busy else "",
            half_open,
        )
        end = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            for task in (end, self._watch):
                if task is not None:
                    task.cancel()

    async def _end(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self.drain)
        if self.server_state.tasks:
            logger.warning("%d requests were not finished: they end with 503", len(self.server_state.tasks))
        self.app_state.drain_deadline.expire()
        await asyncio.sleep(_GRACE_SECONDS)
        # A client that reads nothing gets no error.
        self.connections.abort()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop itself, such as a connection that it cannot accept."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
            # asyncio reports each connection of the backlog, and tries again after a second.
            if time.monotonic() - self._refused_at >= 1.0:
                self._refused_at = time.monotonic()
                dropped = self.connections.drop(self.connections.reserve)
                logger.error(
                    "no connection can be accepted: %s; dropped %d waiting ones", error.strerror, dropped
                )
        elif not (self.should_exit and "_start_serving" in str(context.get("handle"))):
            # Not the retry that finds the listener closed.
            loop.default_exception_handler(context)
