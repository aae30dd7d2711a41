"""Limits of a server's connections."""

from __future__ import annotations

from dataclasses import dataclass

from llamatap._validate import integer
from llamatap.errors import InvalidInputError

__all__ = ["ConnectionOptions"]


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Limits of a server's connections; times in seconds.

    :ivar max_connections: maximum number of open connections. Beyond it, connections that wait for their
        client are closed, the oldest first; if all are busy, further ones get quick responses (``GET``) or
        503.
    :ivar header_timeout: from the connection, or the first byte of a request, to the end of its headers.
    :ivar body_timeout: from the end of the headers to the end of the body.
    :ivar idle_timeout: from a response to the next request.
    :ivar send_timeout: time within which a client must read some of the data sent to it.
    """

    max_connections: int = 256
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    # Longer than the timeouts of clients and proxies, or they send into a closing connection.
    idle_timeout: float = 75.0
    send_timeout: float = 60.0

    def __post_init__(self) -> None:
        integer("max_connections", self.max_connections, 1)
        for name in ("header_timeout", "body_timeout", "idle_timeout", "send_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be above 0 seconds, not {getattr(self, name)}")
