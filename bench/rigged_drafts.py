"""Random models and drafters for benchmarks, and a drafter that is right as often as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

import llamatap as lt

__all__ = ["SHAPES", "RiggedDrafter", "Shape", "random_eagle3", "random_target"]

#: The next token is the newest one plus this: the output head is the token embedding, shifted.
STEP = 7


@dataclass(frozen=True)
class Shape:
    """The shape of a qwen3 model."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_width: int
    n_ff: int
    n_vocab: int


SHAPES = {
    "tiny": Shape(4, 64, 4, 2, 16, 96, 512),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9728, 151_936),
}


def random_target(path: Path, shape: Shape) -> Path:
    """Write a qwen3 model with random float16 weights.

    Its blocks change the residual stream little, and its head expects the token that stands STEP further in
    the vocabulary. So its greedy text is far from any tie, and the same however many tokens a pass has.
    """
    rng = np.random.default_rng(0)
    # One block of numbers, repeated: drawing billions takes minutes.
    drawn = rng.standard_normal(1 << 22, np.float32)
    n, q, kv = shape.n_embd, shape.n_head * shape.head_width, shape.n_head_kv * shape.head_width
    writer = gguf.GGUFWriter(path, "qwen3")
    keys = {
        "context_length": 40_960,
        "embedding_length": n,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_width,
        "attention.value_length": shape.head_width,
        "vocab_size": shape.n_vocab,
    }
    for key, value in keys.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_string("tokenizer.ggml.model", "none")

    def draw(rows: int, columns: int, scale: float) -> NDArray[np.float16]:
        start = int(rng.integers(1 << 20))
        values = (
            np.resize(drawn[start : start + (1 << 21) - 1], min(rows * columns, 1 << 21)) * scale
        ).astype(np.float16)
        return np.resize(values, (rows, columns))

    embedding = rng.standard_normal((shape.n_vocab, n), np.float32).astype(np.float16)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", np.roll(embedding, STEP, axis=0))
    writer.add_tensor("output_norm.weight", np.ones(n, np.float32))
    for i in range(shape.n_layer):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(n, np.float32))
        for name in ("attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(shape.head_width, np.float32))
        for name, rows, columns, gain in (
            ("attn_q", q, n, 1.0),
            ("attn_k", kv, n, 1.0),
            ("attn_v", kv, n, 1.0),
            ("attn_output", n, q, 0.02),
            ("ffn_gate", shape.n_ff, n, 1.0),
            ("ffn_up", shape.n_ff, n, 1.0),
            ("ffn_down", n, shape.n_ff, 0.02),
        ):
            writer.add_tensor(f"blk.{i}.{name}.weight", draw(rows, columns, gain / columns**0.5))
    return _written(writer, path)


def random_eagle3(
    path: Path, target: lt.Model, *, heads: int, heads_kv: int, n_ff: int, n_draft_vocab: int | None = None
) -> Path:
    """Write a drafter of the usual size for such a model, with random weights. It inherits the embedding.

    :param n_draft_vocab: size of its own head's vocabulary; None inherits the head.
    """
    rng = np.random.default_rng(0)
    n = target.n_embd
    kv = n // heads * heads_kv
    writer = gguf.GGUFWriter(path, "eagle3")
    keys: dict[str, Any] = {
        "context_length": 2048,
        "embedding_length": n,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "vocab_size": target.n_vocab,
        "target_hidden_size": n,
    }
    for key, value in keys.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("eagle3.rope.freq_base", 1e5)
    middle = target.n_layer // 2
    writer.add_array(
        "eagle3.target_layers", [min(2, middle - 1), middle, max(target.n_layer - 3, middle + 1)]
    )
    source = gguf.GGUFReader(target.path)
    for key, field in source.fields.items():
        if key.startswith("tokenizer.") and "chat" not in key:
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)

    def draw(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))
        writer.add_tensor(name, values.astype(np.float16))

    draw("fc.weight", n, 3 * n)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))
    draw("blk.0.attn_q.weight", n, 2 * n)
    draw("blk.0.attn_k.weight", kv, 2 * n)
    draw("blk.0.attn_v.weight", kv, 2 * n)
    draw("blk.0.attn_output.weight", n, n)
    draw("blk.0.ffn_gate.weight", n_ff, n)
    draw("blk.0.ffn_up.weight", n_ff, n)
    draw("blk.0.ffn_down.weight", n, n_ff)
    if n_draft_vocab is not None:
        draw("output.weight", n_draft_vocab, n)
        writer.add_tensor("d2t", np.arange(n_draft_vocab, dtype=np.int64))
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class RiggedDrafter(lt.Drafter):
    """Drafts known texts, each token right with a given probability, in the time of another drafter.

    :param inner: the drafter whose passes are run; its tokens are replaced.
    :param texts: the texts that will be generated, by the first token of their prompts.
    :param rate: probability that a token is right.
    """

    draws = False

    def __init__(
        self, inner: lt.Drafter, texts: Mapping[int, Sequence[int]], rate: float, n_vocab: int
    ) -> None:
        self.target_layers = inner.target_layers
        self.n_max = inner.n_max
        self._inner = inner
        self._texts = texts
        self._rate = rate
        self._n_vocab = n_vocab
        self._rng = np.random.default_rng(0)
        # By sequence: the first token of the prompt, and the prompt's length.
        self._prompts: dict[int, list[int]] = {}

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        for position, token, seqs in zip(batch.positions, batch.tokens, batch.sequences, strict=True):
            for seq in seqs:
                if position == 0:
                    self._prompts[seq] = [int(token), 1]
        self._inner.process(batch, states)

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
        return {
            seq: lt.Draft(self._tokens(seq, requests[seq], len(draft.tokens)))
            for seq, draft in self._inner.draft(requests).items()
        }

    def _tokens(self, seq: int, request: lt.DraftRequest, count: int) -> NDArray[np.int32]:
        first, n_prompt = self._prompts[seq]
        if n_prompt == 1:
            # Before the first draft the sequence has its prompt, and one token more is known.
            n_prompt = self._prompts[seq][1] = request.position
        text = self._texts[first]
        begin = request.position - n_prompt + 1
        right = np.array([*text[begin : begin + count], *[0] * count][:count], np.int32)
        wrong = self._rng.random(count) >= self._rate
        return np.where(wrong, (right + 1) % self._n_vocab, right).astype(np.int32)

    def accept(self, seq: int, n: int) -> None:
        self._inner.accept(seq, n)

    def reset(self, seq: int) -> None:
        self._prompts.pop(seq, None)
        self._inner.reset(seq)
