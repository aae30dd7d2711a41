"""The blocks of dense decoders in float64: llama, qwen3 and gemma3.

Formulas: RMSNorm (arXiv:1910.07467), rotary embedding (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245), gated feed-forward (arXiv:2002.05202), put together as in LLaMA (arXiv:2302.13971).
Qwen3 (arXiv:2505.09388) norms each head of q and k before the rotation. Gemma 3 (arXiv:2503.19786) does so
too, scales the embeddings by sqrt(width), norms what attention and feed-forward give before it is added,
uses GELU (its tanh form, arXiv:1606.08415), and lets most blocks see a window of the last tokens only, with
a rotary base of its own.

GGUF files of the llama architecture hold q and k rows so that the rotation acts on neighbouring pairs
(2j, 2j+1); in qwen3 and gemma3 it acts on the pairs (j, j + width/2) of the two halves.
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
    halves: bool = False  # which pairs the rotation acts on
    gelu: bool = False  # instead of SiLU
    window: int = 0  # how many tokens, itself included, a token of a local block sees; 0: all
    window_base: float = 10000.0
    global_every: int = 6  # block 5, 11, ... sees all

    def is_local(self, block: int) -> bool:
        return self.window > 0 and block % self.global_every < self.global_every - 1


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return scale * weight


def rotate(x: Array, positions: NDArray[np.int64], base: float, halves: bool) -> Array:
    """Rotate pairs of (tokens, heads, width) by position * base^(-2j/width)."""
    width = x.shape[-1]
    frequency = base ** (-np.arange(0, width, 2) / width)
    angle = positions[:, None, None] * frequency
    first = np.s_[..., : width // 2] if halves else np.s_[..., 0::2]
    second = np.s_[..., width // 2 :] if halves else np.s_[..., 1::2]
    out = np.empty_like(x)
    out[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
    out[second] = x[first] * np.sin(angle) + x[second] * np.cos(angle)
    return out


def attention(q: Array, k: Array, v: Array, seen: NDArray[np.bool_], bias: Array | float = 0.0) -> Array:
    """Attention of (tokens, heads, width); k and v have fewer heads, shared by groups of q's."""
    n, heads, width = q.shape
    groups = heads // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width) + bias
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * width)
    return mixed


def activation(x: Array, gelu: bool) -> Array:
    if gelu:
        tanh: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return tanh
    silu: Array = x / (1 + np.exp(-x))
    return silu


def forward(
    shape: Shape,
    weights: dict[str, NDArray[np.float32]],
    inputs: Array,
    positions: NDArray[np.int64] | None = None,
) -> tuple[Array, Array, Array]:
    """All states of one sequence.

    :param inputs: (tokens, width): what enters the first block.
    :param positions: (tokens,), rising; None for 0, 1, 2 and so on.
    :returns: H_0..H_n as (n+1, tokens, width), norm(H_n) as (tokens, width), logits as (tokens, vocabulary).
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    if positions is None:
        positions = np.arange(len(inputs))
    distance = positions[:, None] - positions[None, :]
    stream = inputs.astype(np.float64)
    states = [stream]

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], shape.eps) if name in w else x

    for i in range(shape.n_layer):
        block = f"blk.{i}."
        local = shape.is_local(i)
        base = shape.window_base if local else shape.rope_base
        seen = (distance >= 0) if shape.causal else np.ones_like(distance, bool)
        if local:
            seen = seen & (distance < shape.window)

        x = norm(stream, block + "attn_norm.weight")
        q, k, v = (
            (x @ w[f"{block}attn_{name}.weight"].T).reshape(len(x), count, -1)
            for name, count in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv))
        )
        q = rotate(norm(q, block + "attn_q_norm.weight"), positions, base, shape.halves)
        k = rotate(norm(k, block + "attn_k_norm.weight"), positions, base, shape.halves)
        mixed = attention(q, k, v, seen) @ w[block + "attn_output.weight"].T
        stream = stream + norm(mixed, block + "post_attention_norm.weight")

        x = norm(stream, block + "ffn_norm.weight")
        gate = activation(x @ w[block + "ffn_gate.weight"].T, shape.gelu)
        fed = (gate * (x @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
        stream = stream + norm(fed, block + "post_ffw_norm.weight")
        states.append(stream)
    normed = rms_norm(stream, w["output_norm.weight"], shape.eps)
    return np.stack(states), normed, normed @ w["output.weight"].T
