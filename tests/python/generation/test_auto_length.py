"""n_max="auto": the tokens stay the same, and drafts are made where they pay, by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, SAMPLING, Noting, by_hand, is_empty, nearly, ragged, seed_of
from support.tiny import TinyLlama, TinyQwen35
from support.tiny_models import drafters, rigged
from support.tiny_models.rigged import by_token, cycle, wrong_at

import llamatap as lt
from llamatap.drafting.draft_length import AUTO_LONGEST
from llamatap.generation import time_accounting

F = cycle()
WRONG = wrong_at(F, range(64))


@dataclass
class Clock:
    now: float = 0.0


@dataclass
class Costly(Noting):
    """A drafter that follows a table, with a fixed time for each pass and more for each drafted token."""

    clock: Clock
    follow: rigged.Draft
    per_pass: float = 1.0
    per_token: float = 0.2
    n_max: Any = "auto"
    drafted: list[int] = field(default_factory=list)  # by round

    def __post_init__(self) -> None:
        super().__init__()

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        super().process(batch, states)
        self.clock.now += self.per_pass + 0.02 * len(batch)
        self.drafted.append(len(batch) - len(self.batches[-1]))

    def guess(self, text: list[int], n_max: int) -> list[int]:
        tokens = self.follow(text, n_max)
        self.clock.now += self.per_token * len(tokens)
        return tokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the scheduler reads in place of the time."""
    found = Clock()
    monkeypatch.setattr(time_accounting, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def late(
    clock: Clock, rigged_model: lt.Model, follow: rigged.Draft, n_prompts: int = 1, per_token: float = 0.2
) -> list[int]:
    """The number of tokens drafted in each later round of a long text, after checking the text itself."""
    drafter = Costly(clock, follow, per_token=per_token)
    with rigged_model.context(n_ctx=2048, n_seq_max=n_prompts, **EXACT) as context:
        prompts = [[1, token] for token in range(5, 5 + n_prompts)]
        found = list(lt.generate(context, prompts, drafter, max_tokens=400))
    for prompt, one in zip(prompts, found, strict=True):
        text = [*prompt, *one.tokens.tolist()]
        assert all(F[a] == b for a, b in pairwise(text[1:]))
        assert len(one.tokens) == 400
    # The first entry is the prompts' pass.
    drafted = drafter.drafted[1:]
    return drafted[len(drafted) // 2 :]


@pytest.mark.parametrize("n_prompts", [1, 3])
def test_drafts_that_never_stand_become_rare(n_prompts: int, clock: Clock, rigged_model: lt.Model) -> None:
    rounds = late(clock, rigged_model, by_token(WRONG), n_prompts)
    assert len(rounds) == 200
    assert 0 < sum(count > 0 for count in rounds) < 50


def test_drafts_that_always_stand_become_long(clock: Clock, rigged_model: lt.Model) -> None:
    rounds = late(clock, rigged_model, by_token(F), per_token=0.05)
    # They grow to the longest; one of the last is cut by the text's end.
    assert np.median(rounds) == AUTO_LONGEST
    assert np.mean(np.array(rounds) >= AUTO_LONGEST - 1) > 0.7


def test_drafts_that_cost_more_than_they_give_become_rare(clock: Clock, rigged_model: lt.Model) -> None:
    """All drafted tokens are accepted, but each takes as long as two passes."""
    rounds = late(clock, rigged_model, by_token(F), per_token=2.0)
    assert sum(count > 0 for count in rounds) < 0.25 * len(rounds)


def test_drafts_of_which_one_token_stands_become_short(clock: Clock, rigged_model: lt.Model) -> None:
    def one(text: Any, n: int) -> list[int]:
        return [F[text[-1]], *by_token(WRONG)(text, n)][:n]

    rounds = late(clock, rigged_model, one, per_token=0.3)
    assert np.median(rounds) == 1
    assert np.mean(rounds) < 2


def test_the_first_rounds_measure(clock: Clock, rigged_model: lt.Model) -> None:
    """Two rounds without a draft, then a single token, half the longest draft and the longest.

    Prefill counts for no round.
    """
    drafter = Costly(clock, by_token(F))
    with rigged_model.context(n_ctx=512, **EXACT) as context:
        list(lt.generate(context, [1, 9], drafter, max_tokens=100))
    assert drafter.drafted[1:6] == [0, 0, 1, 4, 8]


def test_seconds_are_of_rounds_of_as_many_sequences(clock: Clock, rigged_model: lt.Model) -> None:
    """With three sequences a drafted token costs as much as five passes, with one it costs nothing.

    All drafted tokens are accepted.
    """

    @dataclass
    class Crowded(Costly):
        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            super().process(batch, states)
            alone = len(self.batches[-1]) == 1
            self.clock.now += 0 if alone else 5.0 * self.drafted[-1]

    drafter = Crowded(clock, by_token(F), per_token=0.0)
    with rigged_model.context(n_ctx=2048, n_seq_max=3, **EXACT) as context:
        prompts = [[1, 5], [1, 6], [1, 7]]
        stream = lt.generate(context, prompts, drafter, max_tokens=400, stream=True)
        for n_events, event in enumerate(stream):
            if event.index > 0 and n_events > 500:
                event.cancel()
    counts = [len(batch) for batch in drafter.batches]
    crowded, alone = counts.index(3), counts.index(1)
    assert np.mean([count > 0 for count in drafter.drafted[crowded + 9 : alone]]) < 0.25
    assert np.mean(drafter.drafted[alone + 4 : -1]) > 0.8 * AUTO_LONGEST


def ngram(context: lt.Context, folder: Path) -> Any:
    return lt.NGramDrafter(2, 1, n_max="auto")


def near_model(context: lt.Context, folder: Path) -> Any:
    path = nearly(TinyLlama(), folder / "near.gguf")
    spec = lt.SpeculativeContext(context, path, as_model=True, n_threads=1)
    return lt.ModelDrafter(context, spec, n_max="auto")


def eagle3(context: lt.Context, folder: Path) -> Any:
    spec = lt.SpeculativeContext(context, drafters.write_eagle3(folder / "eagle3.gguf"), n_threads=1)
    return lt.Eagle3Drafter(spec, n_max="auto")


def chained_mtp(context: lt.Context, folder: Path) -> Any:
    """Its drafts are at most three tokens long, one for each head."""
    path = drafters.write_mtp_block(folder / "mtp.gguf", n_layer=4, n_nextn=3)
    return lt.MtpDrafter(lt.SpeculativeContext(context, path, n_threads=1), n_max="auto")


def function(context: lt.Context, folder: Path) -> Any:
    return lt.CallableDrafter(lambda tokens: np.repeat(tokens[-2:], 9), n_max="auto")


def chain(context: lt.Context, folder: Path) -> Any:
    """A chain in which one drafter has a length of its own."""
    return [lt.NGramDrafter(3, 2, n_max=3), near_model(context, folder)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    "make", [ngram, near_model, eagle3, chained_mtp, function, chain], ids=lambda make: make.__name__
)
def test_tokens_are_those_without_a_drafter(
    make: Callable[..., Any], sampling: str, tmp_path: Path, tiny_model: lt.Model
) -> None:
    """Here the real clock chooses the lengths."""
    prompts = ragged(np.random.default_rng(5), tiny_model.n_vocab, (6, 31, 2, 14))
    expected = [
        by_hand(tiny_model, prompt, 60, seed=seed_of(3, i), **SAMPLING[sampling])
        for i, prompt in enumerate(prompts)
    ]
    with tiny_model.context(n_ctx=512, n_seq_max=2, n_ubatch=16, **EXACT) as context:
        found = list(
            lt.generate(
                context,
                prompts,
                make(context, tmp_path),
                max_tokens=60,
                seed=3,
                ignore_eos=True,
                **SAMPLING[sampling],
            )
        )
        assert is_empty(context)
    assert [one.tokens.tolist() for one in found] == expected
    assert all(len(one.stats.drafted_at) <= AUTO_LONGEST for one in found)
    assert sum(one.stats.drafted for one in found) > 0


@pytest.mark.parametrize("n_rs_seq", [0, 2, 4])
def test_no_more_is_drafted_than_can_be_taken_back(n_rs_seq: int, clock: Clock, tmp_path: Path) -> None:
    with lt.Model(TinyQwen35().write(tmp_path / "qwen35.gguf")) as model:
        prompts = ragged(np.random.default_rng(5), model.n_vocab, (6, 31))
        expected = [by_hand(model, prompt, 40) for prompt in prompts]
        with model.context(n_ctx=512, n_seq_max=2, n_rs_seq=n_rs_seq, **EXACT) as context:
            # Drafts that are right, so that long ones pay.
            texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]

            def right(tokens: Sequence[int], n: int) -> list[int]:
                text = next(one for one in texts if one[: len(tokens)] == list(tokens))
                return text[len(tokens) : len(tokens) + n]

            drafter = Costly(clock, right, per_token=0.05)
            found = list(lt.generate(context, prompts, drafter, max_tokens=40, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == expected
    longest = max(len(one.stats.drafted_at) for one in found)
    assert longest == (n_rs_seq or AUTO_LONGEST)
