"""DFlash and DSpark drafters: checkpoints of trainers to GGUF files of architecture ``dflash``.

Two kinds of checkpoints hold the same blocks (https://arxiv.org/abs/2602.06036), with Qwen3's names:

- ``speculators``: ``speculators_model_type`` is "dflash" or "dspark"; the shape of the blocks is in
  ``transformer_layer_config``; ``aux_hidden_state_layer_ids`` counts as vLLM does.
- SpecForge and DFlash's own: ``DFlashDraftModel``, ``DSparkDraftModel``; ``dflash_config.target_layer_ids``
  counts the states that leave the blocks, so that id k is H_{k+1}.

The engine rotates the pairs (j, j + d/2) here, as checkpoints do. Where a file has a token embedding and no
head, the engine takes the embedding for the head; so the target's head is written beside an embedding of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap.convert.block_shape import BlockShape, check_heads
from llamatap.convert.checkpoint_files import Checkpoint
from llamatap.convert.gguf_files import GgufContent, GgufSource, RawTensor
from llamatap.convert.rope import read_rope
from llamatap.convert.settings import Settings
from llamatap.convert.tensors import Tensors
from llamatap.convert.vocabulary import absolute_ids, equals_target
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = ["DFlashShape", "dflash_content", "is_dflash"]

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: Defaults of transformers' classes, which leave out what equals them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "intermediate_size": 22016,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    },
    "llama": {
        "intermediate_size": 11008,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
    },
}


@dataclass(frozen=True, kw_only=True)
class DFlashShape(BlockShape):
    """Shape and settings of a DFlash or DSpark drafter.

    :ivar markov: rank of DSpark's head from token to token; 0 for DFlash.
    :ivar confidence: whether there is a confidence head, and ``confidence_with_markov`` whether it sees the
        token before.
    :ivar anchor: whether place 0 of a block gives a token.
    """

    n_layer: int
    block_size: int
    mask: int
    markov: int
    confidence: bool
    confidence_with_markov: bool
    anchor: bool


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash or DSpark drafter."""
    return _kind(config) is not None


def _kind(config: Mapping[str, Any]) -> Literal["speculators", "specforge"] | None:
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] in ("dflash", "dspark") else None
    found = config.get("architectures")
    name = found[0] if isinstance(found, list) and found else ""
    return "specforge" if name in ("DFlashDraftModel", "DSparkDraftModel") else None


