"""Encoding states as bodies of responses: nested lists, base64, or safetensors.

Bodies are encoded and sent in pieces. Encoding holds the GIL, and the event loop must get its turn between
the pieces; a body that is passed on whole stays in memory as long as its client reads.
"""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamatap.storage.safetensors_metadata import to_metadata

__all__ = [
    "Encoding",
    "PiecewiseResponse",
    "as_array",
    "as_base64",
    "as_lists",
    "as_safetensors",
    "bytes_of",
    "json_pieces",
]

Encoding = Literal["float", "base64", "safetensors"]

# Bytes sent at once.
_SENT_BYTES = 2**18

# Items of a list encoded at once.
_PIECE_ITEMS = 256

# Bytes encoded at once as base64. Divisible by 3, so that there is no padding between the pieces.
_PIECE = 3 * 2**16


def bytes_of(n_numbers: int, itemsize: int, encoding: Encoding) -> int:
    """Maximum number of bytes of numbers from their extraction until they are sent, with their encoded
    form."""
    # A float32 has nine digits, and a sign, a point, an exponent or zeros, and a comma.
    each = {"float": 13.0, "base64": 4 / 3 * itemsize, "safetensors": float(itemsize)}[encoding]
    return int(n_numbers * (itemsize + each))


def _rows(array: NDArray[Any]) -> Iterator[bytes]:
    for row in array:
        yield orjson.dumps(np.ascontiguousarray(row, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)


def as_lists(array: NDArray[Any]) -> list[bytes]:
    """Nested lists of numbers as JSON, in pieces. Each number is the shortest that reads back as the same
    float32."""
    if array.ndim == 1:
        return list(_rows(array[None]))
    pieces = [b"["]
    for row in _rows(array):
        pieces += (row, b",")
    pieces[-1 if len(pieces) > 1 else len(pieces) :] = [b"]"]
    return pieces


def as_array(items: Iterable[Any]) -> orjson.Fragment:
    """A list as JSON, encoded in pieces and joined."""
    left, pieces = iter(items), []
    while piece := list(itertools.islice(left, _PIECE_ITEMS)):
        pieces.append(orjson.dumps(piece)[1:-1])
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def as_base64(array: NDArray[Any]) -> list[bytes]:
    """The bytes of an array, row-major and little-endian, as a JSON string of base64, in pieces."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pieces = [base64.b64encode(data[i : i + _PIECE].data) for i in range(0, len(data), _PIECE)]
    return [b'"', *pieces, b'"']


def json_pieces(
    content: dict[str, Any], fragments: Sequence[tuple[dict[str, Any], str, list[bytes]]]
) -> list[bytes]:
    """An object as JSON, in pieces.

    :param content: the object.
    :param fragments: values that are already JSON: an object within ``content``, its key, and the pieces of
        the value.
    """
    mark = uuid.uuid4().hex
    for part, key, _ in fragments:
        part[key] = mark
    first, *others = orjson.dumps(content).split(f'"{mark}"'.encode())
    pieces = [first]
    for (_, _, inner), after in zip(fragments, others, strict=True):
        pieces += (*inner, after)
    return pieces


def as_safetensors(tensors: dict[str, NDArray[Any]], fields: dict[str, Any]) -> bytes:
    """A safetensors file with metadata: strings unchanged, other fields as JSON."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, to_metadata(fields))


class PiecewiseResponse(Response):
    """A response whose body is sent piece by piece, each once the client has received the previous ones.

    :param pieces: the body, in pieces of any size.
    """

    def __init__(self, pieces: list[bytes], media_type: str) -> None:
        super().__init__(None, media_type=media_type)
        self._pieces = pieces
        self.headers["Content-Length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for body in self._packed():
            # A client that reads nothing is cut off by the server's send_timeout.
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _packed(self) -> Iterator[bytes]:
        """The body in pieces of about equal size. Pieces are freed as they are yielded."""
        packed, size = [], 0
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            for i in range(0, len(piece), _SENT_BYTES):
                part = piece[i : i + _SENT_BYTES]
                packed.append(part)
                size += len(part)
                if size >= _SENT_BYTES:
                    yield b"".join(packed)
                    packed, size = [], 0
        if packed:
            yield b"".join(packed)
