"""The blocks of qwen35 (Qwen3-Next, Qwen3.5) in float64: gated delta nets, and full attention in between.

Most blocks mix tokens by a gated delta net (Gated Delta Networks, arXiv:2412.06464). q, k and v pass a causal
convolution over the last few tokens (one kernel a channel) and SiLU; q and k are then scaled to length 1.
Each value head keeps a matrix S that is its whole past:

    S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = S_t q_t / sqrt(width)

with a_t = exp(-exp(A_log) softplus(alpha_t + dt_bias)) (the decay of Mamba 2, arXiv:2405.21060) and
b_t = sigmoid(beta_t). alpha_t and beta_t are linear in what enters. Each head's o_t is RMS-normed with a
weight that all heads share, and gated by SiLU of z_t, also linear in what enters.

Every `attention_every`-th block attends instead (gated attention, arXiv:2505.06708, as Qwen3-Next uses it):
heads of q and k are normed as in Qwen3, only their first `n_rotated` values are rotated, and what a head
gives is multiplied by the sigmoid of a gate as wide as the head. The multi-section rotation gives each pair
the position of one of three axes; in text all three are the token's position, which is the plain rotation.

The recurrence is run token by token: no chunked form, no cache. What GGUF files of this architecture hold:

- q, k and v of the delta net as one matrix in that order;
- value heads in such an order that head h reads with key head h mod n_key_heads (in checkpoints it is
  h div (n_value_heads / n_key_heads));
- -exp(A_log) instead of A_log, and the weights of norms with the 1 added (that of o_t has none to add);
- attention's q matrix with the gate of each head behind its query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference import decoder
from reference.decoder import activation, attention, rms_norm, rotate

Array = NDArray[np.float64]

#: Under the root when q and k are scaled to length 1; not the eps of the norms, though of the same size.
LENGTH_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Shape(decoder.Shape):
    n_key_heads: int  # of the delta net; its value heads are as many as its decays
    n_rotated: int
    attention_every: int

    def attends(self, block: int) -> bool:
        return block % self.attention_every == self.attention_every - 1


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def silu(x: Array) -> Array:
    return activation(x, gelu=False)


def to_length_one(x: Array) -> Array:
    result: Array = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + LENGTH_EPS)
    return result


def causal_convolution(x: Array, kernel: Array) -> Array:
    """Each channel of (tokens, channels) over its own past; the kernel's last column is for the present."""
    width = kernel.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    result: Array = np.zeros_like(x)
    for tap in range(width):
        result += padded[tap : tap + len(x)] * kernel[:, tap]
    return result


def delta_rule(q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
    """The recurrence above on (tokens, heads, width); decay and beta are (tokens, heads)."""
    n, heads, width = v.shape
    memory = np.zeros((heads, width, k.shape[-1]))
    out = np.empty_like(v)
    for t in range(n):
        key = k[t][:, None, :]
        erased = (memory @ key.swapaxes(1, 2)) @ key
        written = v[t][:, :, None] @ key
        a, b = decay[t][:, None, None], beta[t][:, None, None]
        memory = a * (memory - b * erased) + b * written
        out[t] = (memory @ q[t][:, :, None])[:, :, 0] / np.sqrt(q.shape[-1])
    return out


def delta_net(shape: Shape, w: dict[str, Array], x: Array) -> Array:
    """Output of a gated delta net for (tokens, width); `w` holds the tensors of its block."""
    n, heads, width = len(x), len(w["ssm_a"]), len(w["ssm_norm.weight"])
    mixed = silu(causal_convolution(x @ w["attn_qkv.weight"].T, w["ssm_conv1d.weight"]))
    keys = shape.n_key_heads * width
    q, k = (
        to_length_one(part.reshape(n, -1, width)) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    v = mixed[:, 2 * keys :].reshape(n, heads, width)
    reads_with = np.arange(heads) % shape.n_key_heads

    time_step = np.logaddexp(0, x @ w["ssm_alpha.weight"].T + w["ssm_dt.bias"])
    decay = np.exp(w["ssm_a"] * time_step)
    beta = sigmoid(x @ w["ssm_beta.weight"].T)
    read = rms_norm(
        delta_rule(q[:, reads_with], k[:, reads_with], v, decay, beta), w["ssm_norm.weight"], shape.eps
    )
    gated = read.reshape(n, -1) * silu(x @ w["attn_gate.weight"].T)
    return gated @ w["ssm_out.weight"].T


def gated_attention(shape: Shape, w: dict[str, Array], x: Array) -> Array:
    """Output of full attention for (tokens, width); `w` holds the tensors of its block."""
    n, positions = len(x), np.arange(len(x))
    q, gate = np.split((x @ w["attn_q.weight"].T).reshape(n, shape.n_head, -1), 2, axis=-1)
    k = (x @ w["attn_k.weight"].T).reshape(n, shape.n_head_kv, -1)
    v = (x @ w["attn_v.weight"].T).reshape(n, shape.n_head_kv, -1)

    def turned(heads: Array, name: str) -> Array:
        normed = rms_norm(heads, w[name], shape.eps)
        first, rest = normed[..., : shape.n_rotated], normed[..., shape.n_rotated :]
        return np.concatenate([rotate(first, positions, shape.rope_base, halves=True), rest], axis=-1)

    seen = positions[:, None] >= positions[None, :]
    mixed = attention(turned(q, "attn_q_norm.weight"), turned(k, "attn_k_norm.weight"), v, seen)
    return (mixed * sigmoid(gate).reshape(n, -1)) @ w["attn_output.weight"].T


def forward(
    shape: Shape, weights: dict[str, NDArray[np.float32]], inputs: Array
) -> tuple[Array, Array, Array]:
    """All states of one sequence.

    :param inputs: (tokens, width): what enters the first block.
    :returns: H_0..H_n as (n+1, tokens, width), norm(H_n) as (tokens, width), logits as (tokens, vocabulary).
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    stream = inputs.astype(np.float64)
    states = [stream]
    for i in range(shape.n_layer):
        prefix = f"blk.{i}."
        block = {name.removeprefix(prefix): values for name, values in w.items() if name.startswith(prefix)}
        mix = gated_attention if shape.attends(i) else delta_net
        stream = stream + mix(shape, block, rms_norm(stream, block["attn_norm.weight"], shape.eps))

        x = rms_norm(stream, block["post_attention_norm.weight"], shape.eps)
        fed = silu(x @ block["ffn_gate.weight"].T) * (x @ block["ffn_up.weight"].T)
        stream = stream + fed @ block["ffn_down.weight"].T
        states.append(stream)
    normed = rms_norm(stream, w["output_norm.weight"], shape.eps)
    return np.stack(states), normed, normed @ w["output.weight"].T
