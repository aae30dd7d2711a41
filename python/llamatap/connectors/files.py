"""States in files of a folder: the safetensors files that speculators' ``FileTransfer`` reads, too."""

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
from llamatap.connectors.base import Connector, Stored, Transfer, tensors_of
from llamatap.errors import InvalidInputError
from llamatap.states import DTYPES, States, write_tensors

__all__ = ["FileConnector", "read_mapped"]

# https://huggingface.co/docs/safetensors: 8 bytes with the length of the header, little-endian; the header,
# JSON; the data.
_DTYPES = {
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "I64": np.dtype("<i8"),
}


class FileConnector(Connector):
    """A folder of safetensors files, one a sample: ``hs_INDEX.safetensors``, or of a name of its own. A file
    appears whole or not at all.

    :param folder: is made where it is not there.
    :raises OSError: it cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(
        self, states: States, *, index: int | None = None, loss_mask: ArrayLike | None = None
    ) -> Transfer:
        """See :meth:`Connector.put`; the file's metadata are :attr:`llamatap.States.provenance`."""
        path = self._path(index)
        self._write(path, tensors_of(states, loss_mask), states)
        return {"handle": str(path), "hidden_states_path": str(path)}

    def _write(self, path: Path, tensors: Stored, states: States) -> None:
        write_tensors(path, tensors, states.provenance)

    def _path(self, index: int | None) -> Path:
        name = uuid.uuid4().hex if index is None else f"hs_{integer('index', index, 0)}"
        return self.folder / f"{name}.safetensors"

    def get_cached(self, file_idx: int) -> Stored | None:
        """See :meth:`Connector.get_cached`: read-only arrays, which share the file's memory.

        :raises InvalidInputError: the file is none of these.
        """
        return read_mapped(self._path(file_idx))

    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> Stored | None:
        """See :meth:`Connector.get_generated`: read-only arrays, which share the file's memory.

        :raises InvalidInputError: the parameters name no file of the folder, or it is none of these.
        """
        handle = hs_transfer_params.get("hidden_states_path") or hs_transfer_params.get("handle")
        return read_mapped(self._own(handle))

    def delete(self, handle: str) -> None:
        """Remove the file. Arrays that were read from it stay valid. A second call does nothing.

        :raises InvalidInputError: it is no file of the folder.
        """
        self._own(handle).unlink(missing_ok=True)

    def _own(self, handle: object) -> Path:
        """Handles come from elsewhere: no file of another folder is read or removed."""
        path = Path(handle) if isinstance(handle, str) else Path()
        if path.parent != self.folder or path.suffix != ".safetensors":
            raise InvalidInputError(f"expected a file of {self.folder}, found {shown(handle)}")
        return path


def read_mapped(path: Path) -> Stored | None:
    """The arrays of a file, read-only, in its own memory pages: no copy is made. None where there is no file.

    :raises InvalidInputError: the file is none of a connector's.
    """
    try:
        with path.open("rb") as file:
            # Private pages: should something write into them all the same, nobody else sees it.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInputError(f"{path} holds no states: {error}") from error
    try:
        header, begin = header_of(pages)
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


def header_of(pages: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begin.

    :raises ValueError: it has none.
    """
    length = int.from_bytes(pages[:8], "little")
    if len(pages) < 8 + length:
        raise ValueError(f"a header of {length} bytes does not fit into {len(pages)}")
    header = json.loads(pages[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return header, 8 + length
