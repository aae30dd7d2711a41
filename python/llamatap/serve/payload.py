"""States as bodies of responses: nested lists, base64, or safetensors.

Encoders work in pieces: what they call holds the GIL, and the event loop must get its turn in between.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

__all__ = ["Encoding", "as_base64", "as_lists", "as_safetensors", "bytes_of"]

Encoding = Literal["float", "base64", "safetensors"]

# Divisible by 3, so that the pieces of base64 join without padding between them.
_PIECE = 3 * 2**16


def bytes_of(n_numbers: int, itemsize: int, encoding: Encoding) -> int:
    """The most bytes that numbers take from their extraction until they are sent: themselves, and twice what
    they are encoded to, which is joined from pieces."""
    # A float32 has nine digits, and a sign, a point, an exponent or zeros, and a comma.
    each = {"float": 13.0, "base64": 4 / 3 * itemsize, "safetensors": float(itemsize)}[encoding]
    return int(n_numbers * (itemsize + 2 * each))


def _rows(array: NDArray[Any]) -> Iterator[bytes]:
    for row in array:
        yield orjson.dumps(np.ascontiguousarray(row, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)


def as_lists(array: NDArray[Any]) -> orjson.Fragment:
    """Nested lists of numbers: each the shortest that reads back as the same float32."""
    if array.ndim == 1:
        (row,) = _rows(array[None])
        return orjson.Fragment(row)
    return orjson.Fragment(b"[" + b",".join(_rows(array)) + b"]")


def as_base64(array: NDArray[Any]) -> orjson.Fragment:
    """The bytes of the array, row-major and little-endian, in base64."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pieces = [base64.b64encode(data[i : i + _PIECE].data) for i in range(0, len(data), _PIECE)]
    return orjson.Fragment(b'"' + b"".join(pieces) + b'"')


def as_safetensors(tensors: dict[str, NDArray[Any]], fields: dict[str, Any]) -> bytes:
    """A safetensors file, with fields as its metadata: strings as they are, all else as JSON."""
    from safetensors.numpy import save

    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata)
