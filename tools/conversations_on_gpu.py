"""`llamatap conversations` by PyTorch on a GPU, for millions of tokens.

    python tools/conversations_on_gpu.py MODEL.gguf OUT.jsonl --tokens 11500000 --seed 2026 \
        --without bench/prompts/own.jsonl bench/prompts/hand.jsonl

gave 34,068 conversations of SmolLM2-135M, 11.6 million tokens, in 473 seconds on an H200, part of the time
beside another program. The engine's passes with sampling on the CPU give some thousands a second.

For models of the llama architecture (no biases, no scaling of the rope). Weights are those of the GGUF file,
in float16; all sequences advance by one token a step, in a CUDA graph, without a prefill. Sampled tokens are
argmax(logits / temperature + Gumbel noise).
tests/python/train/drafters/test_conversations_on_gpu.py compares the logits with the engine's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

import llamatap as lt
from llamatap.convert.gguf_files import GgufSource
from llamatap.storage.atomic_writes import atomic_path
from llamatap.train.conversations import TurnFrame, turn_frame, without_loop

MAX_QUESTION, MAX_ANSWER = 192, 512
# Steps between looks at which conversations have ended.
LOOK = 16
# No question has ended yet.
OPEN = 1 << 20


class LlamaOnGpu:
    """Decoding of many sequences at once, one token each.

    :param n_seq: number of sequences.
    :param n_ctx: positions of each.
    """

    def __init__(self, path: Path, n_seq: int, n_ctx: int, device: torch.device, dtype: torch.dtype) -> None:
        source = GgufSource(path)
        if (
            source.arch != "llama"
            or any(name.endswith("bias") or "rope" in name for name in source.names)
            or (source.key(".rope.scaling.type", "none") != "none")
        ):
            raise SystemExit(f"{path} is of architecture {source.arch}, or has biases or a scaled rope")

        def matrix(name: str) -> Tensor:
            return torch.tensor(source.values(f"{name}.weight")).to(device, dtype)

        def gain(name: str) -> Tensor:
            return torch.tensor(source.values(f"{name}.weight")).to(device)

        self.embedding = matrix("token_embd")
        self.head = matrix("output") if "output.weight" in source.names else self.embedding
        self.norm = gain("output_norm")
        self.n_head, self.n_head_kv = (
            source.key(".attention.head_count"),
            source.key(".attention.head_count_kv"),
        )
        self.head_size = source.key(".rope.dimension_count")
        self.eps = source.key(".attention.layer_norm_rms_epsilon")
        half = torch.arange(self.head_size // 2, device=device).float()
        self.rates = source.key(".rope.freq_base", 10000.0) ** (-2 * half / self.head_size)
        self.blocks = [
            (
                gain(f"blk.{i}.attn_norm"),
                torch.cat([matrix(f"blk.{i}.attn_{one}") for one in "qkv"]),
                matrix(f"blk.{i}.attn_output"),
                gain(f"blk.{i}.ffn_norm"),
                torch.cat([matrix(f"blk.{i}.ffn_{one}") for one in ("gate", "up")]),
                matrix(f"blk.{i}.ffn_down"),
            )
            for i in range(source.key(".block_count"))
        ]
        shape = (len(self.blocks), n_seq, self.n_head_kv, n_ctx, self.head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.seqs, self.cells = torch.arange(n_seq, device=device), torch.arange(n_ctx, device=device)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after one token of each sequence, float32 ``(n_seq, n_vocab)``."""
        x = self.embedding[tokens].float()
        angles = positions.float()[:, None, None] * self.rates
        turn = angles.cos(), angles.sin()
        hidden = (self.cells > positions[:, None])[:, None, None]
        for i, (attn_norm, qkv, output, ffn_norm, gate_up, down) in enumerate(self.blocks):
            found = (self._normed(x, attn_norm) @ qkv.T).view(len(x), -1, self.head_size)
            q, k, v = found.split([self.n_head, self.n_head_kv, self.n_head_kv], 1)
            self.keys[i, self.seqs, :, positions] = self._turned(k, *turn)
            self.values[i, self.seqs, :, positions] = v
            q = self._turned(q, *turn).unflatten(1, (self.n_head_kv, -1)) * self.head_size**-0.5
            scores = (q @ self.keys[i].transpose(-1, -2)).masked_fill(hidden, -torch.inf)
            heads = scores.float().softmax(-1).to(q.dtype) @ self.values[i]
            x = x + (heads.reshape(len(x), -1) @ output.T).float()
            gate, up = (self._normed(x, ffn_norm) @ gate_up.T).chunk(2, -1)
            x = x + ((functional.silu(gate) * up) @ down.T).float()
        return (self._normed(x, self.norm) @ self.head.T).float()

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], gain, self.eps).to(self.embedding.dtype)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of neighbours, as GGUF files of this architecture have them."""
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class Conversations:
    """Conversations side by side, each a question and an answer; all that decides about them is on the GPU.

    :param ends: bool ``(n_vocab,)``: the tokens that end a text.
    """

    def __init__(
        self, model: LlamaOnGpu, frame: TurnFrame, temperatures: list[float], ends: NDArray[np.bool_]
    ) -> None:
        device, n_seq = model.seqs.device, len(model.seqs)
        self.model = model
        self.ends_text = torch.tensor(ends, device=device)
        self.before = torch.tensor(frame.before, device=device).long()
        self.after = torch.tensor(frame.after, device=device).long()
        self.temperature = torch.tensor(
            [temperatures[i % len(temperatures)] for i in range(n_seq)], device=device
        )
        self.texts = torch.zeros(n_seq, len(model.cells), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(n_seq, dtype=torch.int64, device=device)
        self.positions, self.ends = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)
        self.done = torch.zeros(n_seq, dtype=torch.bool, device=device)
        self.in_flight = n_seq
        self.begin(model.seqs)

    def begin(self, seqs: Tensor) -> None:
        """Begin new conversations."""
        self.tokens[seqs] = self.before[0]
        self.texts[seqs, 0] = self.before[0].int()
        self.positions[seqs], self.ends[seqs], self.done[seqs] = 0, OPEN, False

    def step(self) -> None:
        """Add a token to each conversation that has not ended."""
        before, after, upcoming = self.before, self.after, self.positions + 1
        logits = self.model(self.tokens, self.positions)
        asking = (upcoming >= len(before)) & (self.ends >= OPEN)
        temperature = torch.where(asking, 1.0, self.temperature)[:, None]
        noise = -torch.empty_like(logits).exponential_().log_()
        drawn = torch.where(temperature > 0, logits / temperature.clamp(min=1e-4) + noise, logits).argmax(-1)
        ended = asking & (drawn == after[0])
        self.ends.copy_(torch.where(ended & ~self.done, upcoming, self.ends))
        into = upcoming - self.ends
        new = torch.where(upcoming < len(before), before[upcoming.clamp(max=len(before) - 1)], drawn)
        new = torch.where((into >= 0) & (into < len(after)), after[into.clamp(0, len(after) - 1)], new)
        stop = (into >= len(after)) & (self.ends_text[drawn] | (into >= len(after) + MAX_ANSWER - 1))
        stop |= asking & ~ended & (upcoming - len(before) >= MAX_QUESTION)
        kept = self.texts[self.model.seqs, upcoming].long()
        self.texts[self.model.seqs, upcoming] = torch.where(self.done, kept, new).int()
        self.tokens.copy_(torch.where(self.done, self.tokens, new))
        self.positions.copy_(torch.where(self.done | stop, self.positions, upcoming))
        self.done |= stop

    def finished(self, refill: bool) -> Iterator[tuple[NDArray[np.int32], int, int]]:
        """Tokens, the end of the question and the beginning of the answer of those that ended.

        :param refill: let others begin in their places.
        """
        seqs = (self.done & (self.positions > 0)).nonzero().flatten()
        if len(seqs):
            parts = [one[seqs].cpu().numpy() for one in (self.texts, self.positions, self.ends)]
            # Handed out; idle without a new one.
            self.positions[seqs] = 0
            if refill:
                self.begin(seqs)
            else:
                self.in_flight -= len(seqs)
            for text, position, end in zip(*parts, strict=True):
                if len(self.before) < end < OPEN:
                    yield text[: position + 2], int(end), int(end) + len(self.after)


def repeated(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """A step that can be called again and again: a CUDA graph on a GPU."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


