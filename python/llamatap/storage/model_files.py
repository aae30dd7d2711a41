"""The files of a model: one, or the shards of a split model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from llamatap.storage.file_hashes import file_sha256, sampled_sha256

__all__ = ["ModelFiles", "shard_paths"]

_FIRST_SHARD = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.DOTALL)


def shard_paths(path: Path) -> list[Path]:
    """Shards of a split model, by the name of its first one, in order; otherwise only the file itself."""
    if (found := _FIRST_SHARD.fullmatch(path.name)) is None:
        return [path]
    prefix, count = found[1], int(found[2])
    others = (path.with_name(f"{prefix}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1))
    return [path, *others]


class ModelFiles:
    """The files of a model, as they were before it was loaded: a path may come to name another file.

    :ivar paths: the file, or all shards in order.
    :raises OSError: one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        first, *others = shard_paths(path)
        # Only the engine knows later whether a file with a shard's name is one.
        self.paths = [first, *(other for other in others if other.is_file())]
        self._statuses = [_status(one) for one in self.paths]
        self._samples = [sampled_sha256(one) for one in self.paths]

    def only_first(self) -> None:
        """Keep only the first file: the model is not split, whatever the file's name."""
        del self.paths[1:], self._statuses[1:], self._samples[1:]

    @property
    def sampled_sha256(self) -> str:
        """A quick hash of pieces of all files, which distinguishes models of the same shape."""
        return _combined(self._samples)

    def sha256(self) -> str | None:
        """The sha256 of the file; of a split model, that of the lines with its shards' sha256, in order:
        ``sha256sum NAME-*.gguf | cut -c 1-64 | sha256sum``. None if a file is gone or was replaced.

        Each file is hashed once, and its hash is cached.
        """
        try:
            if [_status(one) for one in self.paths] != self._statuses:
                return None
            return _combined([file_sha256(one) for one in self.paths])
        except OSError:
            return None


def _status(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _combined(hashes: Sequence[str]) -> str:
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{one}\n" for one in hashes).encode()).hexdigest()
