"""Ways to spoil a GGUF file. Each takes a file apart already and a random generator; some give bytes."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable

from fuzz.gguf_bytes import ARRAY, SCALARS, STRING, Entry, GgufBytes, TensorInfo

NUMBERS = [0, 1, 2, 3, 5, 7, 8, 16, 31, 33, 64, 127, 255, 1000, 4096, 65535, 1 << 20, (1 << 31) - 1, 1 << 31]
NUMBERS += [(1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31)]
FLOATS = [0.0, -0.0, -1.0, 1e-45, 1e-6, 1.0, 1e4, 1e30, 3.4e38, float("inf"), -float("inf"), float("nan")]
TEXTS = [b"", b"\0", b"\xff\xfe", b"gpt2", b"llama", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"x" * 4096]
TEXTS += [
    b"default",
    b"qwen2",
    b"{{ messages }}",
    b"{% for x in range(10**9) %}a{% endfor %}",
    b"<0xZZ>",
    b"<0x",
]
TEXTS += ["\U0001f600".encode(), b"\xf0\x9f", b"none", b"linear", b"yarn", b"longrope", b"mamba", b"gemma3"]
#: Numbers of the engine's tensor types, also removed ones and none.
TENSOR_TYPES = [*range(45), 255, (1 << 31) - 1, (1 << 32) - 1]

Mutation = Callable[[GgufBytes, random.Random], bytes | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def scalar(kind: int, rng: random.Random) -> bytes:
    """A value of the type, likely at an edge."""
    if kind == STRING:
        text = rng.choice(TEXTS)
        return struct.pack("<Q", len(text)) + text
    if kind == ARRAY:
        element = rng.choice([4, 5, 6, 7, STRING])
        count = rng.choice([0, 1, 2, 3, 5, 40])
        return struct.pack("<IQ", element, count) + b"".join(scalar(element, rng) for _ in range(count))
    form = SCALARS.get(kind, "<I")
    if form[1] in "fd":
        value = rng.choice(FLOATS)
        return struct.pack(form, value if form[1] == "d" or abs(value) < 3.5e38 else float("inf"))
    size = struct.calcsize(form)
    return (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def likely(file: GgufBytes, rng: random.Random) -> Entry:
    """An entry, of the architecture's own keys more often than others."""
    own = [e for e in file.entries if not e.key.startswith((b"general.", b"tokenizer."))]
    return rng.choice(own if own and rng.random() < 0.6 else file.entries)


