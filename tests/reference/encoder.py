"""The blocks of encoders in float64: the family of BERT, ModernBERT, NeoBERT, EuroBERT, T5's encoder.

BERT (arXiv:1810.04805) adds embeddings of token, position and token type and norms the sum by LayerNorm
(arXiv:1607.06450). A block is post-norm, as in arXiv:1706.03762: x = norm(x + attention(x)), then
x = norm(x + feed_forward(x)). So the stream that enters block i is the last norm of block i-1, and nothing is
normed after the last block. Nomic's BERT (arXiv:2402.01613) rotates q and k (arXiv:2104.09864) instead of
adding positions and gates by SiLU (arXiv:2002.05202); Jina's v2 (arXiv:2310.19923) takes
slope * |distance| from the scores instead (arXiv:2108.12409).

ModernBERT (arXiv:2412.13663), NeoBERT (arXiv:2502.19587) and EuroBERT (arXiv:2503.05500) are pre-norm:
x = x + attention(norm(x)), x = x + feed_forward(norm(x)), and a norm after the last block. ModernBERT has no
norm before the first attention, and all but every third block see a window around a token, with a rotary base
of their own. T5's encoder (arXiv:1910.10683, section 2.1) is pre-norm too. Its scores are not scaled; what a
head learnt for the distance of two tokens is added to them, in buckets that widen with it.

GELU is its tanh form (arXiv:1606.08415), which the engine computes for all of them. It reads it from a table
with an entry for each float16 value, so the reference can round what goes in and what comes out likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference import decoder
from reference.decoder import Array


@dataclass(frozen=True)
class Shape:
    n_layer: int
    n_head: int
    n_head_kv: int
    eps: float
    post_norm: bool = False
    rms: bool = False  # instead of LayerNorm
    positions: Literal["learned", "halves", "pairs", "alibi", "buckets"] = "halves"
    activation: Literal["gelu", "silu"] = "silu"
    rope_base: float = 10000.0
    window: int = 0  # a local block sees window // 2 tokens to either side; 0: all
    window_base: float = 10000.0
    half_gelu: bool = False  # through float16, as the engine's table
    prefix: str = ""  # of the names of blocks
    n_buckets: int = 0  # of distances
    furthest: int = 128  # the distance from which on all are in one bucket

    def is_local(self, block: int) -> bool:
        return self.window > 0 and block % 3 != 0


def layer_norm(x: Array, weight: Array, bias: Array | float, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    result: Array = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps) * weight + bias
    return result


def bucket(distance: int, n_buckets: int, furthest: int) -> int:
    """Half of the buckets are of tokens behind; of each half, the first half are of one distance each, the
    others of distances that grow geometrically."""
    half = n_buckets // 2
    exact = half // 2
    offset, distance = (half if distance > 0 else 0), abs(distance)
    if distance < exact:
        return offset + distance
    steps = half - exact
    # The largest k with exact * (furthest / exact)^(k / steps) <= distance, in whole numbers.
    k: int = sum(distance**steps * exact**j >= furthest**j * exact**steps for j in range(1, steps))
    return offset + exact + k


class _Model:
    def __init__(self, shape: Shape, weights: dict[str, NDArray[np.float32]]) -> None:
        self.shape = shape
        self.w = {name: values.astype(np.float64) for name, values in weights.items()}

    def linear(self, name: str, x: Array) -> Array:
        result: Array = x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)
        return result

    def norm(self, name: str, x: Array) -> Array:
        weight = self.w.get(f"{name}.weight")
        if weight is None:
            return x
        if self.shape.rms:
            return decoder.rms_norm(x, weight, self.shape.eps)
        return layer_norm(x, weight, self.w.get(f"{name}.bias", 0.0), self.shape.eps)

    def embed(self, tokens: NDArray[np.int32]) -> Array:
        x: Array = self.w["token_embd.weight"][tokens]
        if "token_types.weight" in self.w:
            x = x + self.w["token_types.weight"][0]
        if self.shape.positions == "learned":
            x = x + self.w["position_embd.weight"][: len(tokens)]
        return self.norm("token_embd_norm", x)

    def attention(self, block: int, x: Array) -> Array:
        shape, name = self.shape, f"{self.shape.prefix}blk.{block}.attn_"
        if f"{name}qkv.weight" in self.w:
            q, k, v = np.split(self.linear(f"{name}qkv", x), 3, axis=-1)
        else:
            q, k, v = (self.linear(name + part, x) for part in "qkv")
        q = q.reshape(len(x), shape.n_head, -1)
        k, v = (part.reshape(len(x), shape.n_head_kv, -1) for part in (k, v))
        positions = np.arange(len(x))
        if shape.positions in ("halves", "pairs"):
            base = shape.window_base if shape.is_local(block) else shape.rope_base
            q, k = (decoder.rotate(part, positions, base, shape.positions == "halves") for part in (q, k))
        distance = np.abs(positions[:, None] - positions[None, :])
        seen = distance <= shape.window // 2 if shape.is_local(block) else distance >= 0
        bias: Array | float = 0.0
        if shape.positions == "alibi":
            slopes = 2.0 ** (-8 * (np.arange(shape.n_head) + 1) / shape.n_head)
            bias = -slopes[:, None, None] * distance
        if shape.positions == "buckets":
            reach = range(len(x))
            buckets = [[bucket(j - i, shape.n_buckets, shape.furthest) for j in reach] for i in reach]
            bias = np.moveaxis(self.w[f"{shape.prefix}blk.0.attn_rel_b.weight"][np.array(buckets)], -1, 0)
            q = q * np.sqrt(q.shape[-1])
        output = f"{name}output" if f"{name}output.weight" in self.w else f"{name}o"
        return self.linear(output, decoder.attention(q, k, v, seen, bias))

    def activate(self, x: Array) -> Array:
        gelu = self.shape.activation == "gelu"
        if not (gelu and self.shape.half_gelu):
            return decoder.activation(x, gelu)
        rounded = decoder.activation(x.astype(np.float16).astype(np.float64), gelu)
        return rounded.astype(np.float16).astype(np.float64)

    def feed_forward(self, block: int, x: Array) -> Array:
        name = f"{self.shape.prefix}blk.{block}.ffn_"
        up = self.linear(f"{name}up", x)
        if f"{name}gate.weight" in self.w:
            inner = self.activate(self.linear(f"{name}gate", x)) * up
        elif up.shape[-1] == 2 * self.w[f"{name}down.weight"].shape[1]:
            gate, value = np.split(up, 2, axis=-1)
            inner = self.activate(gate) * value
        else:
            inner = self.activate(up)
        return self.linear(f"{name}down", inner)

    def block(self, i: int, x: Array) -> Array:
        name = f"{self.shape.prefix}blk.{i}."
        if self.shape.post_norm:
            x = self.norm(f"{name}attn_output_norm", x + self.attention(i, x))
            return self.norm(f"{name}layer_output_norm", x + self.feed_forward(i, x))
        x = x + self.attention(i, self.norm(f"{name}attn_norm", x))
        return x + self.feed_forward(i, self.norm(f"{name}ffn_norm", x))


def forward(
    shape: Shape, weights: dict[str, NDArray[np.float32]], tokens: NDArray[np.int32]
) -> tuple[Array, Array | None]:
    """All states of one sequence.

    :returns: H_0..H_n as (n+1, tokens, width), and norm(H_n) as (tokens, width), None with post-norm.
    """
    model = _Model(shape, weights)
    states = [model.embed(tokens)]
    for i in range(shape.n_layer):
        states.append(model.block(i, states[-1]))
    if shape.post_norm:
        return np.stack(states), None
    name = "enc.output_norm" if "enc.output_norm.weight" in weights else "output_norm"
    return np.stack(states), model.norm(name, states[-1])
