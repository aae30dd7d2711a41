"""How many tokens a draft should have: what acceptance and the cost of passes make of it."""

from __future__ import annotations

import statistics
from collections import deque

from llamatap._validate import integer

__all__ = ["DraftLength"]

# Decay of past rounds per new round: about 50 rounds count.
_KEPT = 0.98
# A first guess that weighs as much as two tries: every other token is accepted.
_PRIOR_HITS, _PRIOR_TRIES = 1.0, 2.0
# Every so many rounds another length is tried, so that costs and acceptance do not go stale.
_EXPLORE_EVERY = 16
_MEASURED = 9
# The cost of a length that is older than this many rounds is forgotten when it is measured again.
_STALE = 48


class DraftLength:
    """Chooses the length of drafts that gives the most tokens per second, 0 (no draft) included.

    :param longest: the longest draft that is considered.

    With ``a[i]`` the share of drafts whose i-th token was accepted, of those whose first i-1 were, a draft of
    k tokens gives ``1 + a[1] + a[1] a[2] + ... + a[1]...a[k]`` tokens a round. With ``c[k]`` the seconds that
    rounds with k drafted tokens took (the median of the last 9; between lengths that were measured, on a
    line), the length is the k that maximises tokens over seconds. Older rounds count less: the weight of one
    is 0.98 of that of the next.

    Seconds are those of rounds with as many sequences: eight take longer than one, and a pass that is full
    without drafts makes each token of a draft dearer. Acceptance is of all rounds. The first rounds measure
    the longest draft, none, one of a single token and one of half the length, twice each; with another number
    of sequences, once each. Later every 16th round tries another length: in turn the ones beside the best,
    the longest, and half of it. A length that is measured after 48 rounds or more is measured anew.
    """

    def __init__(self, longest: int) -> None:
        self.longest = integer("longest", longest, 1)
        self._hits = [0.0] * self.longest
        self._tries = [0.0] * self.longest
        # By the number of sequences.
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._measured_at: dict[tuple[int, int], int] = {}
        self._first: dict[int, list[int]] = {}
        self._rounds = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """Count a draft of ``drafted`` tokens, ``accepted`` of them accepted."""
        for i in range(min(accepted + 1, drafted, self.longest)):
            self._tries[i] += 1
            self._hits[i] += i < accepted

    def measure(self, drafted: int, seconds: float, n_sequences: int = 1) -> None:
        """A round of so many sequences with ``drafted`` tokens each took ``seconds``, drafting included."""
        length = min(drafted, self.longest)
        known = self._seconds.setdefault(n_sequences, {}).setdefault(length, deque(maxlen=_MEASURED))
        if self._rounds - self._measured_at.get((n_sequences, length), self._rounds) >= _STALE:
            known.clear()
        self._measured_at[n_sequences, length] = self._rounds
        known.append(seconds)

    def acceptance(self, position: int) -> float:
        """Acceptance rate at ``position`` (from 1), of the drafts accepted up to there."""
        i = position - 1
        return (self._hits[i] + _PRIOR_HITS) / (self._tries[i] + _PRIOR_TRIES)

    def tokens(self, length: int) -> float:
        """The tokens that a round with a draft of this length is expected to give."""
        total = product = 1.0
        for position in range(1, length + 1):
            product *= self.acceptance(position)
            total += product
        return total

    def seconds(self, length: int, n_sequences: int = 1) -> float | None:
        """The seconds that a round of so many sequences with drafts of this length takes; None when too
        little was measured."""
        measured = self._seconds.get(n_sequences, {})
        known = {k: statistics.median(values) for k, values in measured.items()}
        if length in known:
            return known[length]
        if len(known) < 2:
            return None
        lengths = sorted(known)
        above = next((i for i, k in enumerate(lengths) if k > length), len(lengths) - 1)
        low, high = lengths[max(above - 1, 0)], lengths[max(above, 1)]
        slope = (known[high] - known[low]) / (high - low)
        # Noise must not make a longer draft free.
        return max(known[low] + slope * (length - low), min(known.values()) * 0.5)

    def best(self, n_sequences: int = 1) -> int:
        """The length that promises the most tokens per second, of what is known; the longest when too little
        is."""
        rates = []
        for length in range(self.longest + 1):
            seconds = self.seconds(length, n_sequences)
            if seconds is None:
                return self.longest
            rates.append(self.tokens(length) / max(seconds, 1e-9))
        return max(range(len(rates)), key=rates.__getitem__)

    def choose(self, n_sequences: int = 1) -> int:
        """The length for the next round, of so many sequences."""
        self._rounds += 1
        # Also of rounds without a draft: what is known of acceptance is old by then.
        for i in range(self.longest):
            self._hits[i] *= _KEPT
            self._tries[i] *= _KEPT
        if n_sequences not in self._first:
            times = 1 if self._first else 2
            self._first[n_sequences] = [
                k for k in (self.longest, 0, 1, self.longest // 2) for _ in range(times)
            ]
        if self._first[n_sequences]:
            return self._first[n_sequences].pop(0)
        best = self.best(n_sequences)
        if self._rounds % _EXPLORE_EVERY:
            return best
        others = [best + 1, self.longest, best - 1, self.longest // 2]
        other = others[self._rounds // _EXPLORE_EVERY % len(others)]
        return other if 0 <= other <= self.longest and other != best else max(best - 1, 1)
