"""Seeded random files of block drafters: DFlash and DSpark, for targets of
:mod:`support.tiny_models.drafters`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.tiny_models import Shapes, Value, _random, feed_forward, linear, norm
from support.tiny_models.drafters import (
    HEAD_GAIN,
    HEAD_WIDTH,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    N_VOCAB,
    ROPE_BASE,
    Tensors,
    decoder_keys,
    write_file,
)
from support.tiny_models.rigged import MARGIN, VOCABULARY, Table
from support.tiny_models.rigged import N_VOCAB as RIGGED_VOCAB

#: A byte that no text of the tests holds.
MASK = N_VOCAB - 1


def write_dflash(
    path: Path,
    *,
    target_layers: tuple[int, ...] = (1, 2, 3),
    block_size: int = 6,
    own_embedding: bool = True,
    own_head: bool = True,
    n_draft_vocab: int | None = None,
    causal: bool = False,
    markov: int = 0,
    confidence: bool = False,
    anchor: bool = True,
    n_layer: int = 2,
    mask: int | None = MASK,
    seed: int = 0,
) -> Path:
    """
    :param markov: rank of DSpark's head from token to token; 0: a DFlash file.
    :param confidence: DSpark's confidence head.
    :param anchor: of DSpark, whether place 0 gives the first token.
    """
    rng = np.random.default_rng(seed)
    n_rows = N_VOCAB if n_draft_vocab is None else n_draft_vocab
    shapes: Shapes = {
        "fc.weight": (N_EMBD, len(target_layers) * N_EMBD),
        **norm("output_norm", N_EMBD),
        **norm("enc.output_norm", N_EMBD),
    }
    if own_embedding:
        shapes["token_embd.weight"] = (N_VOCAB, N_EMBD)
    if own_head:
        shapes["output.weight"] = (n_rows, N_EMBD)
    for i in range(n_layer):
        block = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            shapes |= norm(block + name, N_EMBD)
        shapes |= linear(f"{block}attn_q", N_HEAD * HEAD_WIDTH, N_EMBD)
        for part in "kv":
            shapes |= linear(f"{block}attn_{part}", N_HEAD_KV * HEAD_WIDTH, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, N_HEAD * HEAD_WIDTH)
        for part in "qk":
            shapes |= norm(f"{block}attn_{part}_norm", HEAD_WIDTH)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    if markov:
        shapes["markov_w1.weight"] = (N_VOCAB, markov)
        shapes["markov_w2.weight"] = (n_rows, markov)
    if confidence:
        shapes["conf_proj.weight"] = (1, N_EMBD + markov)
        shapes["conf_proj.bias"] = (1,)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = _random(rng, name, shape)
        if name == "output.weight":
            values = values * HEAD_GAIN
        if name == "markov_w1.weight":
            values = values * np.float32(np.sqrt(markov) * 2)
        tensors[name] = values
    if n_draft_vocab is not None:
        ids = np.sort(rng.choice(np.arange(3, N_VOCAB), n_draft_vocab, replace=False))
        tensors["d2t"] = ids.astype(np.int64)
    keys: dict[str, Value] = {
        **decoder_keys(n_layer, N_EMBD, N_FF, N_HEAD_KV, ROPE_BASE),
        "target_layers": list(target_layers),
        "block_size": block_size,
        "attention.causal": causal,
    }
    if markov:
        keys["sample_from_anchor"] = anchor
    return write_file(path, "dflash", keys, tensors, mask=mask)


def write_rigged_dspark(path: Path, table: Table, *, block_size: int = 6, margin: float = MARGIN) -> Path:
    """A DSpark drafter for targets of :mod:`support.tiny_models.rigged`.

    Its logits depend on the token before alone, so that it follows ``by_token(table)``; what it attends to
    counts for nothing.
    """
    width = N_HEAD * HEAD_WIDTH
    zeros = np.zeros((RIGGED_VOCAB, RIGGED_VOCAB), np.float32)
    ones = np.ones(RIGGED_VOCAB, np.float32)
    follow = zeros.copy()
    follow[list(table), np.arange(RIGGED_VOCAB)] = margin
    tensors: Tensors = {
        "fc.weight": np.zeros((RIGGED_VOCAB, 3 * RIGGED_VOCAB), np.float32),
        "enc.output_norm.weight": ones,
        "output_norm.weight": ones,
        "token_embd.weight": np.eye(RIGGED_VOCAB, dtype=np.float32),
        "output.weight": zeros,
        "markov_w1.weight": np.eye(RIGGED_VOCAB, dtype=np.float32),
        "markov_w2.weight": follow,
    }
    block = "blk.0."
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"{block}{name}.weight"] = ones
    for part in "qkv":
        tensors[f"{block}attn_{part}.weight"] = zeros[:width]
    tensors[f"{block}attn_output.weight"] = zeros[:, :width]
    for part in "qk":
        tensors[f"{block}attn_{part}_norm.weight"] = np.ones(HEAD_WIDTH, np.float32)
    for part in ("gate", "up", "down"):
        tensors[f"{block}ffn_{part}.weight"] = zeros
    keys: dict[str, Value] = {
        **decoder_keys(1, RIGGED_VOCAB, RIGGED_VOCAB, N_HEAD, ROPE_BASE),
        "target_layers": [1, 2, 3],
        "block_size": block_size,
    }
    return write_file(path, "dflash", keys, tensors, VOCABULARY, mask=0)
