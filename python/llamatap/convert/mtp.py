"""MTP blocks as GGUF files of architecture ``mimo2``, whose block is the one of mtp.safetensors.

A draft file has the block alone, behind the target's number of blocks, with the target's token embedding,
head and last norm as they are in the target's file. A whole file has the target's blocks too, for programs
that take the block from the model's own file: a model of architecture ``llama`` is rewritten with the same
weights, which compute the same. What the engine reads is in its src/models/mimo2.cpp:

- NEOX rope, so that rows of q and k of a llama file are brought back to halves; whole rows move, which also
  quantised matrices allow.
- q, k and v of the block in one matrix.
- At least one block with a sliding window, even where no block has one: the first of the target, with a
  window that is longer than any context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.gguf_files import GgufContent, GgufSource, RawTensor, shortest
from llamatap.convert.mtp_block import MtpBlock, MtpConfig
from llamatap.convert.rope import to_halves
from llamatap.convert.tensors import dtype_of, narrowed
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = ["joined", "mtp_from_gguf", "whole_model"]

#: The block's tensors in GGUF, by their names in mtp.safetensors; q, k and v are joined.
_NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "shared_head.norm": "nextn.shared_head_norm",
}
_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")

# Times the number of sequences it must fit 32 bits.
_WINDOW = 1 << 20

#: Keys of a llama model that a rewritten one has as well, or whose effect the tensors show.
_LLAMA_KEYS = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    )
)
_LLAMA_BLOCK = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def _check_target(block: MtpBlock, target: GgufSource) -> None:
    """Check that the block is for this model.

    :raises InvalidInputError: the block is for another model.
    """
    config, name = block.config, target.path.name
    depth = config.target_num_hidden_layers
    for what, ours, theirs in (
        ("a model of architecture", config.target_architecture, target.arch),
        ("states of width", config.hidden_size, target.n_embd),
        ("a vocabulary of", config.vocab_size, target.n_vocab),
        ("a model with blocks:", target.n_layer if depth is None else depth, target.n_layer),
    ):
        if ours != theirs:
            raise InvalidInputError(
                f"the MTP block is for {what} {ours}, but {name} has {theirs}; give the target that it was "
                "trained for"
            )


def _ends(target: GgufSource) -> dict[str, RawTensor]:
    """Token embedding, head and last norm, as the target has them."""
    tokens = target.raw("token_embd.weight")
    head = target.raw("output.weight") if "output.weight" in target.names else tokens
    return {
        "token_embd.weight": tokens,
        "output_norm.weight": target.raw("output_norm.weight"),
        "output.weight": head,
    }


def _block_tensors(block: MtpBlock, index: int, n_ff: int) -> dict[str, NDArray[np.float32]]:
    """The block's tensors in GGUF.

    :param n_ff: width of the feed-forward; rows and columns of zeros are added up to it.
    """
    w = block.tensors
    found = {f"blk.{index}.{theirs}.weight": w[f"{ours}.weight"] for ours, theirs in _NAMES.items()}
    found[f"blk.{index}.attn_qkv.weight"] = np.concatenate([w[name] for name in _QKV])
    if missing := n_ff - block.config.intermediate_size:
        for name, widths in (
            ("gate", ((0, missing), (0, 0))),
            ("up", ((0, missing), (0, 0))),
            ("down", ((0, 0), (0, missing))),
        ):
            key = f"blk.{index}.ffn_{name}.weight"
            found[key] = np.pad(found[key], widths)
    return found


def _keys(config: MtpConfig, n_layer: int, n_ctx: int) -> dict[str, Any]:
    """The keys of a file whose blocks all have the shape of this one."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": n_ctx,
        "embedding_length": config.hidden_size,
        "block_count": n_layer + 1,
        "nextn_predict_layers": 1,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": max(n_ctx, _WINDOW),
        "attention.sliding_window_pattern": [index == 0 for index in range(n_layer)] + [False],
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "rope.freq_base_swa": config.rope_theta,
    }


