"""Multi-token prediction in float64: the architecture mimo2, its trunk and the blocks appended to it.

The blocks of the trunk are those of dense decoders (see :mod:`reference.decoder`): pre-norm, grouped-query
attention with the rotation on pairs (j, j + width/2), gated feed-forward with SiLU. Some see a window of the
last tokens, with a rotary base of their own.

A block of multi-token prediction (arXiv:2412.19437, section 2.2) is one more block of that kind on pairs of a
token's embedding e and a state h, which a matrix folds into the width of the stream:

    x = W_eh [norm(e), norm(h)],    s = block(x),    logits = W norm(s)

The pair at position P is (token[P], h[P-1]), h being H_n of the trunk before its last norm and zero before
the first token. The logits there are about token[P+1], as the trunk's are; the state s is the next step's h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference import file
from reference.decoder import Array, activation, attention, rms_norm, rotate
from reference.eagle3 import softmax

#: Where the norm before the head of a block is, {} being the block: the first that the file has.
HEAD_NORMS = ("{}nextn.shared_head_norm.weight", "{}layer_output_norm.weight", "output_norm.weight")


@dataclass(frozen=True)
class Weights:
    """A file of architecture mimo2, whole or with the appended blocks alone.

    :param tensors: by name; v tokens, d of the stream.
    :param n_layer: of the trunk, whether the file has it or not.
    :param n_nextn: appended blocks; block k of them is blk.<n_layer + k>.
    :param local: of each block, appended ones included, whether it sees a window.
    """

    tensors: dict[str, Array]
    n_layer: int
    n_nextn: int
    n_head: int
    n_head_kv: int
    head_width: int
    rope_base: float
    local_base: float
    window: int
    local: tuple[bool, ...]
    eps: float

    @classmethod
    def read(cls, path: Path) -> Weights:
        key, tensors = file.read(path)
        n_nextn = key(".nextn_predict_layers", 0)
        n_head = key(".attention.head_count")
        return cls(
            tensors,
            key(".block_count") - n_nextn,
            n_nextn,
            n_head,
            key(".attention.head_count_kv", n_head),
            key(".attention.key_length", len(tensors["output_norm.weight"]) // n_head),
            file.rotary_base(key),
            float(key(".rope.freq_base_swa", 10000.0)),
            key(".attention.sliding_window"),
            tuple(key(".attention.sliding_window_pattern")),
            key(".attention.layer_norm_rms_epsilon"),
        )

    def first(self, *names: str) -> Array:
        """The first of these tensors that the file has."""
        return next(self.tensors[name] for name in names if name in self.tensors)


def _qkv(x: Array, block: str, weights: Weights) -> tuple[Array, Array, Array]:
    """q, k and v as (tokens, heads, width), from three matrices or from one with their rows in this order."""
    w, counts = weights.tensors, (weights.n_head, weights.n_head_kv, weights.n_head_kv)
    fused = w.get(f"{block}attn_qkv.weight")
    if fused is None:
        parts = [x @ w[f"{block}attn_{name}.weight"].T for name in "qkv"]
    else:
        widths = np.array(counts[:2]) * weights.head_width
        parts = np.split(x @ fused.T, np.cumsum(widths), axis=1)
    q, k, v = (part.reshape(len(x), count, -1) for part, count in zip(parts, counts, strict=True))
    return q, k, v


def _block(stream: Array, index: int, positions: NDArray[np.int64], weights: Weights) -> Array:
    """One block on the stream of one sequence, (tokens, d)."""
    w, block = weights.tensors, f"blk.{index}."
    local = weights.local[index]
    base = weights.local_base if local else weights.rope_base
    distance = positions[:, None] - positions[None, :]
    seen = (distance >= 0) & (distance < weights.window) if local else distance >= 0
    x = rms_norm(stream, w[f"{block}attn_norm.weight"], weights.eps)
    q, k, v = _qkv(x, block, weights)
    q, k = (rotate(part, positions, base, halves=True) for part in (q, k))
    stream = stream + attention(q, k, v, seen) @ w[f"{block}attn_output.weight"].T
    x = rms_norm(stream, w[f"{block}ffn_norm.weight"], weights.eps)
    gate = activation(x @ w[f"{block}ffn_gate.weight"].T, gelu=False)
    return stream + (gate * (x @ w[f"{block}ffn_up.weight"].T)) @ w[f"{block}ffn_down.weight"].T


def forward(tokens: Sequence[int] | NDArray[np.integer], weights: Weights) -> tuple[Array, Array]:
    """The trunk on one sequence from position 0.

    :returns: H_0..H_n as (n_layer + 1, tokens, d), before the last norm, and logits as (tokens, v).
    """
    w, positions = weights.tensors, np.arange(len(tokens))
    states = [w["token_embd.weight"][np.asarray(tokens)]]
    for index in range(weights.n_layer):
        states.append(_block(states[-1], index, positions, weights))
    normed = rms_norm(states[-1], w["output_norm.weight"], weights.eps)
    return np.stack(states), normed @ w["output.weight"].T


def decode(
    tokens: Sequence[int] | NDArray[np.integer],
    states: NDArray[np.generic],
    positions: Sequence[int] | NDArray[np.integer],
    weights: Weights,
    head: int = 0,
) -> tuple[Array, Array]:
    """Appended block ``head`` on all n pairs of one sequence, of which each sees itself and earlier ones.

    :param states: (n, d): h, or what an earlier step gave.
    :param positions: (n,) ascending.
    :returns: logits (n, v), and the next states (n, d), before the head's norm.
    """
    w, index = weights.tensors, weights.n_layer + head
    block = f"blk.{index}."
    embeddings = weights.first(f"{block}nextn.embed_tokens.weight", "token_embd.weight")
    e = rms_norm(embeddings[np.asarray(tokens)], w[f"{block}nextn.enorm.weight"], weights.eps)
    h = rms_norm(states.astype(np.float64), w[f"{block}nextn.hnorm.weight"], weights.eps)
    stream = np.concatenate([e, h], axis=1) @ w[f"{block}nextn.eh_proj.weight"].T
    after = _block(stream, index, np.asarray(positions, np.int64), weights)
    gain = weights.first(*(name.format(block) for name in HEAD_NORMS))
    matrix = weights.first(f"{block}nextn.shared_head_head.weight", "output.weight")
    return rms_norm(after, gain, weights.eps) @ matrix.T, after


def draft(
    tokens: Sequence[int], hidden: NDArray[np.generic], weights: Weights, n: int
) -> tuple[list[int], Array]:
    """Draft greedily after a text, at positions T-1, T, ...

    One appended block is used again for every step. Of several, step k is block k, which sees the whole text
    through its own keys and values: the pairs of the text, then the last token and the draft so far, each
    with the state that came before it (h[T-2], then what blocks 0..k-1 gave). Then n is at most their number.

    :param tokens: the text, T tokens, the last of which the target has sampled and not seen yet.
    :param hidden: (T-1, d): H_n of positions 0..T-2.
    :returns: the tokens, and their probabilities (tokens,) in the softmax over the block's logits.
    """
    if len(hidden) != len(tokens) - 1:
        raise ValueError(f"{len(tokens)} tokens have states of one less, not {len(hidden)}")
    chained = weights.n_nextn > 1
    seen = [int(token) for token in tokens]
    width = weights.tensors["output_norm.weight"].shape[0]
    states = np.concatenate([np.zeros((1, width)), hidden.astype(np.float64).reshape(-1, width)])
    probabilities = []
    for step in range(min(n, weights.n_nextn) if chained else n):
        logits, after = decode(seen, states, np.arange(len(seen)), weights, step if chained else 0)
        token = int(logits[-1].argmax())
        probabilities.append(softmax(logits)[-1, token])
        seen.append(token)
        states = np.concatenate([states, after[-1:]])
    return seen[len(tokens) :], np.array(probabilities)
