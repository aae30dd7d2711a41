"""Seeded random files for speculative decoding: EAGLE-3 drafters, and mimo2 with multi-token prediction.

Vocabulary (259 tokens: <unk>, <s>, </s>, 256 bytes) and default width (64) are those of ``tiny.TinyLlama``,
so that any target fits any drafter here. All weights are float32. Embeddings are of order 1, hence the states
too; heads are scaled so that the first of the logits is about one ahead of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray
from support.tiny_models import EPS, Shapes, Value, _add, _random, feed_forward, linear, norm

Tensors: TypeAlias = "dict[str, NDArray[np.float32] | NDArray[np.int64]]"

N_VOCAB = 259
N_EMBD = 64
N_HEAD = 4
N_HEAD_KV = 2
HEAD_WIDTH = 16
N_FF = 96
N_CTX = 4096
#: RoPE bases of blocks that see a window, and of all others.
LOCAL_BASE, ROPE_BASE = 1e4, 1e5
HEAD_GAIN = np.float32(4)


@dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece vocabulary without merges. Tokens 0, 1, 2 are <unk>, <s>, </s>; <0xNN> are bytes."""

    tokens: tuple[str, ...]

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        kinds += [
            gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL
            for token in self.tokens[3:]
        ]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(self.tokens)
        writer.add_token_scores([0.0] * len(self.tokens))
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)


