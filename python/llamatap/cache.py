"""The cache folder: files fetched by ``llamatap fetch`` and the remembered hashes of model files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["atomic_path", "cache_folder", "file_sha256", "hash_file", "sample_file"]


def cache_folder() -> Path:
    """``$LLAMATAP_CACHE``, or ``llamatap`` in the user's cache folder."""
    chosen = os.environ.get("LLAMATAP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamatap"


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write to, renamed to it at the end and removed on an error."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        # mkstemp makes files private; the result gets the usual mode.
        umask = os.umask(0)
        os.umask(umask)
        scratch.chmod(0o666 & ~umask)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """The sha256 of a file, computed."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def sample_file(path: Path) -> str:
    """The sha256 of a file's size and of 64 pieces of it: tells files of other weights apart, at once."""
    pieces, width = 64, 4096
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for i in range(pieces):
            stream.seek(max(0, size - width) * i // (pieces - 1))
            digest.update(stream.read(width))
    return digest.hexdigest()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, computed once and remembered by path, size and modification time.

    :raises OSError: the file cannot be read.
    """
    file = Path(path).resolve()
    status = file.stat()
    known = [status.st_size, status.st_mtime_ns]
    index_file = cache_folder() / "sha256.json"
    index: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        index = json.loads(index_file.read_text())
    entry = index.get(str(file)) if isinstance(index, dict) else None
    if isinstance(entry, list) and entry[:2] == known and len(entry) == 3:
        return str(entry[2])
    result = hash_file(file)
    # A cache that cannot be written costs time, nothing else.
    with contextlib.suppress(OSError, ValueError):
        with contextlib.suppress(OSError):
            index = json.loads(index_file.read_text())
        index_file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(index_file) as scratch:
            scratch.write_text(json.dumps({**index, str(file): [*known, result]}, indent=0))
    return result
