"""Draft files made of an mtp.safetensors and a target, kept in the cache folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from llamatap.convert.gguf_files import GgufSource, WeightType, write_gguf
from llamatap.convert.mtp import joined
from llamatap.convert.mtp_block import read_mtp
from llamatap.errors import InvalidInputError
from llamatap.storage.cache_folder import cache_folder
from llamatap.storage.file_hashes import compute_sha256
from llamatap.storage.model_files import ModelFiles

__all__ = ["joined_draft"]

#: Number in the names of files; another one makes them anew.
_VERSION = 1
#: Files that are kept; those that were not used for longest go first.
_KEPT = 8


def joined_draft(path: Path, target: ModelFiles) -> Path:
    """The draft file of an MTP block for a target: made at the first call, and kept in the cache folder under
    the hashes of both. Its matrices have the block's own type.

    :param target: the files of the loaded target.
    :raises InvalidInputError: the block is for another model, or the target's file was replaced.
    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: a file cannot be read.
    :raises UnsupportedError: the block has more than the engine's computes with.
    :raises MissingPackageError: ``gguf`` is missing.
    :raises OSError: the cache folder cannot be written.
    """
    block = read_mtp(path)
    sha256 = target.sha256()
    if sha256 is None:
        raise InvalidInputError(f"{target.paths[0]} was replaced since it was loaded; load it again")
    folder = cache_folder() / "drafts"
    found = folder / f"mtp{_VERSION}-{compute_sha256(path)[:32]}-{sha256[:32]}.gguf"
    if not found.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        kinds: dict[str, WeightType] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
        source = GgufSource(target.paths[0])
        write_gguf(found, joined(block, source), kind=kinds[block.dtype.name], tokenizer=source)
        # Another process may remove files, too.
        with contextlib.suppress(FileNotFoundError):
            _forget(sorted(folder.glob("mtp*.gguf"), key=lambda one: one.stat().st_mtime), found)
    # The file of a cache that is read-only stays as old as it is.
    with contextlib.suppress(OSError):
        os.utime(found)
    return found


def _forget(files: Sequence[Path], new: Path) -> None:
    """Remove the oldest files. A process that has one open keeps it."""
    others = [one for one in files if one != new]
    for one in others[: max(len(others) + 1 - _KEPT, 0)]:
        one.unlink(missing_ok=True)
