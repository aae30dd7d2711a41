"""EAGLE-3 in float64 from the checkpoint of a trainer: transformers' names, order of rows, and ids.

The formulas are those of :mod:`reference.eagle3`, on other weights: q and k rotate the pairs
(j, j + width/2), d2t holds offsets, and llama3 scaling (https://arxiv.org/abs/2407.21783) changes the
frequencies f: with wavelengths 2 pi / f, those longer than original / low are divided by the factor, those
shorter than original / high stay, and between them a share (original / wavelength - low) / (high - low)
stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.decoder import Array, activation, attention, rms_norm
from reference.eagle3 import softmax


@dataclass(frozen=True)
class Block:
    """A checkpoint: tensors by name (the block's begin with prefix), and what its config says."""

    tensors: Mapping[str, NDArray[Any]]
    prefix: str
    n_head: int
    n_head_kv: int
    rope_base: float
    eps: float
    n_vocab: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    scaling: Mapping[str, Any] | None = None

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float64)

    def inner(self, name: str) -> Array:
        return self.weight(self.prefix + name)

    def norm(self, x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, self.eps)

    def frequencies(self, width: int) -> Array:
        found = np.array([self.rope_base ** (-2 * j / width) for j in range(width // 2)])
        scaling = self.scaling
        if scaling is None:
            return found
        factor = scaling["factor"]
        if scaling["rope_type"] == "linear":
            linear: Array = found / factor
            return linear
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        for j, frequency in enumerate(found):
            wavelength = 2 * np.pi / frequency
            if wavelength > original / low:
                found[j] = frequency / factor
            elif wavelength > original / high:
                share = (original / wavelength - low) / (high - low)
                found[j] = (1 - share) * frequency / factor + share * frequency
        return found

    def rotated(self, x: Array, positions: NDArray[np.integer]) -> Array:
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * self.frequencies(x.shape[-1])
        first, second = x[..., :half], x[..., half:]
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            axis=-1,
        )


def encode(features: NDArray[np.generic], block: Block) -> Array:
    """The rows g of features."""
    x = features.astype(np.float64)
    if block.norm_before_fc:
        x = block.norm(x, block.weight("input_norm"))
    fused: Array = x @ block.weight("fc").T
    return fused


def decode(tokens: Sequence[int], states: Array, block: Block) -> tuple[Array, Array]:
    """The block on all pairs at positions 0, 1, ...

    :returns: logits (n, tokens of the target), -inf where the head has no row, and the next states.
    """
    at = np.arange(len(tokens))
    normed = block.norm(states, block.inner("hidden_norm"))
    embedded = block.norm(block.weight("embed_tokens")[list(tokens)], block.inner("input_layernorm"))
    x = np.concatenate([embedded, normed], axis=1)
    q, k, v = (
        (x @ block.inner(f"self_attn.{name}_proj").T).reshape(len(x), count, -1)
        for name, count in (("q", block.n_head), ("k", block.n_head_kv), ("v", block.n_head_kv))
    )
    mixed = attention(block.rotated(q, at), block.rotated(k, at), v, at[:, None] >= at[None, :])
    stream = (normed if block.norm_before_residual else states) + mixed @ block.inner("self_attn.o_proj").T
    x = block.norm(stream, block.inner("post_attention_layernorm"))
    gate = activation(x @ block.inner("mlp.gate_proj").T, gelu=False)
    stream = stream + (gate * (x @ block.inner("mlp.up_proj").T)) @ block.inner("mlp.down_proj").T
    own = block.norm(stream, block.weight("norm")) @ block.weight("lm_head").T
    logits = np.full((len(x), block.n_vocab), -np.inf)
    offsets = block.tensors.get("d2t", np.zeros(own.shape[1], np.int64))
    for row, offset in enumerate(offsets):
        logits[:, row + int(offset)] = own[:, row]
    return logits, stream


def draft(
    tokens: Sequence[int], features: NDArray[np.generic], block: Block, n: int
) -> tuple[list[int], Array]:
    """Draft greedily after a text; arguments and result as :func:`reference.eagle3.draft`."""
    states = encode(features, block)
    seen = [int(token) for token in tokens[1:]]
    probabilities = []
    for _ in range(n):
        logits, after = decode(seen, states, block)
        token = int(logits[-1].argmax())
        probabilities.append(softmax(logits)[-1, token])
        seen.append(token)
        states = np.concatenate([states, after[-1:]])
    return seen[len(tokens) - 1 :], np.array(probabilities)