BYTES = Vocabulary(("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))))


def write_file(
    path: Path,
    arch: str,
    keys: Mapping[str, Value],
    tensors: Tensors,
    vocabulary: Vocabulary = BYTES,
    *,
    mask: int | None = None,
) -> Path:
    """Write a GGUF file; keys are the architecture's, without its name in front."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in {**keys, "vocab_size": len(vocabulary.tokens)}.items():
        _add(writer, f"{arch}.{key}", value)
    vocabulary.add_to(writer)
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoder_keys(n_layer: int, n_embd: int, n_ff: int, n_head_kv: int, rope_base: float) -> dict[str, Value]:
    return {
        "context_length": N_CTX,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.dimension_count": HEAD_WIDTH,
        "rope.freq_base": rope_base,
    }


def mimo2_keys(
    n_layer: int, n_nextn: int, n_ff: int, n_head_kv: int, window: int | None = None
) -> dict[str, Value]:
    """
    :param n_layer: of the trunk; blocks 0, 2, ... of all see the window, the others see everything.
    :param window: None for all of the context.
    """
    n_blocks = n_layer + n_nextn
    keys = {
        **decoder_keys(n_blocks, N_EMBD, n_ff, n_head_kv, ROPE_BASE),
        "expert_feed_forward_length": n_ff,
        "attention.sliding_window": N_CTX if window is None else window,
        "attention.sliding_window_pattern": [index % 2 == 0 for index in range(n_blocks)],
        "rope.freq_base_swa": LOCAL_BASE,
    }
    return keys | ({"nextn_predict_layers": n_nextn} if n_nextn else {})


def _draw(seed: int, shapes: Shapes) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = _random(rng, name, shape)
        is_head = name == "output.weight" or name.endswith("shared_head_head.weight")
        tensors[name] = values * HEAD_GAIN if is_head else values
    return tensors


def _without(tensors: Tensors, names: Iterable[str]) -> Tensors:
    left_out = set(names)
    return {name: values for name, values in tensors.items() if name not in left_out}


def write_eagle3(
    path: Path,
    *,
    n_embd: int = N_EMBD,
    n_embd_target: int = N_EMBD,
    target_layers: tuple[int, ...] = (1, 2, 3),
    own_embedding: bool = True,
    own_head: bool = True,
    n_draft_vocab: int | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    n_vocab: int = N_VOCAB,
    seed: int = 0,
) -> Path:
    """Write an EAGLE-3 drafter. Options that leave a tensor out change no other weight.

    :param n_embd: its width; without an embedding or a head of its own, it must be n_embd_target.
    :param n_embd_target: the width of the model that it drafts for.
    :param target_layers: the i of the states H_i that are the features.
    :param n_draft_vocab: rows of the head, with the target's ids, ascending, as d2t; None: a row for each
        token of the target, and no d2t. The head of a target has a row for each of its tokens, so without a
        head of its own the engine takes None or 259 only.
    :param n_vocab: tokens of the target; the first of those that it has otherwise.
    """
    drawn = np.random.default_rng([seed, 1])
    rows = n_vocab if n_draft_vocab is None else n_draft_vocab
    q, kv, block = N_HEAD * HEAD_WIDTH, N_HEAD_KV * HEAD_WIDTH, "blk.0."
    features = n_embd_target * len(target_layers)
    shapes: Shapes = {
        "fc.weight": (n_embd, features),
        **norm(f"{block}attn_norm", n_embd),
        **norm(f"{block}attn_norm_2", n_embd),
        **linear(f"{block}attn_q", q, 2 * n_embd),
        **linear(f"{block}attn_k", kv, 2 * n_embd),
        **linear(f"{block}attn_v", kv, 2 * n_embd),
        **linear(f"{block}attn_output", n_embd, q),
        **norm(f"{block}ffn_norm", n_embd),
        **feed_forward(block, n_embd, N_FF),
        **norm("output_norm", n_embd),
        **norm("enc.output_norm", features),
        "token_embd.weight": (n_vocab, n_embd),
        "output.weight": (rows, n_embd),
    }
    tensors = _draw(seed, shapes)
    # Otherwise the state carried from step to step would give the same token again and again.
    for part in "qkv":
        tensors[f"{block}attn_{part}.weight"][:, :n_embd] *= 3
    tensors[f"{block}attn_output.weight"] *= 2
    kept = {
        "token_embd.weight": own_embedding,
        "output.weight": own_head,
        "enc.output_norm.weight": norm_before_fc,
    }
    tensors = _without(tensors, (name for name, keep in kept.items() if not keep))
    if n_draft_vocab is not None:
        ids = drawn.choice(n_vocab, n_draft_vocab, replace=False).astype(np.int64)
        tensors["d2t"] = np.sort(ids)
    keys: dict[str, Value] = {
        **decoder_keys(1, n_embd, N_FF, N_HEAD_KV, ROPE_BASE),
        "target_layers": list(target_layers),
        "target_hidden_size": n_embd_target,
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
    }
    return write_file(path, "eagle3", keys, tensors, Vocabulary(BYTES.tokens[:n_vocab]))


HeadNorm: TypeAlias = Literal["shared", "layer", "trunk"]


def _mimo2_shapes(index: int) -> Shapes:
    """Shapes of a block of the trunk, which an appended block has as well."""
    block = f"blk.{index}."
    q, kv = N_HEAD * HEAD_WIDTH, N_HEAD_KV * HEAD_WIDTH
    return {
        **norm(f"{block}attn_norm", N_EMBD),
        **linear(f"{block}attn_qkv", q + 2 * kv, N_EMBD),
        **linear(f"{block}attn_output", N_EMBD, q),
        **norm(f"{block}ffn_norm", N_EMBD),
        **feed_forward(block, N_EMBD, N_FF),
    }


def _mimo2(
    n_layer: int,
    n_nextn: int,
    fused: bool,
    head_norm: HeadNorm,
    own_head: bool,
    own_embedding: bool,
    seed: int,
) -> Tensors:
    """Tensors of a whole model. Options that leave out or split a tensor change no other weight."""
    shapes: Shapes = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        **norm("output_norm", N_EMBD),
        "output.weight": (N_VOCAB, N_EMBD),
    }
    for index in range(n_layer):
        shapes |= _mimo2_shapes(index)
    tensors = _draw(seed, shapes)
    for index in range(0 if fused else n_layer):
        rows = tensors.pop(f"blk.{index}.attn_qkv.weight")
        ends = (N_HEAD * HEAD_WIDTH, (N_HEAD + N_HEAD_KV) * HEAD_WIDTH)
        for name, part in zip("qkv", np.split(rows, ends), strict=True):
            tensors[f"blk.{index}.attn_{name}.weight"] = np.ascontiguousarray(part)
    for head in range(n_nextn):
        block = f"blk.{n_layer + head}."
        shapes = {
            **_mimo2_shapes(n_layer + head),
            **linear(f"{block}nextn.eh_proj", N_EMBD, 2 * N_EMBD),
            **norm(f"{block}nextn.enorm", N_EMBD),
            **norm(f"{block}nextn.hnorm", N_EMBD),
            **norm(f"{block}nextn.shared_head_norm", N_EMBD),
            **norm(f"{block}layer_output_norm", N_EMBD),
            f"{block}nextn.shared_head_head.weight": (N_VOCAB, N_EMBD),
            f"{block}nextn.embed_tokens.weight": (N_VOCAB, N_EMBD),
        }
        kept = {
            "nextn.shared_head_norm": head_norm == "shared",
            "layer_output_norm": head_norm != "trunk",
            "nextn.shared_head_head": own_head,
            "nextn.embed_tokens": own_embedding,
        }
        drawn = _draw(seed + 1000 * (head + 1), shapes)
        tensors |= _without(drawn, (f"{block}{name}.weight" for name, keep in kept.items() if not keep))
    return tensors


def write_mimo2(
    path: Path,
    *,
    n_layer: int = 3,
    n_nextn: int = 1,
    fused: bool = True,
    window: int | None = None,
    head_norm: HeadNorm = "shared",
    own_head: bool = False,
    own_embedding: bool = False,
    seed: int = 0,
) -> Path:
    """A target of architecture mimo2 with its blocks of multi-token prediction in the same file.

    :param n_layer: blocks of the trunk; the weights of the others do not depend on them.
    :param n_nextn: appended blocks: 0 for none, 1 for one that is used for all steps, more for a chain.
    :param fused: q, k and v of the trunk in one matrix; those of appended blocks always are.
    :param window: of blocks 0, 2, ...; None for all of the context.
    :param head_norm: the norm before an appended block's head: its shared_head_norm (with a layer_output_norm
        beside it that must not be used), its layer_output_norm, or the trunk's.
    :param own_head: appended blocks have a head of their own instead of the trunk's.
    :param own_embedding: appended blocks have a token embedding of their own.
    """
    tensors = _mimo2(n_layer, n_nextn, fused, head_norm, own_head, own_embedding, seed)
    return write_file(path, "mimo2", mimo2_keys(n_layer, n_nextn, N_FF, N_HEAD_KV, window), tensors)


def write_mtp_block(
    path: Path,
    *,
    n_layer: int = 3,
    n_nextn: int = 1,
    window: int | None = None,
    head_norm: HeadNorm = "shared",
    own_head: bool = False,
    own_embedding: bool = False,
    seed: int = 0,
) -> Path:
    """The same file as :func:`write_mimo2` writes, without the blocks of the trunk.

    Options are the same. n_layer is the number of the first block; by convention it is what the target has.
    """
    tensors = _mimo2(n_layer, n_nextn, True, head_norm, own_head, own_embedding, seed)
    trunk = tuple(f"blk.{index}." for index in range(n_layer))
    alone = {name: values for name, values in tensors.items() if not name.startswith(trunk)}
    return write_file(path, "mimo2", mimo2_keys(n_layer, n_nextn, N_FF, N_HEAD_KV, window), alone)


def write_glm4moe(path: Path, seed: int = 0) -> Path:
    """A whole glm4moe file: one dense block, and an MTP block with two experts and a shared one. The engine's
    graph of that block gives the states of all rows, and the logits of outputs alone."""
    width, n_experts = HEAD_WIDTH * N_HEAD, 2
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    shapes |= norm("output_norm", N_EMBD)
    for i in range(2):
        block = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm"):
            shapes |= norm(block + name, N_EMBD)
        shapes |= linear(f"{block}attn_q", width, N_EMBD)
        for part in "kv":
            shapes |= linear(f"{block}attn_{part}", HEAD_WIDTH * N_HEAD_KV, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, width)
    shapes |= feed_forward("blk.0.", N_EMBD, N_FF)
    block = "blk.1."
    shapes |= linear(f"{block}ffn_gate_inp", n_experts, N_EMBD)
    shapes[f"{block}exp_probs_b.bias"] = (n_experts,)
    for part, outputs, inputs in (("gate", N_FF, N_EMBD), ("up", N_FF, N_EMBD), ("down", N_EMBD, N_FF)):
        shapes[f"{block}ffn_{part}_exps.weight"] = (n_experts, outputs, inputs)
        shapes |= linear(f"{block}ffn_{part}_shexp", outputs, inputs)
    shapes |= linear(f"{block}nextn.eh_proj", N_EMBD, 2 * N_EMBD)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        shapes |= norm(f"{block}nextn.{name}", N_EMBD)
    keys = {
        **decoder_keys(2, N_EMBD, N_FF, N_HEAD_KV, ROPE_BASE),
        "expert_feed_forward_length": N_FF,
        "expert_count": n_experts,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
    }
    return write_file(path, "glm4moe", keys, _draw(seed, shapes))