@mutation
def value_at_an_edge(file: GgufBytes, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        entry = likely(file, rng)
        entry.value = scalar(entry.type, rng)


@mutation
def value_of_another_type(file: GgufBytes, rng: random.Random) -> None:
    entry = likely(file, rng)
    entry.type = rng.choice([*SCALARS, STRING, ARRAY])
    entry.value = scalar(entry.type, rng)


@mutation
def type_without_its_value(file: GgufBytes, rng: random.Random) -> None:
    likely(file, rng).type = rng.choice([*range(14), 255, (1 << 32) - 1])


def elements(entry: Entry) -> tuple[int, list[bytes]]:
    """The type of an array's elements, and the elements."""
    kind, count = struct.unpack_from("<IQ", entry.value)
    at, items = 12, []
    for _ in range(count):
        size = struct.calcsize(SCALARS.get(kind, "<Q"))
        if kind == STRING:
            size += struct.unpack_from("<Q", entry.value, at)[0]
        items.append(entry.value[at : at + size])
        at += size
    return kind, items


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


@mutation
def array_of_another_length(file: GgufBytes, rng: random.Random) -> None:
    entry = rng.choice([e for e in file.entries if e.type == ARRAY] or file.entries)
    if entry.type != ARRAY:
        entry.value = scalar(entry.type, rng)
    elif rng.random() < 0.3:
        entry.value = entry.value[:4] + struct.pack("<Q", rng.choice(NUMBERS) % 2**64) + entry.value[12:]
    else:
        # A length that its elements agree with: the file stays well formed.
        kind, items = elements(entry)
        others = [items[: len(items) // 2], items[:-1], items + items[-1:], [], items[:1], items * 2]
        entry.value = array(kind, rng.choice(others))


@mutation
def array_element_changed(file: GgufBytes, rng: random.Random) -> None:
    entry = rng.choice([e for e in file.entries if e.type == ARRAY] or file.entries)
    if entry.type != ARRAY:
        entry.value = scalar(entry.type, rng)
        return
    kind, items = elements(entry)
    for _ in range(min(len(items), rng.choice([1, 3, 20]))):
        items[rng.randrange(len(items))] = scalar(kind, rng)
    entry.value = array(kind, items)


@mutation
def array_of_other_elements(file: GgufBytes, rng: random.Random) -> None:
    entry = likely(file, rng)
    entry.type = ARRAY
    entry.value = scalar(ARRAY, rng)


@mutation
def key_dropped_or_renamed(file: GgufBytes, rng: random.Random) -> None:
    entry = likely(file, rng)
    what = rng.randrange(3)
    if what == 0:
        file.entries.remove(entry)
    elif what == 1:
        entry.key = rng.choice([b"", b"x", entry.key + b"x", entry.key[:-1], b"\xff\x00"])
    else:
        file.entries.append(copy.copy(rng.choice(file.entries)))


@mutation
def another_architecture(file: GgufBytes, rng: random.Random) -> None:
    names = [
        b"llama",
        b"gemma3",
        b"qwen3",
        b"gpt2",
        b"bert",
        b"t5",
        b"mamba",
        b"rwkv7",
        b"deepseek2",
        b"clip",
    ]
    names += [b"qwen35", b"gemma3n", b"gemma4", b"phi3", b"bloom", b"falcon", b"mpt", b"jamba", b"eagle3"]
    old = next(e for e in file.entries if e.key == b"general.architecture").value[8:]
    new = rng.choice(names)
    for entry in file.entries:
        if entry.key == b"general.architecture":
            entry.value = struct.pack("<Q", len(new)) + new
        elif entry.key.startswith(old + b"."):
            entry.key = new + entry.key[len(old) :]


@mutation
def header_counts(file: GgufBytes, rng: random.Random) -> None:
    what = rng.randrange(4)
    if what == 0:
        file.magic = rng.choice([b"GGML", b"\0\0\0\0", b"FUGG"])
    elif what == 1:
        file.version = rng.choice([0, 1, 2, 4, 0x03000000, (1 << 32) - 1])
    elif what == 2:
        file.n_tensors = rng.choice([*NUMBERS, len(file.tensors) - 1, len(file.tensors) + 1])
    else:
        file.n_entries = rng.choice([*NUMBERS, len(file.entries) - 1, len(file.entries) + 1])


@mutation
def alignment(file: GgufBytes, rng: random.Random) -> None:
    file.entries.append(Entry(b"general.alignment", 4, scalar(4, rng)))


@mutation
def tensor_shape(file: GgufBytes, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 3])):
        tensor = rng.choice(file.tensors)
        what = rng.randrange(6)
        if what == 0:
            tensor.shape.reverse()
        elif what == 1:
            tensor.shape.append(rng.choice([1, 2, *NUMBERS]))
        elif what == 2:
            tensor.shape.pop()
        elif what == 3:
            tensor.shape *= 3
        elif tensor.shape:
            axis = rng.randrange(len(tensor.shape))
            old = tensor.shape[axis]
            tensor.shape[axis] = rng.choice([*NUMBERS, old - 1, old + 1, old // 2, old * 2])


@mutation
def tensor_type(file: GgufBytes, rng: random.Random) -> None:
    tensors = file.tensors if rng.random() < 0.2 else [rng.choice(file.tensors)]
    kind = rng.choice(TENSOR_TYPES)
    for tensor in tensors:
        tensor.type = kind


@mutation
def tensor_offset(file: GgufBytes, rng: random.Random) -> None:
    tensor = rng.choice(file.tensors)
    other = rng.choice(file.tensors).offset
    tensor.offset = rng.choice([*NUMBERS, tensor.offset + 1, tensor.offset + 32, other, len(file.data)])


@mutation
def tensor_dropped_or_renamed(file: GgufBytes, rng: random.Random) -> None:
    tensor = rng.choice(file.tensors)
    what = rng.randrange(5)
    if what == 0:
        file.tensors.remove(tensor)
    elif what == 1:
        tensor.name = rng.choice([b"", b"x" * 63, b"x" * 64, b"x" * 5000, tensor.name[:-1], b"\xff"])
    elif what == 2:
        tensor.name = rng.choice(file.tensors).name
    elif what == 3:
        other = rng.choice(file.tensors)
        tensor.name, other.name = other.name, tensor.name
    else:
        names = [b"rope_freqs.weight", b"output.bias", b"blk.0.attn_q.bias", b"cls.weight"]
        name = rng.choice([*names, b"blk.99.ffn_up.weight"])
        file.tensors.append(TensorInfo(name, list(tensor.shape), tensor.type, tensor.offset))


@mutation
def truncated(file: GgufBytes, rng: random.Random) -> bytes:
    whole = file.to_bytes()
    limit = rng.choice([len(whole), file.header_size, 64])
    return whole[: rng.randrange(limit)]


@mutation
def bytes_changed(file: GgufBytes, rng: random.Random) -> bytes:
    whole = bytearray(file.to_bytes())
    for _ in range(rng.choice([1, 1, 4, 32])):
        at = rng.randrange(file.header_size)
        whole[at] = rng.choice([rng.randrange(256), whole[at] ^ (1 << rng.randrange(8)), 0, 255])
    return bytes(whole)


@mutation
def bytes_inserted_or_removed(file: GgufBytes, rng: random.Random) -> bytes:
    whole = file.to_bytes()
    at, size = rng.randrange(file.header_size), rng.choice([1, 4, 8, 32, 1000])
    if rng.random() < 0.5:
        return whole[:at] + whole[at + size :]
    return whole[:at] + rng.randbytes(size) + whole[at:]


@mutation
def weights_of_noise(file: GgufBytes, rng: random.Random) -> bytes:
    """Data of any bits: NaN, infinities and indices that no file should hold."""
    file.data = rng.randbytes(len(file.data))
    return file.to_bytes()


def mutate(file: GgufBytes, rng: random.Random) -> tuple[str, bytes]:
    """One spoilt file, and the name of what was done to it."""
    name = rng.choice([*MUTATIONS])
    spoilt = copy.deepcopy(file)
    result = MUTATIONS[name](spoilt, rng)
    return name, spoilt.to_bytes() if result is None else result
