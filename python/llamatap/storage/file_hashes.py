"""Hashes of files: sha256, computed once and cached in the cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.cache_folder import cache_folder

__all__ = ["compute_sha256", "file_sha256", "sampled_sha256"]


def compute_sha256(path: Path) -> str:
    """Compute the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """The sha256 of a file's size and of 64 pieces of it: quick, and different for other weights."""
    pieces, width = 64, 4096
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for i in range(pieces):
            stream.seek(max(0, size - width) * i // (pieces - 1))
            digest.update(stream.read(width))
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _hashed(file: Path, size: int, mtime_ns: int) -> str:
    """Like :func:`compute_sha256`, cached in the process: the index cannot be written everywhere."""
    return compute_sha256(file)


def _index(path: Path) -> dict[str, Any]:
    """The index of remembered hashes; empty when it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, computed once and cached by path, size and modification time.

    :raises OSError: the file cannot be read.
    """
    file = Path(path).resolve()
    status = file.stat()
    known = [status.st_size, status.st_mtime_ns]
    index_file = cache_folder() / "sha256.json"
    entry = _index(index_file).get(str(file))
    if isinstance(entry, list) and entry[:2] == known and len(entry) == 3:
        return str(entry[2])
    result = _hashed(file, *known)
    # A cache that cannot be written costs nothing but time.
    with contextlib.suppress(OSError, ValueError):
        index = _index(index_file)
        index_file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(index_file) as scratch:
            scratch.write_text(json.dumps({**index, str(file): [*known, result]}, indent=0))
    return result
