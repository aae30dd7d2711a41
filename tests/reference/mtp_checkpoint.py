"""Multi-token prediction in float64 from the weights that a trainer writes, beside a target's own.

The formulas are those of :mod:`reference.mtp`, on other weights: names of transformers, q, k and v in three
matrices whose heads rotate the pairs (j, j + width/2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.decoder import Array, activation, attention, rms_norm, rotate
from reference.eagle3 import softmax


@dataclass(frozen=True)
class Block:
    """The block's tensors by name, its shape, and the target's token embedding and head."""

    tensors: Mapping[str, NDArray[Any]]
    n_head: int
    n_head_kv: int
    rope_base: float
    eps: float
    embedding: NDArray[Any]
    head: NDArray[Any]

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.weight(name), self.eps)


def decode(tokens: Sequence[int], states: Array, block: Block) -> tuple[Array, Array]:
    """The block on all pairs at positions 0, 1, ...

    :param states: (n, d): zeros, then H_n of the position before each, or what an earlier step gave.
    :returns: logits (n, v) and the next states (n, d).
    """
    at = np.arange(len(tokens))
    token = block.norm(block.embedding.astype(np.float64)[list(tokens)], "enorm")
    matrix = block.weight("eh_proj")
    width = token.shape[1]
    stream = token @ matrix[:, :width].T + block.norm(states, "hnorm") @ matrix[:, width:].T
    x = block.norm(stream, "input_layernorm")
    q, k, v = (
        (x @ block.weight(f"self_attn.{name}_proj").T).reshape(len(x), count, -1)
        for name, count in (("q", block.n_head), ("k", block.n_head_kv), ("v", block.n_head_kv))
    )
    q, k = (rotate(part, at, block.rope_base, halves=True) for part in (q, k))
    stream = stream + attention(q, k, v, at[:, None] >= at[None, :]) @ block.weight("self_attn.o_proj").T
    x = block.norm(stream, "post_attention_layernorm")
    gate = activation(x @ block.weight("mlp.gate_proj").T, gelu=False)
    stream = stream + (gate * (x @ block.weight("mlp.up_proj").T)) @ block.weight("mlp.down_proj").T
    return block.norm(stream, "shared_head.norm") @ block.head.astype(np.float64).T, stream


def draft(tokens: Sequence[int], hidden: Array, block: Block, n: int) -> tuple[list[int], Array]:
    """Draft greedily after a text; arguments and result as :func:`reference.mtp.draft`."""
    seen = [int(token) for token in tokens]
    states = np.concatenate([np.zeros((1, block.embedding.shape[1])), hidden])
    probabilities = []
    for _ in range(n):
        logits, after = decode(seen, states, block)
        token = int(logits[-1].argmax())
        probabilities.append(softmax(logits)[-1, token])
        seen.append(token)
        states = np.concatenate([states, after[-1:]])
    return seen[len(tokens) :], np.array(probabilities)
