"""Locks of files (flock) that end with the process that took them, whatever it forked."""

from __future__ import annotations

import os

__all__ = ["held", "let_go"]

_handles: set[int] = set()


def held(handle: int) -> None:
    """Say that an open file's lock is this process's alone: children that are forked from now on close the
    file, for a lock lasts until all copies of its handle are closed."""
    _handles.add(handle)


def let_go(handle: int) -> None:
    """Close the file, and with it end its lock."""
    _handles.discard(handle)
    os.close(handle)


def _in_child() -> None:
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_in_child)
