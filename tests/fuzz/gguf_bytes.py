"""A GGUF file taken apart into what can be changed, and put together again without any check.

Format: the GGUF specification of ggml (version 3, little endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

STRING, ARRAY = 8, 9
#: struct formats of the scalar types by their number.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass
class Entry:
    """A key and its value: the number of a type and the bytes that follow it."""

    key: bytes
    type: int
    value: bytes


@dataclass
class TensorInfo:
    name: bytes
    shape: list[int]
    type: int
    offset: int


@dataclass
class GgufBytes:
    entries: list[Entry]
    tensors: list[TensorInfo]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_tensors: int | None = None  # what the header says, where it lies
    n_entries: int | None = None
    header_size: int = field(default=0, init=False)  # of the last to_bytes()

    def to_bytes(self) -> bytes:
        def unsigned(value: int) -> bytes:
            return struct.pack("<Q", value % 2**64)

        def text(value: bytes) -> bytes:
            return unsigned(len(value)) + value

        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        parts = [self.magic, struct.pack("<I", self.version), unsigned(n_tensors), unsigned(n_entries)]
        for entry in self.entries:
            parts += [text(entry.key), struct.pack("<I", entry.type), entry.value]
        for tensor in self.tensors:
            parts += [text(tensor.name), struct.pack("<I", len(tensor.shape))]
            parts += [unsigned(size) for size in tensor.shape]
            parts += [struct.pack("<I", tensor.type), unsigned(tensor.offset)]
        header = b"".join(parts)
        self.header_size = len(header)
        return header + bytes(-len(header) % self.alignment) + self.data


def parse(path: Path) -> GgufBytes:
    """Take a good file apart."""
    raw = path.read_bytes()
    at = 8

    def number(form: str) -> int:
        nonlocal at
        value: int = struct.unpack_from(form, raw, at)[0]
        at += struct.calcsize(form)
        return value

    def text() -> bytes:
        nonlocal at
        size = number("<Q")
        at += size
        return raw[at - size : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == STRING:
            text()
        elif kind == ARRAY:
            element, count = number("<I"), number("<Q")
            for _ in range(count):
                skip(element)
        else:
            at += struct.calcsize(SCALARS[kind])

    n_tensors, n_entries = number("<Q"), number("<Q")
    entries = []
    for _ in range(n_entries):
        key, kind = text(), number("<I")
        start = at
        skip(kind)
        entries.append(Entry(key, kind, raw[start:at]))
    tensors = []
    for _ in range(n_tensors):
        name = text()
        shape = [number("<Q") for _ in range(number("<I"))]
        tensors.append(TensorInfo(name, shape, number("<I"), number("<Q")))
    return GgufBytes(entries, tensors, raw[at + -at % 32 :])
