"""Atomic writes: a file appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic_path"]


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A path to write to, renamed to ``target`` at the end and removed on an error, as is all that writing it
    leaves beside it.

    It has the target's name, in a folder beside the target: the name with a dot before it and, after another
    dot, eight hexadecimal digits. That folder is all that a killed process leaves.
    """
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    folder.mkdir(0o700)
    try:
        scratch = folder / target.name
        # Has the kernel apply the umask, which cannot be read without setting it for all threads.
        scratch.touch()
        mode = stat.S_IMODE(scratch.stat().st_mode)
        yield scratch
        # The caller may have replaced it by a file of another mode.
        scratch.chmod(mode)
        scratch.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
