"""Acceptance on the traffic, and the trial of a new draft."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from llamatap.train.cotrain.options import CoTrainOptions

__all__ = ["N_STAGES", "TrafficCounts", "Trial", "stage_of"]

#: Stages of a text: up to round 4, 8, 16, 32, 64, and from there on. A text's first rounds give the fewest
#: tokens, and a new draft begins with new texts, so that only rounds of the same stage can be compared.
N_STAGES = 6
# Weight of all rounds in the rate of a stage, in rounds.
_PRIOR = 4.0


def stage_of(n_rounds: int) -> int:
    """Stage of a text that has had so many rounds."""
    return min((n_rounds // 4).bit_length(), N_STAGES - 1)


@dataclass
class TrafficCounts:
    """Rounds of a draft, the recent ones: beyond twice the window, all of a stage count half.

    :param window: number of rounds of a stage that are recent.
    :ivar by_stage: rounds, and the tokens accepted in them, for each stage.
    """

    window: float = math.inf
    by_stage: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)] * N_STAGES)

    def add(self, stage: int, rounds: int, accepted: int) -> None:
        """Add rounds of a stage."""
        total = self.by_stage[stage][0] + rounds
        part = 0.5 if total > 2 * self.window else 1.0
        self.by_stage[stage] = part * total, part * (self.by_stage[stage][1] + accepted)

    @property
    def rounds(self) -> float:
        """Number of rounds."""
        return sum(rounds for rounds, _ in self.by_stage)

    @property
    def tokens_per_round(self) -> float:
        """1 and the accepted tokens of a round; nan before the first."""
        accepted = sum(accepted for _, accepted in self.by_stage)
        return 1 + accepted / self.rounds if self.rounds else float("nan")

    def rates(self) -> list[float]:
        """Tokens per round of each stage; of stages with few rounds, nearly that of all."""
        drafted = self.tokens_per_round - 1
        return [1 + (accepted + _PRIOR * drafted) / (rounds + _PRIOR) for rounds, accepted in self.by_stage]


@dataclass
class Trial:
    """The trial of a new draft against the traffic of the one before it.

    :ivar before: number of the one before it.
    :ivar rates: its tokens per round, for each stage.
    """

    before: int
    rates: list[float]
    counts: TrafficCounts = field(default_factory=TrafficCounts)

    @property
    def expected(self) -> float:
        """Tokens per round that the one before would have had in rounds of these stages; nan before the first
        round."""
        rounds = [rounds for rounds, _ in self.counts.by_stage]
        total = sum(n * rate for n, rate in zip(rounds, self.rates, strict=True))
        return total / sum(rounds) if any(rounds) else float("nan")

    def verdict(self, options: CoTrainOptions) -> Literal["back", "keep"] | None:
        """Whether to go back or to keep the new draft; None while that is open."""
        part = min(1.0, self.counts.rounds / options.trial_rounds)
        if part < 0.1 or self.counts.rounds == 0:
            return None
        if self.counts.tokens_per_round < self.expected - options.margin / math.sqrt(part):
            return "back"
        return "keep" if part == 1 else None
