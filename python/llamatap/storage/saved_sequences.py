"""Format of a saved sequence: a header naming the contexts it fits, then the engine's bytes."""

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
    """Prepend the fingerprint of its context and a checksum to `state`."""
    header = json.dumps(fingerprint, sort_keys=True).encode()
    return b"".join(
        (_MAGIC, struct.pack("<IQI", len(header), len(state), zlib.crc32(header + state)), header, state)
    )


def unpack(fingerprint: Mapping[str, Any], data: object) -> bytes:
    """Check `data` against the fingerprint of a context, and extract the engine's bytes.

    :raises InvalidInputError: the data is truncated or damaged, or was saved from another context.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"a saved state is bytes, not {type(data).__name__}")
    data = bytes(data)
    fixed = len(_MAGIC) + struct.calcsize("<IQI")
    if len(data) < fixed or not data.startswith(_MAGIC):
        raise InvalidInputError("expected a state saved by llamatap; found other data")
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
                f"the saved state does not match this context: {key} is {found.get(key)!r} there, "
                f"{value!r} here"
            )
    return state
