"""Tiny random models, written as GGUF files, for tests that need no real one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from reference import decoder

Weights = dict[str, NDArray[np.float32]]


@dataclass
class TinyLlama:
    """The shape of a llama model; the weights follow from the seed."""

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_vocab: int = 259
    n_ctx: int = 4096
    rope_base: float = 10000.0
    eps: float = 1e-5
    causal: bool = True
    seed: int = 0
    weights: Weights = field(default_factory=dict)

    arch = "llama"
    head_width = 16
    norms_heads = False
    norms_results = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        q, kv = self.head_width * self.n_head, self.head_width * self.n_head_kv

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            values = rng.standard_normal((rows, columns), np.float32)
            return values / np.float32(np.sqrt(columns))

        def norm(width: int = self.n_embd) -> NDArray[np.float32]:
            return rng.uniform(0.5, 1.5, width).astype(np.float32)

        self.weights["token_embd.weight"] = matrix(self.n_vocab, self.n_embd) * 8
        for i in range(self.n_layer):
            block = f"blk.{i}."
            self.weights[block + "attn_norm.weight"] = norm()
            self.weights[block + "attn_q.weight"] = matrix(q, self.n_embd)
            self.weights[block + "attn_k.weight"] = matrix(kv, self.n_embd)
            self.weights[block + "attn_v.weight"] = matrix(kv, self.n_embd)
            self.weights[block + "attn_output.weight"] = matrix(self.n_embd, q)
            self.weights[block + "ffn_norm.weight"] = norm()
            self.weights[block + "ffn_gate.weight"] = matrix(self.n_ff, self.n_embd)
            self.weights[block + "ffn_up.weight"] = matrix(self.n_ff, self.n_embd)
            self.weights[block + "ffn_down.weight"] = matrix(self.n_embd, self.n_ff)
            if self.norms_heads:
                self.weights[block + "attn_q_norm.weight"] = norm(self.head_width)
                self.weights[block + "attn_k_norm.weight"] = norm(self.head_width)
            if self.norms_results:
                self.weights[block + "post_attention_norm.weight"] = norm()
                self.weights[block + "post_ffw_norm.weight"] = norm()
        self.weights["output_norm.weight"] = norm()
        self.weights["output.weight"] = matrix(self.n_vocab, self.n_embd)

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        """What the architecture's file has beyond these."""

    def entering(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """H_0 of the tokens, (tokens, n_embd)."""
        return self.weights["token_embd.weight"][tokens].astype(np.float64)

    def shape(self) -> decoder.Shape:
        return decoder.Shape(
            self.n_layer, self.n_head, self.n_head_kv, self.rope_base, self.eps, causal=self.causal
        )

    def write(self, path: Path, *, tokenizer: bool = True, chat_template: str | None = None) -> Path:
        """Write the GGUF file, with a tokenizer of single bytes unless told not to."""
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_name("tiny")
        writer.add_block_count(self.n_layer)
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_rope_dimension_count(self.head_width)
        writer.add_key_length(self.head_width)
        writer.add_value_length(self.head_width)
        writer.add_vocab_size(self.n_vocab)
        self.add_keys(writer)
        if not self.causal:
            writer.add_causal_attention(False)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        if tokenizer:
            _add_byte_tokenizer(writer)
        else:
            writer.add_tokenizer_model("none")
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        for name, values in self.weights.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@dataclass
class TinyQwen3(TinyLlama):
    """Heads that are wider together than the stream, and normed."""

    rope_base: float = 1e6
    eps: float = 1e-6

    arch = "qwen3"
    head_width = 24
    norms_heads = True

    def shape(self) -> decoder.Shape:
        return replace(super().shape(), halves=True)


@dataclass
class TinyGemma3(TinyQwen3):
    """Seven blocks: 0..4 and 6 see a window, 5 sees all."""

    n_layer: int = 7
    window: int = 8

    arch = "gemma3"
    norms_results = True

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(self.window)

    def entering(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = super().entering(tokens) * np.sqrt(self.n_embd)
        return scaled

    def shape(self) -> decoder.Shape:
        return replace(super().shape(), gelu=True, window=self.window)


def _add_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece-like vocabulary: <unk>, <s>, </s>, then the 256 bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def write_as_f32(source: Path, target: Path, *, vocabulary: bool = True) -> Path:
    """A copy of a GGUF file with all tensors dequantised to float32, by the gguf package.

    :param vocabulary: False leaves out the tokens, which readers in Python take long for.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in skipped:
            continue
        if name.startswith("tokenizer.") and not vocabulary:
            continue
        value: Any = entry.contents()
        sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, entry.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if not vocabulary:
        writer.add_tokenizer_model("none")
        key = f"{arch}.vocab_size"
        if key not in reader.fields:
            (embeddings,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
            writer.add_vocab_size(int(embeddings.shape[1]))
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
