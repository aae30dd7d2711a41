"""Time accounting: the seconds of each request, by phase."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from llamatap.generation.request import Request

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Charges the seconds of a round to its requests, by phase (:class:`Stats`).

    :ivar now: time of the last charge.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def start(self) -> float:
        """Start a round. The seconds since the last charge were spent by the caller, and are not charged."""
        self.now = time.perf_counter()
        return self.now

    def charge(self, phase: Literal["target", "draft", "sampling"], requests: Sequence[Request]) -> None:
        """Charge the seconds since the last call to these requests, split by their entries in the pass."""
        before, self.now = self.now, time.perf_counter()
        seconds = self.now - before
        n_entries = sum(request.n_entries for request in requests)
        name = f"{phase}_seconds"
        for request in requests:
            share = request.n_entries / n_entries if n_entries else 1 / len(requests)
            setattr(request.stats, name, getattr(request.stats, name) + seconds * share)