def sample(
    path: Path,
    n_tokens: int,
    n_seq: int,
    seed: int,
    temperatures: list[float],
    without: Iterable[str] = (),
) -> Iterator[dict[str, Any]]:
    """Rows of conversations, as `llamatap train` reads them, until they hold enough tokens.

    Those in flight then are finished, or short ones would be more frequent than they are.

    :param without: questions that are left out, to measure on.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    vocabulary = lt.Model(path, vocab_only=True)
    frame = turn_frame(vocabulary)
    ends = np.array([vocabulary.is_end_of_generation(i) for i in range(vocabulary.n_vocab)])
    if not ends[frame.after[0]]:
        raise SystemExit(
            "the chat template ends questions with a token that ends no text; questions cannot be sampled"
        )
    controls = {i for i in range(vocabulary.n_vocab) if not vocabulary.token_bytes(i, special=False)}
    n_ctx = len(frame.before) + MAX_QUESTION + len(frame.after) + MAX_ANSWER + 1
    work = Conversations(LlamaOnGpu(path, n_seq, n_ctx, device, dtype), frame, temperatures, ends)
    step = repeated(work.step, device)
    torch.manual_seed(seed)
    work.begin(work.model.seqs)
    left_out = {text.strip() for text in without}
    seen: set[bytes] = set()
    done = ended = 0
    while work.in_flight:
        for _ in range(LOOK):
            step()
        # Those in flight will hold as many tokens as others did.
        enough = done + work.in_flight * done / max(ended, 1) >= n_tokens
        for text, end, answer in work.finished(refill=not enough):
            ended += 1
            question = text[len(frame.before) : end]
            key = question.tobytes()
            if key in seen or not controls.isdisjoint(question.tolist()):
                continue
            seen.add(key)
            if vocabulary.detokenize(question).strip() in left_out:
                continue
            tokens = [*text[:answer].tolist(), *without_loop(text[answer:]).tolist()]
            done += len(tokens)
            yield {"input_ids": tokens, "loss_mask": [0] * answer + [1] * (len(tokens) - answer)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--parallel", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument(
        "--without",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help='leave out the "text" of its rows',
    )
    arguments = parser.parse_args()
    left_out = [json.loads(line)["text"] for file in arguments.without for line in file.open()]
    temperatures = [float(one) for one in arguments.temperatures.split(",")]
    started, n, n_tokens = time.monotonic(), 0, 0
    with torch.no_grad(), atomic_path(arguments.output) as scratch, scratch.open("w") as file:
        for row in sample(
            arguments.model, arguments.tokens, arguments.parallel, arguments.seed, temperatures, left_out
        ):
            file.write(json.dumps(row) + "\n")
            n, n_tokens = n + 1, n_tokens + len(row["input_ids"])
    seconds = time.monotonic() - started
    print(f"{n:,} conversations, {n_tokens:,} tokens, {n_tokens / seconds:,.0f} a second")


if __name__ == "__main__":
    main()
