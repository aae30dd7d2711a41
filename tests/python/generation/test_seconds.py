"""Time accounting of a generation: all of it is in one of three figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, Guessing, by_hand, ragged
from support.tiny import TinyQwen35

import llamatap as lt
from llamatap._engine_context import EngineContext
from llamatap._native import _core
from llamatap.generation import rollback, time_accounting


@dataclass
class Clock:
    now: float = 0.0


class Slow(Guessing):
    """A drafter whose every method takes time."""

    clock: Clock

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        super().process(batch, states)
        self.clock.now += 1e-4

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
        self.clock.now += 1e-2
        return super().draft(requests)

    def accept(self, seq: int, n: int) -> None:
        super().accept(seq, n)
        self.clock.now += 1

    def reset(self, seq: int) -> None:
        super().reset(seq)
        self.clock.now += 1e-6


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n_seq_max", [1, 2])
@pytest.mark.parametrize("states", [None, "full"])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_every_second_is_in_its_figure(
    architecture: str,
    states: Any,
    n_seq_max: int,
    tiny_model: lt.Model,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on where it is told to: passes, saving and taking back a memory; the drafter;
    verification."""
    clock = Clock()
    monkeypatch.setattr(time_accounting, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def slow(owner: Any, name: str, seconds: float) -> list[int]:
        calls = []
        action = getattr(owner, name)

        def slower(*arguments: Any) -> Any:
            calls.append(1)
            clock.now += seconds
            return action(*arguments)

        monkeypatch.setattr(owner, name, slower)
        return calls

    own = lt.Model(TinyQwen35().write(tmp_path / "qwen35.gguf")) if architecture == "qwen35" else None
    model = own or tiny_model
    prompts = ragged(np.random.default_rng(5), model.n_vocab, (6, 31, 9))
    texts = [[*prompt, *by_hand(model, prompt, 20)] for prompt in prompts]
    decodes = slow(EngineContext, "decode", 5.0)
    kind = rollback.SnapshotRollback if architecture == "qwen35" else rollback.Rollback
    saves, backs = slow(kind, "prepare", 300.0), slow(kind, "rollback", 7000.0)
    verified = slow(_core, "verify", 0.1)
    drafter = Slow(model.n_vocab, texts, wrong=0.5)
    drafter.clock = clock
    with model.context(n_ctx=512, n_seq_max=n_seq_max, **EXACT) as context:
        found = []
        options: dict[str, Any] = {"max_tokens": 20, "states": states, "ignore_eos": True}
        for one in lt.generate(context, prompts, drafter, **options):
            found.append(one)
            # The caller's own time counts nowhere.
            clock.now += 1e6
    stats = [one.stats for one in found]
    assert backs
    assert sum(one.sampling_seconds for one in stats) == pytest.approx(0.1 * len(verified))
    target = 5.0 * len(decodes) + 300 * len(saves) + 7000 * len(backs)
    assert sum(one.target_seconds for one in stats) == pytest.approx(target)
    drafting = sum(one.draft_seconds for one in stats)
    rounds = sum(one.rounds for one in stats)
    assert drafting == pytest.approx(rounds + 1e-4 * len(drafter.batches), abs=1e-2 * len(decodes) + 1e-4)
    assert all(one.draft_seconds > one.rounds for one in stats)
    assert clock.now - 3e6 == pytest.approx(target + drafting + 0.1 * len(verified))
    if own is not None:
        own.close()


def test_the_three_figures_are_the_time_it_took(tiny_model: lt.Model) -> None:
    class Sleeping(Guessing):
        def accept(self, seq: int, n: int) -> None:
            time.sleep(0.002)
            super().accept(seq, n)

    (prompt,) = ragged(np.random.default_rng(5), tiny_model.n_vocab, [300])
    with tiny_model.context(n_ctx=512, **EXACT) as context:
        started = time.perf_counter()
        drafter = Sleeping(tiny_model.n_vocab)
        (found,) = lt.generate(context, prompt, drafter, max_tokens=100, ignore_eos=True)
        seconds = time.perf_counter() - started
    stats = found.stats
    assert stats.draft_seconds > 0.002 * stats.rounds
    assert min(stats.target_seconds, stats.sampling_seconds) > 0
    assert stats.target_seconds + stats.draft_seconds + stats.sampling_seconds > 0.9 * seconds
