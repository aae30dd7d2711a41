"""Bytes in the kernel's buffers of a socket."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios

__all__ = ["undelivered", "unread"]


def unread(connection: socket.socket) -> int:
    """Received bytes that were not read yet; 0 if the kernel does not report them."""
    return _count(connection, termios.FIONREAD)


def undelivered(connection: socket.socket) -> int:
    """Sent bytes that the peer has not received yet; 0 if the kernel does not report them."""
    return _count(connection, termios.TIOCOUTQ)


def _count(connection: socket.socket, request: int) -> int:
    try:
        found = fcntl.ioctl(connection.fileno(), request, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
