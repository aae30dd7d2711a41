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
    """A path to write to, which becomes ``target`` at the end of the block and is removed on an error.

    It has the target's name, in a temporary folder beside the target: ``.NAME.`` and 8 hexadecimal digits. A
    killed process leaves only that folder behind.
    """
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    folder.mkdir(0o700)
    try:
        scratch = folder / target.name
        # The kernel applies the umask, which cannot be read without setting it for all threads.
        scratch.touch()
        mode = stat.S_IMODE(scratch.stat().st_mode)
        yield scratch
        # The caller may have replaced it with a file of another mode.
        scratch.chmod(mode)
        scratch.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
