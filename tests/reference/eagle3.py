"""EAGLE-3 (arXiv:2503.01840) in float64: one block that drafts on another model's states.

An encoder makes one row g = W_fc f of the features f, the states of three layers of the target side by side.
The decoder is one block on pairs of a token's embedding e and a row g. Attention sees both,
[norm(e), norm(g)], while the residual stream carries g alone:

    r = g + attention([norm(e), norm(g)]),    s = r + feed_forward(norm(r)),    logits = W norm(s)

The state s before the last norm takes the place of g when drafting goes on. With the pair at position P being
(token[P+1], g[P]), the logits there are about token[P+2]. Two variants norm the features before fc, or take
norm(g) into the stream instead of g. A head over a part of the vocabulary comes with d2t, the target's ids of
its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference import file
from reference.decoder import Array, activation, attention, rms_norm, rotate

TOKENS = "token_embd.weight"
HEAD = "output.weight"


@dataclass(frozen=True)
class Weights:
    """A file of architecture eagle3: d of its width, w of the target's, v tokens of the target.

    :param tensors: by name, with the target's token embedding (v, d) and head (v, d) where the file has none.
    :param d2t: (rows of the head,) the target's token ids; None where the head has all of them in order.
    """

    tensors: dict[str, Array]
    d2t: NDArray[np.int64] | None
    n_vocab: int
    n_head: int
    n_head_kv: int
    rope_base: float
    eps: float
    norm_before_residual: bool
    norm_before_fc: bool
    target_layers: tuple[int, int, int]

    @classmethod
    def read(cls, path: Path, target: Path | None = None) -> Weights:
        """
        :param target: the file that the token embedding and the head are taken from where this one has none.
        """
        key, tensors = file.read(path)
        if target is not None:
            inherited = file.read(target)[1]
            inherited.setdefault(HEAD, inherited[TOKENS])
            for name in (TOKENS, HEAD):
                tensors.setdefault(name, inherited[name])
        d2t = tensors.pop("d2t", None)
        first, second, third = key(".target_layers")
        return cls(
            tensors,
            None if d2t is None else d2t.astype(np.int64),
            len(tensors[TOKENS]),
            key(".attention.head_count"),
            key(".attention.head_count_kv", key(".attention.head_count")),
            file.rotary_base(key),
            key(".attention.layer_norm_rms_epsilon"),
            key(".norm_before_residual", False),
            key(".norm_before_fc", False),
            (first, second, third),
        )

    def norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)


def encode(features: NDArray[np.generic], weights: Weights) -> Array:
    """The rows g, (n, d), of features, (n, 3 * w)."""
    x = features.astype(np.float64)
    if weights.norm_before_fc:
        x = weights.norm(x, "enc.output_norm")
    return x @ weights.tensors["fc.weight"].T


def decode(
    tokens: Sequence[int] | NDArray[np.integer],
    states: NDArray[np.generic],
    positions: Sequence[int] | NDArray[np.integer],
    weights: Weights,
) -> tuple[Array, Array]:
    """The block on all n pairs of one sequence, of which each sees itself and those before it.

    :param states: (n, d): g, or what an earlier step gave.
    :param positions: (n,) ascending; they turn neighbouring values (2j, 2j+1) of q and k.
    :returns: logits (n, v), -inf where d2t has no entry, and the next states (n, d), before the last norm.
    """
    w = weights.tensors
    at = np.asarray(positions, np.int64)
    g = states.astype(np.float64)
    normed = weights.norm(g, "blk.0.attn_norm_2")
    x = np.concatenate([weights.norm(w[TOKENS][np.asarray(tokens)], "blk.0.attn_norm"), normed], axis=1)
    q, k, v = (
        (x @ w[f"blk.0.attn_{name}.weight"].T).reshape(len(x), count, -1)
        for name, count in (("q", weights.n_head), ("k", weights.n_head_kv), ("v", weights.n_head_kv))
    )
    q, k = (rotate(part, at, weights.rope_base, halves=False) for part in (q, k))
    mixed = attention(q, k, v, at[:, None] >= at[None, :]) @ w["blk.0.attn_output.weight"].T
    stream = (normed if weights.norm_before_residual else g) + mixed
    x = weights.norm(stream, "blk.0.ffn_norm")
    gate = activation(x @ w["blk.0.ffn_gate.weight"].T, gelu=False)
    stream = stream + (gate * (x @ w["blk.0.ffn_up.weight"].T)) @ w["blk.0.ffn_down.weight"].T
    logits = weights.norm(stream, "output_norm") @ w[HEAD].T
    if weights.d2t is None:
        return logits, stream
    scattered = np.full((len(x), weights.n_vocab), -np.inf)
    scattered[:, weights.d2t] = logits
    return scattered, stream


def softmax(logits: Array) -> Array:
    """Probabilities of (tokens, v)."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = powers / powers.sum(axis=-1, keepdims=True)
    return result


def draft(
    tokens: Sequence[int], features: NDArray[np.generic], weights: Weights, n: int
) -> tuple[list[int], Array]:
    """Draft greedily after a text.

    :param tokens: the text, T tokens, the last of which the target has sampled and not seen yet.
    :param features: (T-1, 3 * w), those of positions 0..T-2.
    :returns: n tokens, and their probabilities (n,) in the softmax over the draft's logits. The step at
        position T-2+i gives token i of the draft.
    """
    states = encode(features, weights)
    if not len(tokens) - 1 == len(states) > 0:
        raise ValueError(f"{len(tokens)} tokens have features of one less, not {len(states)}")
    seen = [int(token) for token in tokens[1:]]
    probabilities = []
    for _ in range(n):
        logits, after = decode(seen, states, np.arange(len(seen)), weights)
        token = int(logits[-1].argmax())
        probabilities.append(softmax(logits)[-1, token])
        seen.append(token)
        states = np.concatenate([states, after[-1:]])
    return seen[len(tokens) - 1 :], np.array(probabilities)
