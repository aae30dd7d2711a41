"""Files of tensors (safetensors), with any JSON value in their metadata."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.safetensors_metadata import from_metadata, to_metadata

__all__ = ["check_suffix", "read_tensors", "write_tensors"]

# Endings that programs take for another format.
_OTHER_FORMATS = frozenset(
    (
        *(".arrow", ".bin", ".ckpt", ".csv", ".gguf", ".h5", ".hdf5", ".json", ".jsonl", ".npy", ".npz"),
        *(".parquet", ".pickle", ".pkl", ".pt", ".pth", ".txt"),
    )
)


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Check that a file of tensors does not get the name of another format.

    :raises InvalidInputError: it does.
    """
    found = Path(path).suffix.lower()
    if found in _OTHER_FORMATS:
        expected = Path(path).with_suffix(".safetensors").name
        raise InvalidInputError(f"the file is written as safetensors, not as {found}: name it {expected}")


def read_tensors(
    path: Path, names: Collection[str]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any], list[str]]:
    """Read tensors of a safetensors file.

    :param names: the tensors to read, if the file has them.
    :returns: the tensors, the fields of the metadata, and the sorted names of the file's other tensors.
    :raises ValueError: it is not such a file.
    :raises OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            there = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in names if name in there}
            return tensors, from_metadata(file.metadata() or {}), sorted(there.difference(names))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
) -> None:
    """Write a safetensors file atomically, with the provenance as its metadata
    (:mod:`llamatap.storage.safetensors_metadata`).

    :raises OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    if not (folder := Path(path).parent).is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    with atomic_path(Path(path)) as scratch:
        try:
            # Written from the arrays' own memory; via bytes it would take two more copies.
            save_file(
                {name: np.ascontiguousarray(array) for name, array in tensors.items()},
                scratch,
                metadata=to_metadata(provenance),
            )
        except SafetensorError as error:
            # safetensors raises its own error even for errors of the system, such as a full disk.
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), os.fspath(path)) from error