def joined(block: MtpBlock, target: GgufSource) -> GgufContent:
    """The content of a draft file: the block alone, with the target's embedding and head.

    :raises InvalidInputError: the block is for another model.
    """
    _check_target(block, target)
    config = block.config
    tensors: dict[str, NDArray[Any] | RawTensor] = {
        **_ends(target),
        **_block_tensors(block, target.n_layer, config.intermediate_size),
    }
    keys = _keys(config, target.n_layer, config.max_position_embeddings)
    return GgufContent("mimo2", keys, tensors, {"general.name": f"MTP block for {target.name}"})


def _trunk(target: GgufSource) -> dict[str, RawTensor]:
    """All tensors of a llama model, in the order of rows that ``mimo2`` reads.

    :raises UnsupportedError: a tensor or a key has no place there.
    """
    n_head = int(target.key(".attention.head_count"))
    heads = {"attn_q": n_head, "attn_k": int(target.key(".attention.head_count_kv", n_head))}
    found = dict(_ends(target))
    for index in range(target.n_layer):
        for part in _LLAMA_BLOCK:
            name = f"blk.{index}.{part}.weight"
            raw = target.raw(name)
            if part in heads:
                raw = RawTensor(to_halves(raw.data, heads[part]), raw.type)
            found[name] = raw
    return found


