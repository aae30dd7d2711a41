"""A drafter without a memory of its own, in float64: gemma4-assistant beside a Gemma target.

Its blocks attend to what the target remembers of the text: those with a sliding window to the keys and values
of the target's last but one block, the others to those of its last one. A step takes a token and a state h of
the target's width and makes

    x = W_pre [sqrt(width) e, h],    x through the blocks,    logits = E norm(x),    next h = W_post norm(x)

with e from the target's embedding and E the drafter's own. All steps of a draft are at one position, the
first after the text. Blocks are Gemma's (see :mod:`reference.decoder`), with attention scores that are not
scaled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference import file
from reference.decoder import Array, Shape, activation, attention, rms_norm, rotate


class Assistant:
    """The drafter's file.

    :param shape: the target's.
    :param weights: the target's.
    """

    def __init__(self, path: Path, shape: Shape, weights: dict[str, NDArray[np.float32]]) -> None:
        key, self.tensors = file.read(path)
        self.n_blocks = key(".nextn_predict_layers")
        self.n_head = key(".attention.head_count")
        self.local = key(".attention.sliding_window_pattern")
        self.window = key(".attention.sliding_window")
        self.bases = {True: float(key(".rope.freq_base_swa", 1e4)), False: file.rotary_base(key)}
        self.eps = key(".attention.layer_norm_rms_epsilon")
        self.shape, self.target = shape, {name: values.astype(np.float64) for name, values in weights.items()}

    def memory(self, states: Array, layer: int) -> tuple[Array, Array]:
        """Keys and values of a block of the target, (tokens, heads, width)."""
        w, shape, block = self.target, self.shape, f"blk.{layer}."
        x = rms_norm(states[layer], w[block + "attn_norm.weight"], shape.eps)
        k, v = ((x @ w[f"{block}attn_{name}.weight"].T).reshape(len(x), shape.n_head_kv, -1) for name in "kv")
        base = shape.window_base if shape.is_local(layer) else shape.rope_base
        k = rms_norm(k, w[block + "attn_k_norm.weight"], shape.eps)
        return rotate(k, np.arange(len(x)), base, shape.halves), v

    def step(self, token: int, h: Array, states: Array) -> tuple[Array, Array]:
        """Logits and next h of one step.

        :param states: H_0..H_n of the text, (n + 1, tokens, width).
        """
        w, position = self.tensors, states.shape[1]

        def norm(x: Array, name: str) -> Array:
            return rms_norm(x, w[name], self.eps)

        scaled = self.target["token_embd.weight"][token] * np.sqrt(h.shape[-1])
        x = np.concatenate([scaled, h])[None] @ w["nextn.pre_projection.weight"].T
        for i in range(self.n_blocks):
            block = f"blk.{i}."
            q = (norm(x, block + "attn_norm.weight") @ w[block + "attn_q.weight"].T).reshape(
                1, self.n_head, -1
            )
            q = norm(q, block + "attn_q_norm.weight")
            q = rotate(q, np.array([position]), self.bases[self.local[i]], True)
            n = self.shape.n_layer
            k, v = self.memory(states, n - 2 if self.local[i] else n - 1)
            distance = position - np.arange(position)
            seen = (distance < self.window) if self.local[i] else np.ones(position, bool)
            # The formula divides by sqrt(width), which these blocks do not.
            mixed = attention(q * np.sqrt(q.shape[-1]), k, v, seen[None])
            x = x + norm(mixed @ w[block + "attn_output.weight"].T, block + "post_attention_norm.weight")
            fed = norm(x, block + "ffn_norm.weight")
            gate = activation(fed @ w[block + "ffn_gate.weight"].T, True)
            fed = (gate * (fed @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
            x = (x + norm(fed, block + "post_ffw_norm.weight")) * w[block + "layer_output_scale.weight"]
        x = norm(x, "output_norm.weight")
        logits: Array = (x @ w["token_embd.weight"].T)[0]
        return logits, (x @ w["nextn.post_projection.weight"].T)[0]

    def draft(self, last: int, h: Array, states: Array, n: int) -> tuple[list[int], list[float]]:
        """The most likely n tokens after a text and its newest token, and their probabilities.

        :param last: the newest token, of which there are no states.
        :param h: norm(H_n) of the token before it.
        """
        tokens: list[int] = []
        probs: list[float] = []
        token = last
        for _ in range(n):
            logits, h = self.step(token, h, states)
            weights = np.exp(logits - logits.max())
            token = int(logits.argmax())
            tokens.append(token)
            probs.append(float(weights[token] / weights.sum()))
        return tokens, probs
