"""Tiny random models, written as GGUF files, for tests that need no real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from reference import decoder, gated_delta

Weights = dict[str, NDArray[np.float32]]


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    values = rng.standard_normal((rows, columns), np.float32)
    return values / np.float32(np.sqrt(columns))


def _gain(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    return rng.uniform(0.5, 1.5, width).astype(np.float32)


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
        self.weights["token_embd.weight"] = _matrix(rng, self.n_vocab, self.n_embd) * 8
        for i in range(self.n_layer):
            for name, values in self.block(i, rng).items():
                self.weights[f"blk.{i}.{name}"] = values
        self.weights["output_norm.weight"] = _gain(rng, self.n_embd)
        self.weights["output.weight"] = _matrix(rng, self.n_vocab, self.n_embd)

    def block(self, index: int, rng: np.random.Generator) -> Weights:
        """The weights of a block, drawn in the order in which they are named."""
        q, kv = self.head_width * self.n_head, self.head_width * self.n_head_kv
        weights = {
            "attn_norm.weight": _gain(rng, self.n_embd),
            "attn_q.weight": _matrix(rng, q, self.n_embd),
            "attn_k.weight": _matrix(rng, kv, self.n_embd),
            "attn_v.weight": _matrix(rng, kv, self.n_embd),
            "attn_output.weight": _matrix(rng, self.n_embd, q),
            "ffn_norm.weight": _gain(rng, self.n_embd),
            **self.feed_forward(rng),
        }
        if self.norms_heads:
            weights["attn_q_norm.weight"] = _gain(rng, self.head_width)
            weights["attn_k_norm.weight"] = _gain(rng, self.head_width)
        if self.norms_results:
            weights["post_attention_norm.weight"] = _gain(rng, self.n_embd)
            weights["post_ffw_norm.weight"] = _gain(rng, self.n_embd)
        return weights

    def feed_forward(self, rng: np.random.Generator) -> Weights:
        return {
            "ffn_gate.weight": _matrix(rng, self.n_ff, self.n_embd),
            "ffn_up.weight": _matrix(rng, self.n_ff, self.n_embd),
            "ffn_down.weight": _matrix(rng, self.n_embd, self.n_ff),
        }

    @property
    def n_blocks(self) -> int:
        """The number of blocks in the file: the trunk's, and any others."""
        return self.n_layer

    @property
    def n_rotated(self) -> int:
        """How many values of a head of q and k turn with the position."""
        return self.head_width

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        """Add the keys that only this architecture has."""

    def entering(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """H_0 of the tokens, (tokens, n_embd)."""
        return self.weights["token_embd.weight"][tokens].astype(np.float64)

    def shape(self) -> decoder.Shape:
        return decoder.Shape(
            self.n_layer, self.n_head, self.n_head_kv, self.rope_base, self.eps, causal=self.causal
        )

    def write(
        self,
        path: Path,
        *,
        tokenizer: bool = True,
        vocabulary: Path | None = None,
        chat_template: str | None = None,
        add_bos: bool = True,
        add_eos: bool | None = None,
    ) -> Path:
        """Write the GGUF file, with a tokenizer of single bytes unless told not to.

        :param vocabulary: a GGUF file to take the tokenizer from; ``n_vocab`` must be its size.
        :param add_eos: None leaves the key out.
        """
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_name("tiny")
        writer.add_block_count(self.n_blocks)
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_rope_freq_base(self.rope_base)
        writer.add_rope_dimension_count(self.n_rotated)
        writer.add_key_length(self.head_width)
        writer.add_value_length(self.head_width)
        writer.add_vocab_size(self.n_vocab)
        self.add_keys(writer)
        if not self.causal:
            writer.add_causal_attention(False)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        if vocabulary is not None:
            copy_keys(
                gguf.GGUFReader(vocabulary), writer, only="tokenizer.", left_out=("tokenizer.chat_template",)
            )
        elif tokenizer:
            _add_byte_tokenizer(writer, add_bos=add_bos, add_eos=add_eos)
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
    """A qwen3 model: its heads together are wider than the stream, and normed."""

    rope_base: float = 1e6
    eps: float = 1e-6

    arch = "qwen3"
    head_width = 24
    norms_heads = True

    def shape(self) -> decoder.Shape:
        return replace(super().shape(), halves=True)


@dataclass
class TinyGemma3(TinyQwen3):
    """A gemma3 model of seven blocks: 0..4 and 6 see a window, 5 sees everything."""

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


@dataclass
class TinyQwen35(TinyLlama):
    """A qwen35 model of seven blocks: 2 and 5 attend, the others are gated delta nets.

    These have three value heads to a key head.
    """

    n_layer: int = 7
    rope_base: float = 1e6
    eps: float = 1e-6
    attention_every: int = 3
    n_key_heads: int = 2
    n_value_heads: int = 6
    state_width: int = 20
    conv_width: int = 4
    rotated: tuple[int, int, int] = (2, 2, 1)  # pairs that turn with each of the three axes

    arch = "qwen35"
    head_width = 24

    def block(self, index: int, rng: np.random.Generator) -> Weights:
        attends = self.shape().attends(index)
        return {
            "attn_norm.weight": _gain(rng, self.n_embd),
            **(self._attention(rng) if attends else self._delta_net(rng)),
            "post_attention_norm.weight": _gain(rng, self.n_embd),
            **self.feed_forward(rng),
        }

    def _attention(self, rng: np.random.Generator) -> Weights:
        q, kv = self.head_width * self.n_head, self.head_width * self.n_head_kv
        return {
            "attn_q.weight": _matrix(rng, 2 * q, self.n_embd),
            "attn_k.weight": _matrix(rng, kv, self.n_embd),
            "attn_v.weight": _matrix(rng, kv, self.n_embd),
            "attn_q_norm.weight": _gain(rng, self.head_width),
            "attn_k_norm.weight": _gain(rng, self.head_width),
            "attn_output.weight": _matrix(rng, self.n_embd, q),
        }

    def _delta_net(self, rng: np.random.Generator) -> Weights:
        inner = self.n_value_heads * self.state_width
        channels = 2 * self.n_key_heads * self.state_width + inner
        return {
            "attn_qkv.weight": _matrix(rng, channels, self.n_embd),
            "attn_gate.weight": _matrix(rng, inner, self.n_embd),
            "ssm_conv1d.weight": _matrix(rng, channels, self.conv_width),
            "ssm_alpha.weight": _matrix(rng, self.n_value_heads, self.n_embd),
            "ssm_beta.weight": _matrix(rng, self.n_value_heads, self.n_embd),
            # Half-lives from less than one to some tens of tokens.
            "ssm_a": -np.geomspace(0.02, 2, self.n_value_heads, dtype=np.float32),
            "ssm_dt.bias": rng.uniform(-1, 1, self.n_value_heads).astype(np.float32),
            "ssm_norm.weight": _gain(rng, self.state_width),
            "ssm_out.weight": _matrix(rng, self.n_embd, inner),
        }

    @property
    def n_rotated(self) -> int:
        return 2 * sum(self.rotated)

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([*self.rotated, 0])
        writer.add_full_attention_interval(self.attention_every)
        writer.add_ssm_conv_kernel(self.conv_width)
        writer.add_ssm_state_size(self.state_width)
        writer.add_ssm_group_count(self.n_key_heads)
        writer.add_ssm_time_step_rank(self.n_value_heads)
        writer.add_ssm_inner_size(self.n_value_heads * self.state_width)

    def shape(self) -> gated_delta.Shape:
        return gated_delta.Shape(
            self.n_layer,
            self.n_head,
            self.n_head_kv,
            self.rope_base,
            self.eps,
            n_key_heads=self.n_key_heads,
            n_rotated=self.n_rotated,
            attention_every=self.attention_every,
        )


def write_vocabulary(path: Path, specials: Sequence[str], ends: Sequence[str]) -> Path:
    """A model file with a tokenizer and no weights: bytes, and tokens that stand for more.

    :param ends: up to three of them that end what a model generates, the first one EOS.
    """
    writer = gguf.GGUFWriter(path, "llama")
    eos, *others = (_N_BYTE_TOKENS + specials.index(end) for end in ends)
    _add_byte_tokenizer(writer, specials, eos)
    for add, token in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


_N_BYTE_TOKENS = 3 + 256


def _add_byte_tokenizer(
    writer: gguf.GGUFWriter,
    specials: Sequence[str] = (),
    eos: int = 2,
    *,
    add_bos: bool = True,
    add_eos: bool | None = None,
) -> None:
    """A SentencePiece-like vocabulary: <unk>, <s>, </s>, then the 256 bytes, then special tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *specials]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.CONTROL] * len(specials)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    writer.add_add_space_prefix(False)


def copy_keys(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, left_out: tuple[str, ...] = (), *, only: str = ""
) -> None:
    """All keys that begin with `only` but the architecture, which the writer has, and those that begin with
    what is left out. Empty arrays are left out too: the writer knows none."""
    for name, entry in reader.fields.items():
        if not name.startswith(only) or name.startswith(("GGUF.", "general.architecture", *left_out)):
            continue
        value: Any = entry.contents()
        is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
        if not is_array or value:
            writer.add_key_value(name, value, entry.types[0], sub_type=entry.types[-1] if is_array else None)


def split(whole: Path, folder: Path, most: int = 15) -> list[Path]:
    """A model in files of at most so many tensors."""
    folder.mkdir(exist_ok=True)
    reader = gguf.GGUFReader(whole)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "part.gguf", arch, split_max_tensors=most)
    copy_keys(reader, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def write_as_f32(source: Path, target: Path, *, vocabulary: bool = True) -> Path:
    """A copy of a GGUF file with all tensors dequantised to float32, by the gguf package.

    :param vocabulary: False leaves out the tokens, which readers in Python take long for.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    left_out = ("general.file_type", "general.quantization_version")
    copy_keys(reader, writer, left_out if vocabulary else (*left_out, "tokenizer."))
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
