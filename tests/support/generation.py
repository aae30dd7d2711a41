"""Helpers of the generation tests: hand-written decoding, user-defined drafters, scripted models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE
from support.tiny import TinyLlama

import llamatap as lt
from llamatap._engine_context import engine_of

#: These models are too small for threads.
EXACT: dict[str, Any] = {**EXACT_ANYWHERE, "n_threads": 1}

#: Ways to choose tokens, as arguments of generate and of Sampler alike.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "repeat_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.4,
        "penalty_last_n": 20,
    },
}


def seed_of(seed: int, index: int) -> int:
    """The seed of a prompt's own random numbers."""
    return (seed + index * 0x9E3779B1) % (2**32 - 1)


def by_hand(
    model: lt.Model,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    ends: Iterable[int] = (),
    options: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> list[int]:
    """Generate one token a decode, with a sampler that has seen the prompt, up to one of ``ends``."""
    sampler = lt.Sampler(model, **{"seed": 0, **sampling})
    for token in prompt:
        sampler.accept(int(token))
    found: list[int] = []
    with model.context(**{"n_ctx": 1024, **EXACT, **(options or {})}) as context:
        context.decode(lt.Batch.of(list(prompt)))
        while True:
            found.append(sampler.sample(context))
            if found[-1] in ends or len(found) == max_tokens:
                return found
            context.decode(lt.Batch.of([found[-1]], pos0=len(prompt) + len(found) - 1))


def ragged(rng: np.random.Generator, n_vocab: int, lengths: Iterable[int]) -> list[list[int]]:
    return [rng.integers(3, n_vocab, length).tolist() for length in lengths]


def is_empty(context: lt.Context) -> bool:
    return all(context.memory.last(seq) == -1 for seq in range(context.n_seq_max))


class Noting(lt.Drafter):
    """A drafter that records the text of each sequence and checks that it is told of every token."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}
        #: For each batch, the number of entries of each sequence.
        self.batches: list[dict[int, int]] = []

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        counts: dict[int, int] = {}
        for token, position, (seq,) in zip(
            batch.tokens.tolist(), batch.positions.tolist(), batch.sequences, strict=True
        ):
            text = self.texts.setdefault(seq, [])
            assert position == len(text)
            if seq not in counts:
                self.starts[seq] = position
            counts[seq] = counts.get(seq, 0) + 1
            text.append(token)
        self.batches.append(counts)

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
        found = {}
        for seq, request in requests.items():
            assert request.position == len(self.texts[seq])
            assert request.n_max >= 1
            guess = self.guess([*self.texts[seq], request.last_token], request.n_max)
            found[seq] = lt.Draft(np.array(guess, np.int32))
        return found

    def guess(self, text: list[int], n_max: int) -> list[int]:
        return []

    def accept(self, seq: int, n: int) -> None:
        del self.texts[seq][self.starts[seq] + n + 1 :]

    def reset(self, seq: int) -> None:
        self.texts.pop(seq, None)


class Guessing(Noting):
    """A drafter of random lengths that knows the texts and gets some tokens wrong."""

    def __init__(
        self,
        n_vocab: int,
        texts: Sequence[Sequence[int]] = (),
        *,
        wrong: float = 0.3,
        longest: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.n_vocab = n_vocab
        self.known = [list(text) for text in texts]
        self.wrong = wrong
        self.longest = longest
        self.rng = np.random.default_rng(seed)

    def guess(self, text: list[int], n_max: int) -> list[int]:
        count = int(self.rng.integers(0, min(self.longest, n_max) + 1))
        tokens: list[int] = self.rng.integers(3, self.n_vocab, count).tolist()
        for known in self.known:
            if known[: len(text)] == text:
                after = known[len(text) : len(text) + count]
                for i, token in enumerate(after):
                    if self.rng.random() >= self.wrong:
                        tokens[i] = token
        return tokens


#: The prompt of every `CheckedContext`.
PROMPT = [5, 6, 7, 8, 9]


@dataclass
class CheckedContext:
    """A context in which something goes wrong, and the tokens that follow `PROMPT` when nothing does."""

    model: lt.Model
    context: lt.Context
    expected: list[int]

    def check(self) -> None:
        """Check that nothing is left in it, and that it still generates the same, with drafts and states."""
        assert is_empty(self.context)
        assert engine_of(self.context).capture is None
        drafter = Guessing(self.model.n_vocab, [[*PROMPT, *self.expected]])
        found = list(
            lt.generate(self.context, [PROMPT] * 3, drafter, max_tokens=12, ignore_eos=True, states="last")
        )
        assert [one.tokens.tolist() for one in found] == [self.expected] * 3
        assert is_empty(self.context)


@contextmanager
def checked_context(path: Path) -> Iterator[CheckedContext]:
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        yield CheckedContext(model, context, by_hand(model, PROMPT, 12))


def scripted(tokens: Sequence[int]) -> TinyLlama:
    """A model that goes on after each of these tokens, all different, with the next one; the last repeats.

    Blocks add nothing, tokens of the script have unit vectors, and row t of the head is that of what comes
    before t. The logit of the next token is 8, all others are 0.
    """
    assert len(set(tokens)) == len(tokens) <= 64
    model = TinyLlama()
    weights = model.weights
    for name, values in weights.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight", "token_embd.weight", "output.weight")):
            values[:] = 0
        elif name.endswith("norm.weight"):
            values[:] = 1
    for i, token in enumerate(tokens):
        weights["token_embd.weight"][token, i] = 8
        weights["output.weight"][tokens[min(i + 1, len(tokens) - 1)], i] = 1
    return model


def nearly(tiny: TinyLlama, path: Path, noise: float = 0.15, seed: int = 9) -> Path:
    """Write the model with noise on its weights, so that it predicts some tokens rightly."""
    rng = np.random.default_rng(seed)
    other = replace(tiny, weights={})
    for name, values in tiny.weights.items():
        drawn = rng.standard_normal(values.shape, np.float32)
        other.weights[name] = (values + np.float32(noise * values.std()) * drawn).astype(np.float32)
    return other.write(path)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    values = values - values.max()
    result: NDArray[np.float64] = values - np.log(np.exp(values).sum())
    return result