def _read_block(block: Settings) -> dict[str, Any]:
    """The shape of the decoder's blocks."""
    model_type = block.text("model_type", "qwen3")
    if model_type not in _DEFAULTS:
        block.refuse("model_type", "qwen3 and llama are known")
    other = _DEFAULTS.get(model_type, _DEFAULTS["qwen3"])
    n_embd, n_head = block.integer("hidden_size", 4096), block.integer("num_attention_heads", 32)
    block.only("hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias"):
        block.only(bias, False)
    n_layer = block.integer("num_hidden_layers", 32)
    block.only("layer_types", ["full_attention"] * n_layer, why="windows are not converted")
    if block.flag("use_sliding_window", False):
        block.refuse("use_sliding_window", "windows are not converted")
    # Without layers of that type it has no effect.
    block.skip("sliding_window", "tie_word_embeddings")
    return {
        "n_embd": n_embd,
        "n_ff": block.integer("intermediate_size", other["intermediate_size"]),
        "n_layer": n_layer,
        "n_head": n_head,
        "n_head_kv": block.integer("num_key_value_heads", n_head if model_type == "llama" else 32),
        "head_width": block.integer("head_dim", other["head_dim"] or max(n_embd // n_head, 1)),
        "n_vocab": block.integer("vocab_size", other["vocab_size"]),
        "n_ctx": block.integer("max_position_embeddings", other["max_position_embeddings"]),
        "eps": block.number("rms_norm_eps", 1e-6),
        "rope": read_rope(block),
    }


def _read_heads(
    settings: Settings, is_dspark: bool, *, rank: int, enabled: bool, markov: bool
) -> dict[str, Any]:
    """DSpark's heads.

    :param rank, enabled, markov: defaults of the trainer.
    """
    if not is_dspark:
        return {"markov": 0, "confidence": False, "confidence_with_markov": False}
    found = {
        "markov": settings.count("markov_rank", rank),
        "confidence": settings.flag("enable_confidence_head", enabled),
        "confidence_with_markov": settings.flag("confidence_head_with_markov", markov),
    }
    settings.only("markov_head_type", "vanilla")
    if not found["markov"]:
        settings.refuse("markov_rank", "DSpark without its Markov head")
    return found


def _read_speculators(
    config: Mapping[str, Any], target: GgufSource, ignored: Collection[str]
) -> tuple[dict[str, Any], Settings, Settings, list[int] | None, str]:
    top = Settings(config, ignored=ignored)
    block = top.inner("transformer_layer_config")
    is_dspark = config["speculators_model_type"] == "dspark"
    top.skip("speculators_config", "speculators_version", "speculators_model_type", "tie_word_embeddings")
    # Only of layers with windows, which are refused.
    top.skip("sliding_window_non_causal")
    found = _read_block(block) | _read_heads(top, is_dspark, rank=256, enabled=True, markov=True)
    found["anchor"] = top.flag("sample_from_anchor", is_dspark)
    if found["anchor"] and not is_dspark:
        top.refuse("sample_from_anchor", "of DFlash, place 0 gives no token")
    found["block_size"] = top.integer("block_size", 8)
    found["mask"] = top.count("mask_token_id")
    found["n_draft_vocab"] = top.integer("draft_vocab_size", found["n_vocab"])
    _check_width(top.integer("target_hidden_size", target.n_embd), target)
    return found, top, block, top.integers("aux_hidden_state_layer_ids"), "speculators"


def _read_specforge(
    config: Mapping[str, Any], target: GgufSource, ignored: Collection[str]
) -> tuple[dict[str, Any], Settings, Settings, list[int] | None, str]:
    top = Settings(config, ignored=ignored)
    inner = top.inner("dflash_config")
    is_dspark = config["architectures"][0] == "DSparkDraftModel"
    inner.only("projector_type", "dspark" if is_dspark else "dflash")
    inner.only("attention_mode", "gqa", "mha")
    inner.only("shift_label", False)
    # Weights of losses.
    inner.skip("confidence_head_alpha", "markov_loss_alpha")
    found = _read_block(top) | _read_heads(inner, is_dspark, rank=0, enabled=False, markov=False)
    # Place 0 of its blocks is the last known token.
    found["anchor"] = False
    found["block_size"] = top.integer("block_size")
    found["mask"] = inner.count("mask_token_id")
    found["n_draft_vocab"] = found["n_vocab"]
    if (depth := top.integer("num_target_layers", target.n_layer)) != target.n_layer:
        raise InvalidInputError(
            f"the checkpoint is for a target of {depth} blocks (num_target_layers), but {target.path.name} "
            f"has {target.n_layer}"
        )
    return found, top, inner, inner.integers("target_layer_ids"), "dflash"


def _check_width(width: int, target: GgufSource) -> None:
    if width != target.n_embd:
        raise InvalidInputError(
            f"the checkpoint is for features of width {width}, but {target.path.name} has {target.n_embd}; "
            "give the target that it was trained for"
        )


def _read_shape(
    config: Mapping[str, Any],
    target: GgufSource,
    given_layers: Sequence[int] | None,
    ignored: Collection[str],
) -> tuple[DFlashShape, list[str]]:
    read = _read_speculators if _kind(config) == "speculators" else _read_specforge
    found, top, inner, ids, system = read(config, target, ignored)
    if given_layers is None and ids is None:
        raise InvalidInputError("config.json names no layers of the target; give target_layers (--layers)")
    if given_layers is not None:
        layers = tuple(given_layers)
    else:
        translated = layer_ids.translate(ids or [], source=system, n_layer=target.n_layer, arch=target.arch)
        layers = tuple(int(one) for one in translated)
    refused = [*inner.rest(), *top.rest()]
    shape = DFlashShape(**found, target_layers=layers)
    if shape.n_vocab != target.n_vocab:
        raise InvalidInputError(
            f"the checkpoint is for a vocabulary of {shape.n_vocab}, but {target.path.name} has "
            f"{target.n_vocab}; give the target that it was trained for"
        )
    # Features go into the width of the blocks, which the engine takes for the target's.
    _check_width(shape.n_embd, target)
    if shape.mask >= shape.n_vocab:
        raise InvalidInputError(f"mask_token_id is {shape.mask}, of a vocabulary of {shape.n_vocab}")
    check_heads(shape.n_head, shape.n_head_kv, shape.head_width)
    return shape, refused


def _shapes(shape: DFlashShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By their names in GGUF: the names in the checkpoint, and shapes."""
    n, width = shape.n_embd, (shape.head_width,)
    inner = shape.block_shapes(n) | {"attn_q_norm": width, "attn_k_norm": width}
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "fc.weight": ("fc.weight", (n, len(shape.target_layers) * n)),
        "enc.output_norm.weight": ("hidden_norm.weight", (n,)),
        "output_norm.weight": ("norm.weight", (n,)),
        "token_embd.weight": ("embed_tokens.weight", (shape.n_vocab, n)),
        "output.weight": ("lm_head.weight", (shape.n_draft_vocab, n)),
    }
    for index in range(shape.n_layer):
        for name, size in inner.items():
            found[f"blk.{index}.{name}.weight"] = (f"layers.{index}.{_BLOCK[name]}.weight", size)
    if shape.markov:
        found["markov_w1.weight"] = ("markov_head.markov_w1.weight", (shape.n_vocab, shape.markov))
        found["markov_w2.weight"] = ("markov_head.markov_w2.weight", (shape.n_draft_vocab, shape.markov))
    if shape.confidence:
        columns = n + (shape.markov if shape.confidence_with_markov else 0)
        found["conf_proj.weight"] = ("confidence_head.proj.weight", (1, columns))
        found["conf_proj.bias"] = ("confidence_head.proj.bias", (1,))
    return found


def dflash_content(
    checkpoint: Checkpoint,
    target: GgufSource,
    *,
    target_layers: Sequence[int] | None = None,
    embedding: Literal["auto", "own"] = "auto",
    ignored: Collection[str] = (),
) -> tuple[GgufContent, DFlashShape]:
    """The GGUF content of a DFlash or DSpark checkpoint; parameters as of :func:`llamatap.convert.to_gguf`.

    :raises UnsupportedError: the engine's graph does not compute with a tensor or a setting.
    :raises InvalidInputError: the checkpoint is incomplete, contradicts itself, or is for another target.
    """
    shape, refused = _read_shape(checkpoint.config, target, target_layers, ignored)
    # Earlier checkpoints of SpecForge have their heads in a container.
    tensors_by_name = {name.removeprefix("logit_head."): one for name, one in checkpoint.tensors.items()}
    shapes = _shapes(shape)
    known = {ours for ours, _ in shapes.values()} | {"d2t", "t2d"}
    refused += [name for name in sorted(tensors_by_name.keys() - known) if name not in ignored]
    if refused:
        raise UnsupportedError(f"the engine's DFlash graph does not compute with {', '.join(refused)}")
    tensors = Tensors(tensors_by_name, ignored=ignored)
    ids = absolute_ids(tensors, shape.n_draft_vocab, shape.n_vocab)
    content: dict[str, NDArray[Any] | RawTensor] = {}
    for theirs, (ours, size) in shapes.items():
        optional = theirs in ("token_embd.weight", "output.weight")
        if optional and ours not in tensors:
            continue
        if (values := tensors.take(ours, *size)) is None:
            continue
        shared = optional and embedding == "auto" and (theirs == "token_embd.weight" or ids is None)
        if shared and equals_target(tensors[ours], target, theirs):
            continue
        content[theirs] = values
    tensors.check()
    if "output.weight" not in content:
        if ids is not None:
            raise InvalidInputError("the checkpoint lacks lm_head.weight, and its d2t needs one")
        if "token_embd.weight" in content:
            name = "output.weight" if "output.weight" in target.names else "token_embd.weight"
            content["output.weight"] = target.raw(name)
    if shape.confidence and not shape.confidence_with_markov:
        # The engine's head sees the token before as well.
        weight = content["conf_proj.weight"]
        assert isinstance(weight, np.ndarray)
        content["conf_proj.weight"] = np.pad(weight, ((0, 0), (0, shape.markov)))
    if ids is not None:
        content["d2t"] = ids
    if (divisors := shape.rope.divisors(shape.head_width)) is not None:
        content["rope_freqs.weight"] = divisors
    return GgufContent("dflash", _keys(shape), content, _notes(shape, target)), shape


def _keys(shape: DFlashShape) -> dict[str, Any]:
    keys = shape.gguf_keys(shape.n_layer) | {"attention.causal": False, "block_size": shape.block_size}
    if shape.markov:
        keys["sample_from_anchor"] = shape.anchor
    return keys


def _notes(shape: DFlashShape, target: GgufSource) -> dict[str, Any]:
    what = "DSpark" if shape.markov else "DFlash"
    notes: dict[str, Any] = {
        "general.name": f"{what} for {target.name}",
        "tokenizer.ggml.mask_token_id": shape.mask,
    }
    if shape.rope.kind == "llama3":
        notes["llamatap.rope"] = json.dumps(asdict(shape.rope))
    return notes
