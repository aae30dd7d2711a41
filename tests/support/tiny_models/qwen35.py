"""Seeded random files of the architecture qwen35 with its block of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from support.tiny import TinyQwen35, Weights, _gain, _matrix
from support.tiny_models.drafters import HEAD_GAIN


@dataclass
class Qwen35WithMtp(TinyQwen35):
    """One more block, which attends: its number is one at which the trunk would have a delta net.

    All else being equal, what an option leaves out changes no other weight.

    :ivar own_norm: the block has a norm of its own before the head, instead of the trunk's.
    :ivar own_head: the block has a head of its own, instead of the trunk's.
    :ivar own_embedding: the block has a token embedding of its own.
    :ivar trunk: False leaves the trunk's blocks out: a file for another target.
    """

    own_norm: bool = True
    own_head: bool = False
    own_embedding: bool = False
    trunk: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng([self.seed, 1])
        n = self.n_embd
        block: Weights = {
            "attn_norm.weight": _gain(rng, n),
            **self._attention(rng),
            "post_attention_norm.weight": _gain(rng, n),
            **self.feed_forward(rng),
            "nextn.eh_proj.weight": _matrix(rng, n, 2 * n),
            "nextn.enorm.weight": _gain(rng, n),
            "nextn.hnorm.weight": _gain(rng, n),
            "nextn.shared_head_norm.weight": _gain(rng, n),
            "nextn.shared_head_head.weight": _matrix(rng, self.n_vocab, n) * HEAD_GAIN,
            "nextn.embed_tokens.weight": _matrix(rng, self.n_vocab, n) * 8,
        }
        kept = {
            "nextn.shared_head_norm.weight": self.own_norm,
            "nextn.shared_head_head.weight": self.own_head,
            "nextn.embed_tokens.weight": self.own_embedding,
        }
        for name, values in block.items():
            if kept.get(name, True):
                self.weights[f"blk.{self.n_layer}.{name}"] = values
        if not self.trunk:
            trunk = tuple(f"blk.{i}." for i in range(self.n_layer))
            for name in [name for name in self.weights if name.startswith(trunk)]:
                del self.weights[name]

    @property
    def n_blocks(self) -> int:
        return self.n_layer + 1

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        super().add_keys(writer)
        writer.add_nextn_predict_layers(1)
