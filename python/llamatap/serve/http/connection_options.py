"""Limits of a server's connections."""

from __future__ import annotations

from dataclasses import dataclass

from llamatap._validate import integer
from llamatap.errors import InvalidInputError

__all__ = ["ConnectionOptions"]


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Limits of a server's connections; times in seconds.

    :ivar max_connections: how many may be open. Beyond it connections that wait for their client are closed,
        the oldest first; where all are busy, further ones get quick answers (``GET``) or 503.
    :ivar header_timeout: from the connection, or the first byte of a request, to the end of its headers.
    :ivar body_timeout: from the end of the headers to the end of the body.
    :ivar idle_timeout: from a response to the next request.
    :ivar send_timeout: in which a client must take some of what is sent to it.
    """

    max_connections: int = 256
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    # Longer than clients and proxies keep theirs, or they send into a connection that is closing.
    idle_timeout: float = 75.0
    send_timeout: float = 60.0

    def __post_init__(self) -> None:
        integer("max_connections", self.max_connections, 1)
        for name in ("header_timeout", "body_timeout", "idle_timeout", "send_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be above 0 seconds, not {getattr(self, name)}")
