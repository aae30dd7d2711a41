"""Request checks before parsing: API key, host, type and size of the body."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamatap.serve.errors import ApiError, error_response

__all__ = ["ApiKey", "BodyLimit", "Cors", "HostCheck", "JsonOnly", "OneLength", "is_loopback"]

#: Paths that need no key because they reveal nothing about the models: for load balancers, and for browsers,
#: whose page asks for the key.
_OPEN = frozenset(("/", "/health"))


class ApiKey:
    """Middleware: 401 unless ``Authorization: Bearer`` has the key, which is compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # The scheme is case-insensitive (RFC 9110).
            if not (scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.expected)):
                error = ApiError(
                    401,
                    "authentication_error",
                    "invalid_api_key",
                    "this server needs an API key; send it as 'Authorization: Bearer KEY'",
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, reachable only from itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Cors(CORSMiddleware):
    """Middleware: starlette's CORS, with refusals in the form of all other errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The response to a preflight: whether a page may send a request."""
        found = super().preflight_response(request_headers)
        if found.status_code == 200:
            return found
        error = ApiError(400, "invalid_request_error", "cors_refused", bytes(found.body).decode())
        refused = error_response(error)
        for name, value in found.headers.items():
            if name not in ("content-type", "content-length"):
                refused.headers[name] = value
        return refused


class HostCheck:
    """Middleware: 403 unless ``Host`` names this machine.

    Otherwise a page of another site whose name is made to resolve to this machine (DNS rebinding) could read
    from a server without a key. Starlette's TrustedHostMiddleware knows no ranges of addresses (127.0.0.0/8)
    and answers in plain text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            name, colon, port = given.rpartition(":")
            host = (name if colon and port.isdigit() else given).rstrip(".")
            if not is_loopback(host):
                error = ApiError(
                    403,
                    "invalid_request_error",
                    "host_not_allowed",
                    f"the request is for the host {host[:100]!r}; a server without a key answers only for "
                    "localhost: start it with --api-key, or with --insecure to allow other hosts",
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class JsonOnly:
    """Middleware: 400 for bodies that are not declared as JSON. Browsers let any page send such bodies to any
    address."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            given = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
            if given != b"application/json":
                found = given.decode("latin-1")[:100] or "nothing"
                error = ApiError(
                    400,
                    "invalid_request_error",
                    "unsupported_media_type",
                    f"a body needs 'Content-Type: application/json'; found {found}",
                )
                response = error_response(error)
                # The body was not read.
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class OneLength:
    """Middleware: 400 for requests that give the length of their body in two ways. A proxy and a server could
    disagree about where such a request ends (RFC 9112, 6.1)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if b"content-length" in headers and b"transfer-encoding" in headers:
                error = ApiError.invalid(
                    "a request must have Content-Length or Transfer-Encoding, not both", "invalid_http"
                )
                response = error_response(error)
                # The rest could be read as another request.
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


# Maximum number of brackets (of lists and objects) and commas (between entries) in a body, which is parsed on
# the event loop. Program code in a text has fewer brackets than this.
_MOST_BRACKETS = 2**18
_MOST_COMMAS = 2**20


class BodyLimit:
    """Middleware: 413 for bodies beyond a limit, of known length or in chunks, and for bodies with so many
    elements that parsing takes long."""

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
            # The body was not read.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        received = brackets = commas = 0

        async def limited() -> Message:
            nonlocal received, brackets, commas
            message = await receive()
            body = message.get("body", b"")
            received += len(body)
            brackets += body.count(b"[") + body.count(b"{")
            commas += body.count(b",")
            if received > self.limit:
                raise HTTPException(413, self.message, {"Connection": "close"})
            if brackets > _MOST_BRACKETS or commas > _MOST_COMMAS:
                too_many = "the body has too many lists, objects or elements; send it as several requests"
                raise HTTPException(413, too_many, {"Connection": "close"})
            return message

        await self.app(scope, limited, send)
