"""Tiny random models, written as GGUF files, for tests that need no real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

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

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        kv = self.n_embd // self.n_head * self.n_head_kv

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            values = rng.standard_normal((rows, columns), np.float32)
            return values / np.float32(np.sqrt(columns))

        def norm() -> NDArray[np.float32]:
            return rng.uniform(0.5, 1.5, self.n_embd).astype(np.float32)

        self.weights["token_embd.weight"] = matrix(self.n_vocab, self.n_embd) * 8
        for i in range(self.n_layer):
            block = f"blk.{i}."
            self.weights[block + "attn_norm.weight"] = norm()
            self.weights[block + "attn_q.weight"] = matrix(self.n_embd, self.n_embd)
            self.weights[block + "attn_k.weight"] = matrix(kv, self.n_embd)
            self.weights[block + "attn_v.weight"] = matrix(kv, self.n_embd)
            self.weights[block + "attn_output.weight"] = matrix(self.n_embd, self.n_embd)
            self.weights[block + "ffn_norm.weight"] = norm()
            self.weights[block + "ffn_gate.weight"] = matrix(self.n_ff, self.n_embd)
            self.weights[block + "ffn_up.weight"] = matrix(self.n_ff, self.n_embd)
            self.weights[block + "ffn_down.weight"] = matrix(self.n_embd, self.n_ff)
        self.weights["output_norm.weight"] = norm()
        self.weights["output.weight"] = matrix(self.n_vocab, self.n_embd)

    def write(self, path: Path, *, tokenizer: bool = True, chat_template: str | None = None) -> Path:
        """Write the GGUF file, with a tokenizer of single bytes unless told not to."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("tiny")
        writer.add_block_count(self.n_layer)
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_rope_dimension_count(self.n_embd // self.n_head)
        writer.add_vocab_size(self.n_vocab)
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


def write_as_f32(source: Path, target: Path) -> Path:
    """A copy of a GGUF file with all tensors dequantised to float32, by the gguf package."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in skipped:
            continue
        value: Any = entry.contents()
        sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, entry.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
