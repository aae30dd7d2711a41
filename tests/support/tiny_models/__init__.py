"""Tiny random models of the architectures that the engine's own program cannot write.

Which metadata and tensors a file of an architecture has is told by the engine's src/models/<architecture>.cpp
(``load_arch_hparams``, ``load_arch_tensors``); names are those of its src/llama-arch.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

Value: TypeAlias = "int | float | bool | str | list[int] | list[bool]"
#: By name: the shape as NumPy has it, (rows, columns) of a matrix that maps columns to rows.
Shapes: TypeAlias = "dict[str, tuple[int, ...]]"

N_VOCAB = 128
N_CTX = 256
EPS = 1e-5


@dataclass
class Tiny:
    """A model to write; its weights follow from the seed."""

    arch: str
    keys: Mapping[str, Value]  # of the architecture, without its name in front
    shapes: Shapes
    n_vocab: int = N_VOCAB
    other_keys: Mapping[str, Value] = field(default_factory=dict)
    f16: tuple[str, ...] = ()  # parts of names of tensors that the engine wants as float16
    seed: int = 0
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for name, shape in self.shapes.items():
            self.weights[name] = _random(rng, name, shape)

    def write(self, path: Path) -> Path:
        """Write the GGUF file, without a tokenizer."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_tokenizer_model("none")
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        own = {f"{self.arch}.{key}": value for key, value in self.keys.items()}
        own[f"{self.arch}.vocab_size"] = self.n_vocab
        for key, value in {**own, **self.other_keys}.items():
            _add(writer, key, value)
        for name, values in self.weights.items():
            half = any(part in name for part in self.f16)
            writer.add_tensor(name, values.astype(np.float16) if half else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, np.float32)
    if name.endswith((".bias", ".scale")):
        return values * np.float32(0.3)
    if len(shape) == 1 or "lerp" in name:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if name in ("token_embd.weight", "position_embd.weight", "token_types.weight"):
        return values
    return values / np.float32(np.sqrt(shape[-1]))


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
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


def common(n_layer: int, n_embd: int, n_head: int, n_ff: int) -> dict[str, Value]:
    return {
        "context_length": N_CTX,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "feed_forward_length": n_ff,
    }


def norm(name: str, width: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width,)}
    if bias:
        shapes[f"{name}.bias"] = (width,)
    return shapes


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def attention(block: str, n_embd: int, q: int, kv: int, *, bias: bool = False) -> Shapes:
    return {
        **linear(f"{block}attn_q", q, n_embd, bias=bias),
        **linear(f"{block}attn_k", kv, n_embd, bias=bias),
        **linear(f"{block}attn_v", kv, n_embd, bias=bias),
        **linear(f"{block}attn_output", n_embd, q, bias=bias),
    }


def feed_forward(block: str, n_embd: int, n_ff: int, *, gate: bool = True, bias: bool = False) -> Shapes:
    return {
        **(linear(f"{block}ffn_gate", n_ff, n_embd) if gate else {}),
        **linear(f"{block}ffn_up", n_ff, n_embd, bias=bias),
        **linear(f"{block}ffn_down", n_embd, n_ff, bias=bias),
    }
