"""Acceptance on the traffic, and the trial of a new draft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llamatap.train.cotrain.options import CoTrainOptions

__all__ = ["TrafficCounts", "Trial"]


@dataclass
class TrafficCounts:
    """Rounds of a draft, the recent ones: beyond twice the window, all count half.

    :param window: number of rounds that are recent.
    """

    window: int
    rounds: float = 0.0
    accepted: float = 0.0

    def add(self, rounds: int, accepted: int) -> None:
        """Add rounds."""
        self.rounds += rounds
        self.accepted += accepted
        if self.rounds > 2 * self.window:
            self.rounds /= 2
            self.accepted /= 2

    @property
    def tokens_per_round(self) -> float:
        """1 and the accepted tokens of a round; nan before the first."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


@dataclass
class Trial:
    """The trial of a new draft against the traffic of the one before it.

    :ivar before: number of the one before it.
    :ivar expected: its tokens per round.
    """

    before: int
    expected: float
    rounds: int = 0
    accepted: int = 0

    def add(self, rounds: int, accepted: int) -> None:
        """Add rounds of the new draft."""
        self.rounds += rounds
        self.accepted += accepted

    @property
    def tokens_per_round(self) -> float:
        """Of the new draft; nan before its first round."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    def verdict(self, options: CoTrainOptions) -> Literal["back", "keep"] | None:
        """Whether to go back or to keep the new draft; None while that is open."""
        part = min(1.0, self.rounds / options.trial_rounds)
        if part < 0.1 or self.rounds == 0:
            return None
        if self.tokens_per_round < self.expected - options.margin / math.sqrt(part):
            return "back"
        return "keep" if part == 1 else None
