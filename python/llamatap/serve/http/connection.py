"""A connection with deadlines: uvicorn's protocol, extended.

uvicorn itself limits only idle connections (``timeout_keep_alive``). Its ``limit_concurrency`` refuses
``/health`` too, and counts clients that send nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from llamatap.serve.errors import ApiError, error_response
from llamatap.serve.http.connection_options import ConnectionOptions
from llamatap.serve.http.connections import Connections, Phase, crowded
from llamatap.serve.http.socket_buffers import undelivered, unread
from llamatap.serve.logs import logger
from llamatap.serve.shutdown import shutting_down

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Connection", "HttpConfig"]

# For a client that is told why its connection is closed.
_PARTING_SECONDS = 2.0
_PARTING_BYTES = 2**20
# Of headers that have not arrived whole.
_MOST_HEADER_BYTES = 2**14


class Connection(H11Protocol):
    """A connection of HTTP/1.1 with deadlines.

    :ivar since: when it came to wait for what it waits for, on the event loop's clock.
    """

    cycle: RequestResponseCycle | None  # type: ignore[assignment]

    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.registry = config.connections
        self.options = self.registry.options
        self.since = self._taken_at = self.loop.time()
        self._phase: Phase = "headers"
        self._unsent = 0
        self._parts = False
        # The bytes that came after the last answer; None before it.
        self._late: int | None = None
        self._whole_app: ASGIApp = self.app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.registry.admit(self)
        if self.registry.full:
            self.app = self._quick_answers

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.registry.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._late is not None:
            self._late += len(data)
            if self._late > _PARTING_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, "invalid_request_error", "invalid_http", "this is no request of HTTP/1.1")
        # uvicorn calls this while it handles h11's exception.
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            said = f"the headers are larger than {_MOST_HEADER_BYTES} bytes"
            error = ApiError(431, "invalid_request_error", "headers_too_large", said)
        self.refuse(error)

    def _should_upgrade(self) -> bool:
        # No WebSockets; uvicorn's would advise the log's reader to install a library for them.
        return False

    def shutdown(self) -> None:
        """Stop with the server: refuse a request that has not arrived whole, finish one in flight."""
        if self.waits and self._phase != "idle":
            self.refuse(shutting_down())
        elif self._phase != "closing":
            super().shutdown()
            self._close_after_response()

    def _close_after_response(self) -> None:
        if self.cycle is not None:
            self.cycle.keep_alive = False
            self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"close")]

    @property
    def phase(self) -> Phase:
        """The state of the connection: idle, reading headers or a body, busy with a response, or closing."""
        self._note()
        return self._phase

    @property
    def waits(self) -> bool:
        """Whether the client has to send something."""
        return self.phase in ("idle", "headers", "body")

    def refuse(self, error: ApiError) -> None:
        """Close the connection; a request that was begun is answered with an error."""
        if self.cycle is not None:
            # Answers of the app are too late from here on.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._now() == "closing":
            return
        half = self._now() == "body"
        begun = self.conn.trailing_data[0] or self.conn.their_state is h11.ERROR
        if self.conn.our_state is h11.SEND_RESPONSE or (begun and self.conn.our_state is h11.IDLE):
            response = error_response(error)
            response.headers["Connection"] = "close"
            for event in (
                h11.Response(status_code=error.status, headers=response.raw_headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self._linger()
        elif half:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close the connection once the client has: the kernel answers what comes after a close, or is unread
        then, with a reset, and the client would never see what was sent before."""
        self._late = 0
        self.registry.parting(self)
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(_PARTING_SECONDS, self.transport.abort)

    def part(self) -> None:
        """Close the connection, for there are too many. A request that was begun, or that is on its way, is
        answered with 503 (``GET`` as ever)."""
        silent = not self.conn.trailing_data[0] and self.phase in ("headers", "idle")
        fresh = self._phase == "headers" and self.loop.time() - self.since < _PARTING_SECONDS
        if silent and (fresh or unread(self.transport.get_extra_info("socket"))):
            self._parts = True
            self.app = self._quick_answers
            self.registry.parting(self)
            self.loop.call_later(_PARTING_SECONDS, self._parted)
            return
        self.registry.forget(self)
        self.refuse(crowded())

    def _parted(self) -> None:
        if self.waits:
            self.refuse(crowded())

    def check(self) -> None:
        """Close the connection if it is beyond a time limit."""
        self._note()
        waited = self.loop.time() - self.since
        late = None
        if self._phase == "headers" and waited > self.options.header_timeout:
            late = f"the headers took more than {self.options.header_timeout:g} s"
        elif self._phase == "body" and waited > self.options.body_timeout:
            late = f"the body took more than {self.options.body_timeout:g} s"
        if late is not None:
            self.refuse(ApiError(408, "invalid_request_error", "request_timeout", late))
        self._check_sending()

    def _check_sending(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            # The kernel holds megabytes, and takes more only when a third of them is gone.
            unsent += undelivered(self.transport.get_extra_info("socket"))
        adding = self._phase == "busy" and not self.flow.write_paused
        if adding or unsent < self._unsent or unsent == 0:
            self._taken_at = self.loop.time()
        self._unsent = unsent
        if self.loop.time() - self._taken_at > self.options.send_timeout:
            self.transport.abort()

    def _note(self) -> None:
        phase = self._now()
        if phase != self._phase:
            self._phase = phase
            self.since = self.loop.time()

    def _now(self) -> Phase:
        if self._late is not None or self.transport.is_closing():
            return "closing"
        # Also where the response was sent before: a body that nobody reads holds the connection, too.
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.cycle is not None and not self.cycle.response_complete:
            return "busy"
        if self.cycle is None or self.conn.trailing_data[0]:
            return "headers"
        return "idle"

    async def _quick_answers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app of connections beyond the limit: ``GET`` as ever, else 503 while all are busy."""
        if self._parts:
            self._close_after_response()
        if scope["method"] in ("GET", "HEAD") or not (self._parts or self.registry.full):
            await self._whole_app(scope, receive, send)
            return
        logger.warning("all %d connections are in use: further requests get 503", self.registry.most)
        self.refuse(crowded(f"all {self.registry.most} connections of the server are in use"))


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, with the limits of connections."""

    def __init__(self, app: FastAPI, options: ConnectionOptions, **more: Any) -> None:
        self.connections = Connections(options)
        super().__init__(
            app,
            http=Connection,
            ws="none",
            server_header=False,
            # What is accepted in one turn of the event loop is counted afterwards only.
            backlog=self.connections.backlog,
            log_config=None,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            **more,
        )
        # An integer by its annotation alone.
        self.timeout_keep_alive = options.idle_timeout  # type: ignore[assignment]
