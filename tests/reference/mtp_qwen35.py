"""The block of multi-token prediction of qwen35 (Qwen3.5), in float64.

A pair of a token's embedding e and a state h is folded into the width of the stream, and goes through one
block that attends (see :mod:`reference.gated_delta`), whatever the trunk would have in its place:

    x = W_eh [norm(e), norm(h)],    x = x + attention(norm(x)),    x = x + ffn(norm(x)),    s = norm(x)

The logits are W s, and s is the next step's h: unlike in mimo2 (:mod:`reference.mtp`), states are normed,
those of the block by the norm before its head and those of the trunk by the trunk's last one. The pair at
position P is (token[P], h[P-1]), with h of zeros before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reference import gated_delta
from reference.decoder import Array, rms_norm
from reference.eagle3 import softmax
from reference.gated_delta import gated_attention, silu


def decode(
    tokens: Sequence[int] | NDArray[np.integer],
    states: NDArray[np.generic],
    weights: dict[str, NDArray[np.float32]],
    shape: gated_delta.Shape,
) -> tuple[Array, Array]:
    """All pairs of one sequence from position 0 on, of which each sees itself and earlier ones.

    :param states: (n, d): h, or what an earlier step gave.
    :param weights: of the file: v tokens, d of the stream.
    :param shape: the trunk's; the block comes after its layers.
    :returns: logits (n, v), and the next states (n, d).
    """
    prefix = f"blk.{shape.n_layer}."
    whole = {name: values.astype(np.float64) for name, values in weights.items()}
    w = {name.removeprefix(prefix): values for name, values in whole.items() if name.startswith(prefix)}

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], shape.eps)

    embeddings = w.get("nextn.embed_tokens.weight", whole["token_embd.weight"])
    e = norm(embeddings[np.asarray(tokens)], "nextn.enorm.weight")
    h = norm(states.astype(np.float64), "nextn.hnorm.weight")
    stream = np.concatenate([e, h], axis=1) @ w["nextn.eh_proj.weight"].T
    stream = stream + gated_attention(shape, w, norm(stream, "attn_norm.weight"))
    x = norm(stream, "post_attention_norm.weight")
    stream = stream + (silu(x @ w["ffn_gate.weight"].T) * (x @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    gain = w.get("nextn.shared_head_norm.weight", whole["output_norm.weight"])
    after = rms_norm(stream, gain, shape.eps)
    return after @ w.get("nextn.shared_head_head.weight", whole["output.weight"]).T, after


def draft(
    tokens: Sequence[int],
    hidden: NDArray[np.generic],
    weights: dict[str, NDArray[np.float32]],
    shape: gated_delta.Shape,
    n: int,
) -> tuple[list[int], Array]:
    """Draft greedily after a text, with the one block for every step.

    :param tokens: the text, T tokens, the last of which the target has sampled and not seen yet.
    :param hidden: (T-1, d): norm(H_n) of positions 0..T-2.
    :returns: the tokens, and their probabilities (tokens,) in the softmax over the block's logits.
    """
    seen = [int(token) for token in tokens]
    states = np.concatenate([np.zeros((1, hidden.shape[1])), hidden])
    probabilities = []
    for _ in range(n):
        logits, after = decode(seen, states, weights, shape)
        seen.append(int(logits[-1].argmax()))
        probabilities.append(softmax(logits)[-1].max())
        states = np.concatenate([states, after[-1:]])
    return seen[len(tokens) :], np.array(probabilities)
