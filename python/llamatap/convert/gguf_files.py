"""GGUF files, by the ``gguf`` package: reading a model's keys and tensors, writing drafts and models."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.errors import InvalidInputError, ModelLoadError, ModelNotFoundError
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.model_files import shard_paths

if TYPE_CHECKING:
    import gguf

__all__ = ["TYPES", "GgufContent", "GgufSource", "RawTensor", "WeightType", "shortest", "write_gguf"]

#: Type of the matrices in a written file.
WeightType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0"]
TYPES: tuple[WeightType, ...] = ("f32", "f16", "bf16", "q8_0")

KeyValue: TypeAlias = "int | float | bool | str | list[int] | list[bool]"

_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_VERSION_KEY = "general.quantization_version"
_REQUIRED: Any = object()


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the bytes of a GGUF file hold it.

    :ivar data: (rows, ...) values, or uint8 (rows, bytes of a row) of a type that NumPy lacks.
    :ivar type: number of the type (``gguf.GGMLQuantizationType``).
    """

    data: NDArray[Any]
    type: int


@dataclass
class GgufContent:
    """Content of a GGUF file to write.

    :ivar keys: the architecture's keys, without its name in front.
    :ivar tensors: float values, which are written in the file's type (vectors always in float32); int64; or
        raw ones.
    :ivar notes: other keys, with their full names.
    """

    arch: str
    keys: dict[str, KeyValue]
    tensors: dict[str, NDArray[Any] | RawTensor]
    notes: dict[str, KeyValue] = field(default_factory=dict)


