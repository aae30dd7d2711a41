"""When a trial of a new draft is decided, and how."""

from __future__ import annotations

import pytest

from llamatap.train import CoTrainOptions
from llamatap.train.cotrain.trial import N_STAGES, TrafficCounts, Trial, stage_of


@pytest.mark.parametrize(
    ("rounds", "tokens_per_round", "verdict"),
    [
        (0, 1.0, None),
        # Before a tenth of the trial, however bad.
        (199, 1.0, None),
        # 0.1 times the square root of 10.
        (200, 1.68, "back"),
        (200, 1.69, None),
        (1000, 1.85, "back"),
        (1000, 1.87, None),
        (1000, 2.5, None),
        (2000, 1.89, "back"),
        (2000, 1.91, "keep"),
        (5000, 1.91, "keep"),
    ],
)
def test_verdicts(rounds: int, tokens_per_round: float, verdict: str | None) -> None:
    options = CoTrainOptions(trial_rounds=2000, margin=0.1)
    trial = Trial(0, [2.0] * N_STAGES)
    trial.counts.add(1, rounds, round((tokens_per_round - 1) * rounds))
    assert trial.verdict(options) == verdict


def test_recent_traffic_counts() -> None:
    counts = TrafficCounts(100)
    for tokens in (1, 3):
        for _ in range(100):
            counts.add(0, 10, 10 * (tokens - 1))
        assert counts.rounds <= 200
        assert counts.tokens_per_round == pytest.approx(tokens, abs=0.01)


def test_rounds_of_a_stage_are_compared() -> None:
    """The first rounds of new texts, which give few tokens, do not count against a new draft."""
    options = CoTrainOptions(trial_rounds=2000, margin=0.1)
    before = TrafficCounts(2000)
    for stage, accepted in enumerate((200, 400, 600, 800, 900)):
        before.add(stage, 500, accepted)
    assert before.tokens_per_round == pytest.approx(2.16)
    assert before.rates() == pytest.approx([1.4, 1.8, 2.2, 2.6, 2.8, 2.16], abs=0.03)
    for accepted, verdict in ((160, None), (0, "back")):
        trial = Trial(0, before.rates())
        trial.counts.add(0, 400, accepted)
        assert trial.expected == pytest.approx(1.4, abs=0.03)
        assert trial.verdict(options) == verdict


def test_stages() -> None:
    firsts = [stage_of(n) for n in (0, 4, 8, 16, 32, 64)]
    assert firsts == list(range(N_STAGES))
    assert [stage_of(n) for n in (3, 7, 15, 31, 63, 10**6)] == firsts
