"""Requests sent byte by byte, for what HTTP clients do not do."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from support.servers import Running

HEAD = b"POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": "tiny", "input": [5] * 7}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HALF = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:5]


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def to_the_end(client: socket.socket) -> bytes:
    """The bytes received until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(2**16):
            found += piece
    return found


def answer(found: bytes) -> tuple[int, Any, bytes]:
    """Status, JSON and headers of a response."""
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), head.lower()
