"""HTTP protocol of a connection: uvicorn's, extended by deadlines.

uvicorn itself limits only idle connections (``timeout_keep_alive``). Its ``limit_concurrency`` also refuses
``/health``, and counts clients that send nothing.
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

from llamatap.serve.drain_deadline import shutting_down
from llamatap.serve.errors import ApiError, error_response
from llamatap.serve.http.connection_registry import ConnectionRegistry, Phase, too_many_connections
from llamatap.serve.http.socket_buffers import undelivered, unread
from llamatap.serve.logs import logger
from llamatap.serve.options import ConnectionOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["HttpConfig", "HttpProtocol"]

# After an error response, how long and how many bytes to keep reading before closing.
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 2**20
# Maximum size of incomplete headers, in bytes.
_MOST_HEADER_BYTES = 2**14


class HttpProtocol(H11Protocol):
    """A connection of HTTP/1.1 with deadlines.

    :ivar since: when its phase began, on the event loop's clock.
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
        self.since = self.loop.time()
        self._phase: Phase = "headers"
        # Unsent bytes, and when the client last read some.
        self._unsent = 0
        self._taken_at = self.since
        # Whether to close it after its next response, because there are too many connections.
        self._evicted = False
        # Bytes received after the final response; None until then.
        self._late_bytes: int | None = None
        self._full_app: ASGIApp = self.app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.registry.admit(self)
        if self.registry.full:
            self.app = self._answer_briefly

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.registry.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._late_bytes is not None:
            self._late_bytes += len(data)
            if self._late_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase()

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, "invalid_request_error", "invalid_http", "the request is not valid HTTP/1.1")
        # uvicorn calls this while it handles h11's exception.
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            said = f"the headers are larger than {_MOST_HEADER_BYTES} bytes"
            error = ApiError(431, "invalid_request_error", "headers_too_large", said)
        self.refuse(error)

    def _should_upgrade(self) -> bool:
        # No WebSockets. uvicorn would log advice to install a library for them.
        return False

    def shutdown(self) -> None:
        """Stop with the server: refuse a request that is incomplete, finish one that is in flight."""
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
        """Idle, reading headers or a body, busy with a response, or closing."""
        self._update_phase()
        return self._phase

    @property
    def waits(self) -> bool:
        """Whether the server is waiting for the client."""
        return self.phase in ("idle", "headers", "body")

    def refuse(self, error: ApiError) -> None:
        """Close the connection; a request that has begun is answered with an error."""
        if self.cycle is not None:
            # Ignore the app's responses from here on.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._current_phase() == "closing":
            return
        half = self._current_phase() == "body"
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
        """Close the connection once the client has closed it.

        If it were closed now, the kernel would answer unread and later data with a reset, and the client
        would never see what was sent before.
        """
        self._late_bytes = 0
        self.registry.linger(self)
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def evict(self) -> None:
        """Close the connection because there are too many. A request that has begun, or is on its way, is
        answered first: ``GET`` normally, others with 503."""
        silent = not self.conn.trailing_data[0] and self.phase in ("headers", "idle")
        fresh = self._phase == "headers" and self.loop.time() - self.since < _LINGER_SECONDS
        if silent and (fresh or unread(self.transport.get_extra_info("socket"))):
            self._evicted = True
            self.app = self._answer_briefly
            self.registry.linger(self)
            self.loop.call_later(_LINGER_SECONDS, self._end_eviction)
            return
        self.registry.forget(self)
        self.refuse(too_many_connections())

    def _end_eviction(self) -> None:
        if self.waits:
            self.refuse(too_many_connections())

    def check(self) -> None:
        """Close the connection if it exceeded a deadline."""
        self._update_phase()
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
            # The kernel buffers megabytes, and accepts more only once a third of them is delivered.
            unsent += undelivered(self.transport.get_extra_info("socket"))
        adding = self._phase == "busy" and not self.flow.write_paused
        if adding or unsent < self._unsent or unsent == 0:
            self._taken_at = self.loop.time()
        self._unsent = unsent
        if self.loop.time() - self._taken_at > self.options.send_timeout:
            self.transport.abort()

    def _update_phase(self) -> None:
        phase = self._current_phase()
        if phase != self._phase:
            self._phase = phase
            self.since = self.loop.time()

    def _current_phase(self) -> Phase:
        if self._late_bytes is not None or self.transport.is_closing():
            return "closing"
        # A body still arriving after the response also counts.
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.cycle is not None and not self.cycle.response_complete:
            return "busy"
        if self.cycle is None or self.conn.trailing_data[0]:
            return "headers"
        return "idle"

    async def _answer_briefly(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app of connections beyond the limit: ``GET`` is answered normally; other requests get 503 while
        all connections are busy."""
        if self._evicted:
            self._close_after_response()
        if scope["method"] in ("GET", "HEAD") or not (self._evicted or self.registry.full):
            await self._full_app(scope, receive, send)
            return
        logger.warning("all %d connections are in use: further requests get 503", self.registry.most)
        self.refuse(too_many_connections(f"all {self.registry.most} connections of the server are in use"))


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, with limits of connections."""

    def __init__(self, app: FastAPI, options: ConnectionOptions, **more: Any) -> None:
        self.connections = ConnectionRegistry(options)
        super().__init__(
            app,
            http=HttpProtocol,
            ws="none",
            server_header=False,
            # One event-loop turn may accept a whole backlog before it is counted.
            backlog=self.connections.backlog,
            log_config=None,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            **more,
        )
        # Annotated as an integer, but any number works.
        self.timeout_keep_alive = options.idle_timeout  # type: ignore[assignment]
