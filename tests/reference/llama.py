"""The llama block in float64.

Formulas: RMSNorm (arXiv:1910.07467), rotary embedding (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245), SwiGLU (arXiv:2002.05202), put together as in LLaMA (arXiv:2302.13971). GGUF files of the
llama architecture hold q and k rows so that the rotation acts on neighbouring pairs (2j, 2j+1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    n_layer: int
    n_head: int
    n_head_kv: int
    rope_base: float
    eps: float
    causal: bool = True


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return scale * weight


def rotate(x: Array, positions: NDArray[np.int64], base: float) -> Array:
    """Rotate pairs of (tokens, heads, width) by position * base^(-2j/width)."""
    width = x.shape[-1]
    frequency = base ** (-np.arange(0, width, 2) / width)
    angle = positions[:, None, None] * frequency
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Attention of (tokens, heads, width); k and v have fewer heads, shared by groups of q's."""
    n, heads, width = q.shape
    groups = heads // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
    if causal:
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * width)
    return mixed


def forward(
    shape: Shape, weights: dict[str, NDArray[np.float32]], inputs: Array
) -> tuple[Array, Array, Array]:
    """All states of one sequence.

    :param inputs: (tokens, width): the embeddings of the tokens.
    :returns: H_0..H_n as (n+1, tokens, width), norm(H_n) as (tokens, width), logits as (tokens, vocabulary).
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    positions = np.arange(len(inputs))
    stream = inputs.astype(np.float64)
    states = [stream]
    for i in range(shape.n_layer):
        block = f"blk.{i}."
        x = rms_norm(stream, w[block + "attn_norm.weight"], shape.eps)

        def heads(name: str, count: int, x: Array = x, block: str = block) -> Array:
            return (x @ w[block + name].T).reshape(len(x), count, -1)

        q = rotate(heads("attn_q.weight", shape.n_head), positions, shape.rope_base)
        k = rotate(heads("attn_k.weight", shape.n_head_kv), positions, shape.rope_base)
        v = heads("attn_v.weight", shape.n_head_kv)
        stream = stream + attention(q, k, v, shape.causal) @ w[block + "attn_output.weight"].T
        x = rms_norm(stream, w[block + "ffn_norm.weight"], shape.eps)
        gate = x @ w[block + "ffn_gate.weight"].T
        up = x @ w[block + "ffn_up.weight"].T
        stream = stream + (gate / (1 + np.exp(-gate)) * up) @ w[block + "ffn_down.weight"].T
        states.append(stream)
    normed = rms_norm(stream, w["output_norm.weight"], shape.eps)
    return np.stack(states), normed, normed @ w["output.weight"].T