def _check_llama(target: GgufSource) -> None:
    """Check that a target can be rewritten as ``mimo2``.

    :raises UnsupportedError: the target is no llama model, or computes with more than ``mimo2`` does.
    """
    name = target.path.name
    if target.arch != "llama":
        raise UnsupportedError(
            f"{name} is of architecture {target.arch}; only llama can be rewritten as mimo2"
        )
    blocks = {f"blk.{index}.{part}.weight" for index in range(target.n_layer) for part in _LLAMA_BLOCK}
    known = blocks | {"token_embd.weight", "output.weight", "output_norm.weight"}
    refused = sorted(set(target.names) - known)
    for full, entry in target.keys("llama."):
        key = full.removeprefix("llama.")
        value = entry.contents()
        if key in _LLAMA_KEYS and not isinstance(value, list):
            continue
        neutral = (0, False) if not key.startswith("rope.scal") else (0, 1, "none", "linear")
        if value not in neutral:
            refused.append(f"{full} = {value!r}")
    width = int(
        target.key(".attention.key_length", target.n_embd // int(target.key(".attention.head_count")))
    )
    if int(target.key(".attention.value_length", width)) != width:
        refused.append("llama.attention.value_length")
    if refused:
        raise UnsupportedError(f"mimo2 does not compute with {', '.join(refused)} of {name}")


def whole_model(block: MtpBlock, target: GgufSource) -> GgufContent:
    """The content of a whole file: a llama model, rewritten as ``mimo2``, with the block behind it.

    :raises UnsupportedError: the target is no llama model, or computes with more than ``mimo2`` does.
    :raises InvalidInputError: the block is for another model, or differs from the model's blocks where a file
        of ``mimo2`` has one value for all.
    """
    _check_target(block, target)
    _check_llama(target)
    config = block.config
    n_head, n_ff = int(target.key(".attention.head_count")), int(target.key(".feed_forward_length"))
    n_head_kv = int(target.key(".attention.head_count_kv", n_head))
    width = int(target.key(".attention.key_length", target.n_embd // n_head))
    base = shortest(target.key(".rope.freq_base", 10000.0))
    for what, ours, theirs in (
        ("heads of width", config.head_dim, width),
        ("a rotary base of", shortest(config.rope_theta), base),
        (
            "an epsilon of",
            shortest(config.rms_norm_eps),
            shortest(target.key(".attention.layer_norm_rms_epsilon")),
        ),
    ):
        if ours != theirs:
            raise InvalidInputError(
                f"the MTP block has {what} {ours}, {target.path.name} {theirs}; a whole file has one for all "
                "blocks"
            )
    if config.intermediate_size > n_ff:
        raise InvalidInputError(
            f"the MTP block has a feed-forward of {config.intermediate_size}, wider than {n_ff} of "
            f"{target.path.name}; a whole file has one width for all blocks"
        )
    n_layer, n_ctx = target.n_layer, int(target.key(".context_length"))
    tensors: dict[str, NDArray[Any] | RawTensor] = {**_trunk(target), **_block_tensors(block, n_layer, n_ff)}
    keys = _keys(config, n_layer, n_ctx) | {"feed_forward_length": n_ff, "expert_feed_forward_length": n_ff}
    for key, of_model in (("attention.head_count", n_head), ("attention.head_count_kv", n_head_kv)):
        if keys[key] != of_model:
            keys[key] = [of_model] * n_layer + [keys[key]]
    return GgufContent("mimo2", keys, tensors)


def _last(value: Any) -> int:
    """A key of the last block: of a list with one entry a block, or the same for all."""
    return int(value[-1] if isinstance(value, list) else value)


def mtp_from_gguf(draft: GgufSource, target: GgufSource) -> tuple[MtpConfig, dict[str, NDArray[Any]]]:
    """The MTP block of a ``mimo2`` file with one, whole or alone.

    Matrices keep their type (quantised ones become float32); norms take the matrices' type where it holds
    their values.

    :raises UnsupportedError: the file has another number of such blocks, or more than a block computes with.
    :raises InvalidInputError: the block is for another model.
    """
    if int(draft.key(".nextn_predict_layers", 0)) != 1:
        raise UnsupportedError(
            f"{draft.path.name} has {draft.key('.nextn_predict_layers', 0)} MTP blocks, expected 1"
        )
    index = draft.n_layer
    n_head = _last(draft.key(".attention.head_count"))
    pattern = draft.key(".attention.sliding_window_pattern")
    config = MtpConfig(
        hidden_size=draft.n_embd,
        vocab_size=draft.n_vocab,
        target_architecture=target.arch,
        target_num_hidden_layers=target.n_layer,
        intermediate_size=_last(draft.key(".feed_forward_length")),
        num_attention_heads=n_head,
        num_key_value_heads=_last(draft.key(".attention.head_count_kv", n_head)),
        head_dim=int(draft.key(".attention.key_length", draft.n_embd // n_head)),
        rope_theta=shortest(draft.key(".rope.freq_base", 10000.0)),
        rms_norm_eps=shortest(draft.key(".attention.layer_norm_rms_epsilon")),
        max_position_embeddings=int(draft.key(".context_length")),
    )
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in _NAMES.items()}
    own = {
        name.removeprefix(f"blk.{index}."): name for name in draft.names if name.startswith(f"blk.{index}.")
    }
    refused = sorted(own[name] for name in own.keys() - names.keys() - {"attn_qkv.weight"})
    if pattern[-1]:
        refused.append("a sliding window")
    if float(draft.key(".attention.value_scale", 1.0)) not in (0.0, 1.0):
        refused.append("mimo2.attention.value_scale")
    if refused:
        raise UnsupportedError(f"mtp.safetensors has no place for {', '.join(refused)} of {draft.path.name}")
    tensors: dict[str, NDArray[Any]] = {}
    dtype = dtype_of(draft.type_of(f"blk.{index}.nextn.eh_proj.weight"))
    for theirs, ours in names.items():
        values = draft.values(f"blk.{index}.{theirs}")
        tensors[ours] = narrowed(values, dtype)
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    parts = np.split(draft.values(f"blk.{index}.attn_qkv.weight"), [q, q + kv])
    tensors |= {name: narrowed(part, dtype) for name, part in zip(_QKV, parts, strict=True)}
    _check_target(MtpBlock(config, {}, dtype), target)
    return config, _ordered(config, tensors)


def _ordered(config: MtpConfig, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: tensors[name] for name in config.shapes()}