class GgufSource:
    """A GGUF model to read from: one file, or all shards of a split model.

    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: it cannot be read as GGUF.
    :raises MissingPackageError: the ``gguf`` package is missing.
    """

    def __init__(self, path: Path) -> None:
        with needs("convert", "reading GGUF files"):
            import gguf
        self.path = path
        if not path.exists():
            raise ModelNotFoundError(f"no such file: {path}")
        try:
            readers = [gguf.GGUFReader(path)]
            split = readers[0].fields.get("split.count")
            # Any file may have the name of a shard.
            if split is not None and split.contents() > 1:
                readers += [gguf.GGUFReader(one) for one in shard_paths(path)[1:]]
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        except Exception as error:
            # The reader trusts the file: what a spoilt one raises depends on where it is spoilt.
            raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error
        self._fields = readers[0].fields
        self._tensors = {str(tensor.name): tensor for reader in readers for tensor in reader.tensors}
        self.arch: str = self.key("general.architecture")

    def key(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; a name that begins with a dot is one of the architecture's.

        :raises InvalidInputError: the file has no such key, and there is no default.
        """
        full = self.arch + name if name.startswith(".") else name
        if (found := self._fields.get(full)) is not None:
            return found.contents()
        if default is _REQUIRED:
            raise InvalidInputError(f"{self.path.name} has no key {full}")
        return default

    def keys(self, prefix: str) -> Iterator[tuple[str, gguf.ReaderField]]:
        """The entries whose names begin with a prefix."""
        return ((name, entry) for name, entry in self._fields.items() if name.startswith(prefix))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def raw(self, name: str) -> RawTensor:
        """A tensor as it is in the file.

        :raises InvalidInputError: the file has no such tensor.
        """
        if (found := self._tensors.get(name)) is None:
            raise InvalidInputError(f"{self.path.name} has no tensor {name}")
        return RawTensor(found.data, int(found.tensor_type))

    def type_of(self, name: str) -> str:
        """Type of a tensor, in lower case: "f32", "q4_1"."""
        return str(self._tensors[name].tensor_type.name).lower()

    def values(self, name: str, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """Values of a tensor, or of some of its rows: float32, dequantised if need be; integers as they are.

        :raises InvalidInputError: the file has no such tensor.
        """
        import gguf

        raw = self.raw(name)
        rows = raw.data[first:end]
        if rows.dtype != np.uint8 and np.issubdtype(rows.dtype, np.integer):
            return np.array(rows)
        kind = gguf.GGMLQuantizationType(raw.type)
        return np.ascontiguousarray(gguf.dequantize(rows, kind), np.float32)

    @property
    def name(self) -> str:
        """Name of the model, as its file gives it, or of the file."""
        return str(self.key("general.name", self.path.stem))

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return int(self.key(".embedding_length"))

    @property
    def n_layer(self) -> int:
        """Number of blocks, without those of multi-token prediction."""
        return int(self.key(".block_count")) - int(self.key(".nextn_predict_layers", 0))

    @functools.cached_property
    def n_vocab(self) -> int:
        """Number of tokens."""
        if (tokens := self._fields.get("tokenizer.ggml.tokens")) is not None:
            return len(tokens.data)
        return int(self.key(".vocab_size"))


def shortest(value: float) -> float:
    """A float32 as the decimal number that it was written from."""
    return float(str(np.float32(value)))


def _is_quantised(kind: int) -> bool:
    """Whether a type packs several values into blocks."""
    import gguf

    values_in_block: int = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][0]
    return values_in_block > 1


def _encoded(name: str, values: NDArray[Any], kind: WeightType) -> RawTensor:
    """The values in a file's type. Vectors stay float32: the engine's norms are.

    :raises InvalidInputError: a value is beyond float16.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    if np.issubdtype(values.dtype, np.integer):
        return RawTensor(np.ascontiguousarray(values, np.int64), types.I64)
    full = np.ascontiguousarray(values, np.float32)
    if full.ndim < 2 or kind == "f32":
        return RawTensor(full, types.F32)
    if kind == "q8_0" and full.shape[-1] % 32:
        # A row of Q8_0 is made of blocks of 32.
        kind = "f16"
    largest, most = float(np.abs(full).max(initial=0)), float(np.finfo(np.float16).max)
    # Blocks of Q8_0 are 127 steps of a float16.
    if (kind == "f16" and largest > most) or (kind == "q8_0" and largest > 127 * most):
        raise InvalidInputError(f"{name} has values up to {largest:g}, beyond float16; use bf16 or f32")
    if kind == "f16":
        return RawTensor(full.astype(np.float16), types.F16)
    quantised = types.BF16 if kind == "bf16" else types.Q8_0
    return RawTensor(gguf.quantize(full, quantised), quantised)


def _add(writer: gguf.GGUFWriter, key: str, value: KeyValue) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def copy_keys(
    source: GgufSource, writer: gguf.GGUFWriter, prefix: str, left_out: tuple[str, ...] = ()
) -> None:
    """Copy the entries whose names begin with a prefix. The writer knows no empty arrays."""
    import gguf

    for name, entry in source.keys(prefix):
        if left_out and name.startswith(left_out):
            continue
        value = entry.contents()
        is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
        if not is_array or len(value):
            writer.add_key_value(name, value, entry.types[0], sub_type=entry.types[-1] if is_array else None)


def write_gguf(
    path: Path,
    content: GgufContent,
    *,
    kind: WeightType,
    tokenizer: GgufSource,
    copied: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Write a GGUF file atomically.

    :param tokenizer: the model whose tokenizer is copied.
    :param copied: prefixes of all keys that are copied from it, and what the names of those begin with that
        are left out; None for the tokenizer without its chat templates.
    :raises InvalidInputError: a value is beyond float16.
    :raises OSError: it cannot be written.
    """
    import gguf

    if not path.parent.is_dir():
        raise FileNotFoundError(f"no such folder: {path.parent}")
    encoded = {
        name: one if isinstance(one, RawTensor) else _encoded(name, one, kind)
        for name, one in content.tensors.items()
    }
    with atomic_path(path) as scratch:
        writer = gguf.GGUFWriter(scratch, content.arch)
        try:
            if copied is None:
                writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
            is_copied = copied is not None and tokenizer.key(_VERSION_KEY, None) is not None
            if not is_copied and any(_is_quantised(one.type) for one in encoded.values()):
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in content.keys.items():
                _add(writer, f"{content.arch}.{key}", value)
            for key, value in content.notes.items():
                _add(writer, key, value)
            for prefix, left_out in (copied or {"tokenizer.": ("tokenizer.chat_template",)}).items():
                copy_keys(tokenizer, writer, prefix, (*left_out, *content.notes))
            for name, one in encoded.items():
                writer.add_tensor(name, one.data, raw_dtype=gguf.GGMLQuantizationType(one.type))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
