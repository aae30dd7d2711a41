"""The format of a saved sequence: the engine's bytes after a header that says which contexts they fit."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from llamatap.errors import InvalidInputError

__all__ = ["pack", "unpack"]

_MAGIC = b"llamatap-state-1"


def pack(fingerprint: Mapping[str, Any], state: bytes) -> bytes:
    """`state` after a header with the fingerprint of its context and a checksum."""
    header = json.dumps(fingerprint, sort_keys=True).encode()
    return b"".join(
        (_MAGIC, struct.pack("<IQI", len(header), len(state), zlib.crc32(header + state)), header, state)
    )


def unpack(fingerprint: Mapping[str, Any], data: object) -> bytes:
    """Check `data` against the fingerprint of a context, and take the engine's bytes out of it.

    :raises InvalidInputError: the data is truncated or damaged, or was saved from another context.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"a saved state is bytes, not {type(data).__name__}")
    data = bytes(data)
    fixed = len(_MAGIC) + struct.calcsize("<IQI")
    if len(data) < fixed or not data.startswith(_MAGIC):
        raise InvalidInputError("this is no saved state of llamatap")
    n_header, n_state, checksum = struct.unpack_from("<IQI", data, len(_MAGIC))
    if len(data) != fixed + n_header + n_state:
        raise InvalidInputError(
            f"the saved state is truncated: expected {fixed + n_header + n_state} bytes, found {len(data)}"
        )
    header, state = data[fixed : fixed + n_header], data[fixed + n_header :]
    if zlib.crc32(data[fixed:]) != checksum:
        raise InvalidInputError("the saved state is damaged: its checksum does not match")
    try:
        found = json.loads(header)
        if not isinstance(found, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise InvalidInputError("the saved state is damaged: its header is unreadable") from None
    for key, value in fingerprint.items():
        if found.get(key) != value:
            raise InvalidInputError(
                f"the saved state is of another context: its {key} is {found.get(key)!r}, "
                f"this one's is {value!r}"
            )
    return state
