"""EAGLE-3 drafters: checkpoints of trainers, and GGUF files of architecture ``eagle3``.

Three kinds of checkpoints hold the same block (https://arxiv.org/abs/2503.01840) under other names:

- ``speculators``: ``speculators_model_type`` is "eagle3", the block's shape is in
  ``transformer_layer_config``, its tensors are ``layers.0.*``; ``eagle_aux_hidden_state_layer_ids`` counts as
  vLLM does.
- ``eagle3``: ``LlamaForCausalLMEagle3`` of SpecForge and EAGLE, ``midlayer.*``; layers, if any are named, are
  in ``eagle_config`` and count as SGLang does.
- ``angelslim``: ``Eagle3LlamaForCausalLM``, ``layers.0.*`` or ``midlayer.*``;
  ``aux_hidden_states_layer_ids`` counts as SGLang does, ``eagle_aux_hidden_state_layer_ids`` as vLLM does.

``d2t`` holds offsets in checkpoints (the target's id of row i is ``i + d2t[i]``) and ids in GGUF. ``t2d``
says the same as a mask, and is compared.

What the engine computes is in its src/models/eagle3.cpp: one block with SiLU, without biases, on three
layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.checkpoint_files import Checkpoint
from llamatap.convert.eagle3_config import (
    Eagle3Format,
    Eagle3Shape,
    checkpoint_config,
    format_of,
    gguf_keys,
    gguf_notes,
    read_config,
    read_gguf,
)
from llamatap.convert.gguf_files import GgufContent, GgufSource
from llamatap.convert.rope import to_halves, to_neighbours
from llamatap.convert.tensors import Tensors, dtype_of, narrowed
from llamatap.convert.vocabulary import absolute_ids, equals_target
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = ["from_gguf", "to_content"]

#: Tensors of the block, by their names in GGUF.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AROUND = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
}


def to_content(
    checkpoint: Checkpoint,
    target: GgufSource,
    *,
    target_layers: Sequence[int] | None = None,
    embedding: Literal["auto", "own"] = "auto",
    ignored: Collection[str] = (),
) -> tuple[GgufContent, Eagle3Shape]:
    """The GGUF content of an EAGLE-3 checkpoint.

    :param target_layers: the i of the three H_i, instead of those that the checkpoint names.
    :param embedding: "auto" leaves out a token embedding or a head that equals the target's.
    :param ignored: names of tensors and of settings that are left out although their effect is unknown.
    :raises UnsupportedError: the engine's graph does not compute with a tensor or a setting.
    :raises InvalidInputError: the checkpoint is incomplete, contradicts itself, or is for another target.
    """
    kind = format_of(checkpoint.config)
    assert kind is not None
    shape, refused = read_config(checkpoint.config, kind, target, target_layers, ignored)
    tensors = Tensors(checkpoint.tensors, ignored=ignored)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in checkpoint.tensors) else "layers.0."

    def source(name: str) -> str:
        return f"{prefix}{_BLOCK[name]}.weight" if name in _BLOCK else f"{_AROUND[name]}.weight"

    # What is refused comes first: a block of another kind has other shapes, too.
    known = {source(name) for name in (*_BLOCK, *_AROUND)} | {"d2t", "t2d"}
    if not shape.norm_before_fc:
        known.discard(source("enc.output_norm"))
    refused += [name for name in sorted(checkpoint.tensors.keys() - known) if name not in ignored]
    if refused:
        raise UnsupportedError(f"the engine's EAGLE-3 graph does not compute with {', '.join(refused)}")

    content: dict[str, NDArray[Any]] = {}
    ids = absolute_ids(tensors, shape.n_draft_vocab, shape.n_vocab)
    for name, expected in shape.shapes().items():
        optional = name in ("token_embd", "output")
        if (name == "enc.output_norm" and not shape.norm_before_fc) or (
            optional and source(name) not in tensors
        ):
            continue
        values = tensors.take(source(name), *expected)
        if values is None:
            continue
        shared = optional and embedding == "auto" and (name == "token_embd" or ids is None)
        if shared and equals_target(checkpoint.tensors[source(name)], target, f"{name}.weight"):
            continue
        if name == "attn_q":
            values = to_neighbours(values, shape.n_head)
        if name == "attn_k":
            values = to_neighbours(values, shape.n_head_kv)
        content[f"blk.0.{name}.weight" if name in _BLOCK else f"{name}.weight"] = values
    tensors.check()
    _check_inherited(content, shape, ids)
    if ids is not None:
        content["d2t"] = ids
    if (divisors := shape.rope.divisors(shape.head_width)) is not None:
        content["rope_freqs.weight"] = divisors
    return GgufContent("eagle3", gguf_keys(shape), dict(content), gguf_notes(shape, target)), shape


def _check_inherited(
    content: Mapping[str, NDArray[Any]], shape: Eagle3Shape, ids: NDArray[np.int64] | None
) -> None:
    """Check that matrices that the checkpoint lacks can be the target's.

    :raises InvalidInputError: a matrix would be the target's, which does not fit.
    """
    for name in ("token_embd", "output"):
        if f"{name}.weight" in content:
            continue
        if shape.n_embd != shape.n_embd_target or (name == "output" and ids is not None):
            why = (
                "its rows are those of the draft's vocabulary" if name == "output" else "its width is another"
            )
            raise InvalidInputError(
                f"the checkpoint lacks {_AROUND[name]}.weight, and the target's does not fit: {why}"
            )


def from_gguf(
    draft: GgufSource, target: GgufSource, form: Eagle3Format, verifier: str | None = None
) -> tuple[dict[str, Any], dict[str, NDArray[Any]], Eagle3Shape]:
    """The config.json and the tensors of a GGUF file of architecture ``eagle3``.

    Matrices keep their type (quantised ones become float32); norms take the matrices' type where it holds
    their values. The token embedding and the head are the target's where the draft has none.
    """
    head, tokens = "output.weight", "token_embd.weight"
    shape = read_gguf(draft, target)
    d2t = draft.values("d2t") if "d2t" in draft.names else None
    known = {f"blk.0.{name}.weight" for name in _BLOCK} | {f"{name}.weight" for name in _AROUND}
    if others := sorted(set(draft.names) - known - {"d2t", "rope_freqs.weight"}):
        raise UnsupportedError(
            f"{draft.path.name} has tensors that no EAGLE-3 checkpoint has: {', '.join(others)}"
        )
    dtype = dtype_of(draft.type_of("fc.weight"))
    prefix = "midlayer." if form == "eagle3" else "layers.0."
    tensors: dict[str, NDArray[Any]] = {}
    for name, expected in shape.shapes().items():
        full = f"blk.0.{name}.weight" if name in _BLOCK else f"{name}.weight"
        if name == "enc.output_norm" and not shape.norm_before_fc:
            continue
        origin = draft
        if full in (head, tokens) and full not in draft.names:
            origin, full = target, full if full in target.names else tokens
        values = origin.values(full)
        if values.shape != expected:
            raise InvalidInputError(f"{full} has the shape {list(values.shape)}, expected {list(expected)}")
        if name == "attn_q":
            values = to_halves(values, shape.n_head)
        if name == "attn_k":
            values = to_halves(values, shape.n_head_kv)
        other = f"{prefix}{_BLOCK[name]}.weight" if name in _BLOCK else f"{_AROUND[name]}.weight"
        tensors[other] = narrowed(values, dtype if values.ndim == 1 else dtype_of(origin.type_of(full)))
    ids = np.arange(shape.n_vocab) if d2t is None else d2t
    if d2t is not None or form != "speculators":
        tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(shape.n_vocab), ids)
    return checkpoint_config(shape, form, target, verifier), tensors, shape
