"""Shape of a drafter's blocks, and the keys of GGUF files that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamatap.convert.rope import Rope
from llamatap.errors import InvalidInputError

__all__ = ["BlockShape", "check_heads"]


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Shape of blocks that have Llama's or Qwen3's attention and feed-forward network.

    :ivar n_embd: width of the draft's stream.
    :ivar n_vocab: tokens of the target; the draft's head has ``n_draft_vocab`` rows.
    :ivar target_layers: the i of the H_i, in the order of fc's columns.
    """

    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_width: int
    n_vocab: int
    n_draft_vocab: int
    n_ctx: int
    eps: float
    rope: Rope
    target_layers: tuple[int, ...]

    def block_shapes(self, n_input: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's tensors, by their names in GGUF without ".weight".

        :param n_input: features that q, k and v are made of.
        """
        q, kv = self.n_head * self.head_width, self.n_head_kv * self.head_width
        return {
            "attn_norm": (self.n_embd,),
            "attn_q": (q, n_input),
            "attn_k": (kv, n_input),
            "attn_v": (kv, n_input),
            "attn_output": (self.n_embd, q),
            "ffn_norm": (self.n_embd,),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }

    def gguf_keys(self, n_layer: int) -> dict[str, Any]:
        """The keys of the architecture in a GGUF file, without its name in front."""
        keys: dict[str, Any] = {
            "vocab_size": self.n_vocab,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "block_count": n_layer,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_width,
            "attention.value_length": self.head_width,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.dimension_count": self.head_width,
            "rope.freq_base": self.rope.base,
            "target_layers": list(self.target_layers),
        }
        if self.rope.kind == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rope.factor}
        return keys


def check_heads(n_head: int, n_head_kv: int, head_width: int) -> None:
    """Check that heads of keys and values can be shared, and rotated.

    :raises InvalidInputError: they cannot.
    """
    if n_head % n_head_kv or head_width % 2:
        raise InvalidInputError(
            f"{n_head} heads of width {head_width} cannot share {n_head_kv} of keys and values"
        )
