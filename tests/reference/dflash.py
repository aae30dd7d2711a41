"""Block drafters in float64: DFlash (arXiv:2602.06036), and DSpark, which adds a head from token to token.

What the draft remembers of the text are features of the target, one row a position, fused and normed:

    g = norm(W_fc f),    k = rotate(norm(W_k g)),    v = W_v g       (of each block)

A block of tokens, the last known one and masks, goes through the blocks of a dense decoder whose attention
sees all of that memory and all of the block, later places included. Place i > 0 gives the i-th token.

DSpark adds to the logits of place i a term of the token before it, W_2 w_1[token], and takes the most likely
one for the next place; its places are shifted by one, place 0 giving the first token, unless the file says
that its anchor is a bonus. It also says how likely each token is to stand:
sigmoid(w_conf [norm(x_i), w_1[token before]] + b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reference import file
from reference.decoder import Array, activation, attention, rms_norm, rotate


@dataclass(frozen=True)
class Weights:
    """A file of architecture dflash; embedding and head may be the target's."""

    tensors: dict[str, Array]
    n_layer: int
    n_head: int
    n_head_kv: int
    rope_base: float
    eps: float
    mask: int
    causal: bool
    first_slot: int

    @classmethod
    def read(cls, path: Path, target: Path | None = None) -> Weights:
        key, tensors = file.read(path)
        if target is not None:
            of_target = file.read(target)[1]
            for name in ("token_embd.weight", "output.weight"):
                tensors.setdefault(name, of_target.get(name, of_target["token_embd.weight"]))
        anchored = "markov_w1.weight" in tensors and key(".sample_from_anchor", True)
        return cls(
            tensors,
            key(".block_count"),
            key(".attention.head_count"),
            key(".attention.head_count_kv", key(".attention.head_count")),
            file.rotary_base(key),
            key(".attention.layer_norm_rms_epsilon"),
            key("tokenizer.ggml.mask_token_id"),
            key(".attention.causal", False),
            0 if anchored else 1,
        )


def block_logits(
    tokens: Sequence[int], features: Array, weights: Weights
) -> tuple[Array, Array, Array | None]:
    """
    :param tokens: of the block, the last known token and masks; at positions len(features) and on.
    :param features: (n, layers * width): of the text before it.
    :returns: logits of each place (places, v), -inf for tokens that d2t lacks; the most likely token of each
        place; and of DSpark, how likely each is to stand (places,).
    """
    w = weights.tensors
    n, m = len(features), len(tokens)
    before, inside = np.arange(n), np.arange(n, n + m)

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], weights.eps)

    def heads(x: Array, name: str, count: int) -> Array:
        return (x @ w[name].T).reshape(len(x), count, len(w[name]) // count)

    fused = norm(features.astype(np.float64) @ w["fc.weight"].T, "enc.output_norm.weight")
    stream = w["token_embd.weight"][list(tokens)]
    seen = np.ones((m, n + m), bool)
    if weights.causal:
        seen[:, n:] = np.tril(np.ones((m, m), bool))
    for i in range(weights.n_layer):
        block = f"blk.{i}."
        x = norm(stream, block + "attn_norm.weight")
        q = norm(heads(x, block + "attn_q.weight", weights.n_head), block + "attn_q_norm.weight")
        keys, values = [], []
        for source, positions in ((fused, before), (x, inside)):
            k = norm(heads(source, block + "attn_k.weight", weights.n_head_kv), block + "attn_k_norm.weight")
            keys.append(rotate(k, positions, weights.rope_base, True))
            values.append(heads(source, block + "attn_v.weight", weights.n_head_kv))
        mixed = attention(
            rotate(q, inside, weights.rope_base, True), np.concatenate(keys), np.concatenate(values), seen
        )
        stream = stream + mixed @ w[block + "attn_output.weight"].T
        x = norm(stream, block + "ffn_norm.weight")
        gate = activation(x @ w[block + "ffn_gate.weight"].T, False)
        stream = stream + (gate * (x @ w[block + "ffn_up.weight"].T)) @ w[block + "ffn_down.weight"].T
    normed = norm(stream, "output_norm.weight")
    own = normed @ w["output.weight"].T
    n_vocab = len(w["token_embd.weight"])
    ids = w.get("d2t", np.arange(n_vocab)).astype(int)
    logits = np.full((m, n_vocab), -np.inf)
    logits[:, ids] = own
    if "markov_w1.weight" not in w:
        return logits, logits.argmax(axis=1), None
    sure = np.zeros(m)
    previous = tokens[0]
    for i in range(weights.first_slot, m):
        memory = w["markov_w1.weight"][previous]
        logits[i, ids] += w["markov_w2.weight"] @ memory
        if "conf_proj.weight" in w:
            bias = float(w["conf_proj.bias"][0]) if "conf_proj.bias" in w else 0.0
            value = float(w["conf_proj.weight"].ravel() @ np.concatenate([normed[i], memory])) + bias
            sure[i] = 1 / (1 + np.exp(-value))
        previous = int(logits[i].argmax())
    return logits, logits.argmax(axis=1), sure if "conf_proj.weight" in w else None


def draft(tokens: Sequence[int], features: Array, weights: Weights, n: int) -> tuple[list[int], list[float]]:
    """The most likely n tokens after a text, and their probabilities.

    :param tokens: the text [T]; its last token is new.
    :param features: (T - 1, layers * width): of the others.
    """
    block = [tokens[-1], *[weights.mask] * (n + weights.first_slot - 1)]
    logits, best, _ = block_logits(block, features, weights)
    rows = logits[weights.first_slot :][:n]
    probs = np.exp(rows - rows.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    chosen = best[weights.first_slot :][:n]
    return chosen.tolist(), probs[np.arange(n), chosen].tolist()
