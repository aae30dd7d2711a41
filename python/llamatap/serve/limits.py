"""Who is let in, and how much a request may send: before anything is parsed."""

from __future__ import annotations

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamatap.serve.errors import ApiError, error_response

__all__ = ["ApiKey", "BodyLimit"]

#: What tells nothing of the models: a load balancer, and a browser that is yet to ask for the key.
_OPEN = frozenset(("/", "/health"))


class ApiKey:
    """Middleware: 401 unless ``Authorization: Bearer`` brings the key; compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                error = ApiError(
                    401,
                    "authentication_error",
                    "invalid_api_key",
                    "this server has an API key; send it as 'Authorization: Bearer KEY'",
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Middleware: 413 for bodies beyond a limit, whether they say their length or come in chunks."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.message = f"the body is larger than {limit} bytes, the limit of this server"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            error = ApiError(413, "invalid_request_error", "body_too_large", self.message)
            response = error_response(error)
            # The body is not read.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                raise HTTPException(413, self.message, {"Connection": "close"})
            return message

        await self.app(scope, limited, send)
