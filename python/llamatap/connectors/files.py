"""Connector to a folder of safetensors files, which speculators' ``FileTransfer`` reads as well."""

from __future__ import annotations

import json
import mmap
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from llamatap._validate import integer, shown
from llamatap.connectors.connector import Connector, Stored, Transfer, tensors_of
from llamatap.errors import InvalidInputError
from llamatap.states import DTYPES, States
from llamatap.storage.tensor_files import write_tensors

__all__ = ["FileConnector", "read_mapped"]

# Dtypes of safetensors files that a connector writes.
_DTYPES = {
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "I64": np.dtype("<i8"),
}


class FileConnector(Connector):
    """Connector to a folder of safetensors files, one per sample: ``hs_INDEX.safetensors``, or a random name
    without an index. Files are written atomically.

    :param folder: the folder; created if missing.
    :raises OSError: it cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(
        self, states: States, *, index: int | None = None, loss_mask: ArrayLike | None = None
    ) -> Transfer:
        """See :meth:`Connector.put`. The metadata of the file is :attr:`llamatap.States.provenance`."""
        path = self._path(index)
        self._write(path, tensors_of(states, loss_mask), states)
        return {"handle": str(path), "hidden_states_path": str(path)}

    def _write(self, path: Path, tensors: Stored, states: States) -> None:
        write_tensors(path, tensors, states.provenance)

    def _path(self, index: int | None) -> Path:
        name = uuid.uuid4().hex if index is None else f"hs_{integer('index', index, 0)}"
        return self.folder / f"{name}.safetensors"

    def get_cached(self, file_idx: int) -> Stored | None:
        """See :meth:`Connector.get_cached`. The arrays are read-only and share the file's memory.

        :raises InvalidInputError: the file is not one of a connector.
        """
        return read_mapped(self._path(file_idx))

    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> Stored | None:
        """See :meth:`Connector.get_generated`. The arrays are read-only and share the file's memory.

        :raises InvalidInputError: the parameters name no file in the folder, or not one of a connector.
        """
        handle = hs_transfer_params.get("hidden_states_path") or hs_transfer_params.get("handle")
        return read_mapped(self._own(handle))

    def delete(self, handle: str) -> None:
        """Remove the file. Arrays that were read from it stay valid. A second call does nothing.

        :raises InvalidInputError: it is not a file in the folder.
        """
        self._own(handle).unlink(missing_ok=True)

    def _own(self, handle: object) -> Path:
        """The file of a handle. Handles are untrusted: no file of another folder is read or removed."""
        path = Path(handle) if isinstance(handle, str) else Path()
        if path.parent != self.folder or path.suffix != ".safetensors":
            raise InvalidInputError(f"expected a file of {self.folder}, found {shown(handle)}")
        return path


def read_mapped(path: Path) -> Stored | None:
    """Read the arrays of a file without a copy (safetensors' reader would copy them), read-only. None if
    there is no file.

    :raises InvalidInputError: the file is not one of a connector.
    """
    try:
        with path.open("rb") as file:
            # Private pages: writes to them, should there be any, stay in this process.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInputError(f"{path} holds no states: {error}") from error
    try:
        header, begin = _header(pages)
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            first, end = entry["data_offsets"]
            if end - first != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
                raise ValueError(f"{name} has {end - first} bytes for {dtype} of {shape}")
            array = np.frombuffer(pages, dtype, (end - first) // dtype.itemsize, begin + first).reshape(shape)
            array.flags.writeable = False
            found[name] = array
        if not {"hidden_states", "token_ids"} <= found.keys():
            raise ValueError(f"it has {sorted(found)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInputError(f"{path} holds no states of a connector: {error}") from error
    return found


def _header(pages: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of its data.

    The format is: the length of the header, 8 bytes, little-endian; the header, JSON; the data.

    :raises ValueError: it has none.
    """
    length = int.from_bytes(pages[:8], "little")
    if len(pages) < 8 + length:
        raise ValueError(f"a header of {length} bytes does not fit into {len(pages)}")
    header = json.loads(pages[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header, 8 + length
