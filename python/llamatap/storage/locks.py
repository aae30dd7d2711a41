"""Locks of files and folders (flock) that end with the process that took them, whatever it forked.

The system releases such a lock however the process ends. Forked children inherit the open file, and the lock
lasts until they have closed it too, so they close it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["acquire", "locked", "release"]

_handles: set[int] = set()


def acquire(path: Path, *, make: bool = False, shared: bool = False, wait: bool = True) -> int:
    """Lock a folder or a file.

    :param make: create the file if it is missing.
    :param shared: take a shared lock.
    :param wait: wait until the lock is free.
    :returns: the handle for :func:`release`.
    :raises BlockingIOError: another process has it, and ``wait`` is False.
    :raises OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT if make else os.O_RDONLY
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _handles.add(handle)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BaseException:
        release(handle)
        raise
    return handle


def release(handle: int) -> None:
    """Release a lock."""
    _handles.discard(handle)
    os.close(handle)


@contextlib.contextmanager
def locked(path: Path, *, make: bool = False, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold a lock during a ``with`` block; parameters and errors as in :func:`acquire`."""
    handle = acquire(path, make=make, shared=shared, wait=wait)
    try:
        yield
    finally:
        release(handle)


def _close_in_child() -> None:
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)
