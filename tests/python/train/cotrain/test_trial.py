"""When a trial of a new draft is decided, and how."""

from __future__ import annotations

import pytest

from llamatap.train import CoTrainOptions
from llamatap.train.cotrain.trial import TrafficCounts, Trial


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
    trial = Trial(0, 2.0)
    trial.add(rounds, round((tokens_per_round - 1) * rounds))
    assert trial.verdict(options) == verdict


def test_recent_traffic_counts() -> None:
    counts = TrafficCounts(100)
    for tokens in (1, 3):
        for _ in range(100):
            counts.add(10, 10 * (tokens - 1))
        assert counts.rounds <= 200
        assert counts.tokens_per_round == pytest.approx(tokens, abs=0.01)
