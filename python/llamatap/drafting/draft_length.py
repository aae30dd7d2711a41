"""Draft length: the option ``n_max``, its limits, and the measurements of ``n_max="auto"``.

A draft has as many tokens as the least of these allows:

- the drafter's ``n_max`` (:func:`request_limit`), or for "auto" the length that :class:`DraftLength` chooses
  for the round;
- what the target's memory can roll back (:meth:`llamatap.generation.rollback.Rollback.cap_draft`);
- what the request has left of ``max_tokens`` and of the context (:mod:`llamatap.generation.drafting_round`).
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal, TypeAlias

from llamatap._validate import integer, shown
from llamatap.errors import InvalidInputError

__all__ = [
    "AUTO_LONGEST",
    "DraftLength",
    "MaxTokens",
    "checked_n_max",
    "checked_n_min",
    "measured_length",
    "numeric_n_max",
    "request_limit",
]

#: The longest draft that ``n_max="auto"`` considers.
AUTO_LONGEST = 8
#: The option ``n_max``: maximum number of tokens in a draft; "auto" measures which length gives the most
#: tokens per second.
MaxTokens: TypeAlias = int | Literal["auto"]

# Decay of past rounds per new round: about 50 rounds count.
_KEPT = 0.98
# A prior with the weight of two tries: every other token is accepted.
_PRIOR_HITS, _PRIOR_TRIES = 1.0, 2.0
# How often another length is tried, in rounds, so that costs and acceptance do not go stale.
_EXPLORE_EVERY = 16
_MEASURED = 9
# The cost of a length that is older than this many rounds is forgotten when it is measured again.
_STALE = 48


class DraftLength:
    """Chooses the length of drafts that gives the most tokens per second, 0 (no draft) included.

    :param longest: the longest draft that is considered.

    ``a[i]`` is the acceptance rate at position i: the share of drafts whose i-th token was accepted, among
    those whose first i-1 tokens were. A draft of k tokens gives ``1 + a[1] + a[1] a[2] + ... + a[1]...a[k]``
    tokens a round. ``c[k]`` is the duration of rounds with k drafted tokens: the median of the last 9,
    interpolated linearly between measured lengths. The chosen length is the k that maximises tokens per
    second. Older rounds count less: the weight of a round is 0.98 of that of the next.

    Durations are kept by the number of sequences: a round of 8 takes longer than a round of 1, and a pass
    that is full without drafts makes each drafted token dearer. Acceptance is counted over all rounds. The
    first rounds measure the longest draft, none, one of a single token and one of half the length, twice
    each; with another number of sequences, once each. Later every 16th round tries another length: in turn
    those next to the best, the longest, and half of it. Costs that were last measured 48 rounds ago or
    earlier are discarded when the length is measured again.
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
        """Record that a round of ``n_sequences`` with ``drafted`` tokens each took ``seconds``, including
        drafting."""
        length = min(drafted, self.longest)
        known = self._seconds.setdefault(n_sequences, {}).setdefault(length, deque(maxlen=_MEASURED))
        if self._rounds - self._measured_at.get((n_sequences, length), self._rounds) >= _STALE:
            known.clear()
        self._measured_at[n_sequences, length] = self._rounds
        known.append(seconds)

    def acceptance(self, position: int) -> float:
        """Acceptance rate at ``position`` (from 1), among the drafts accepted up to there."""
        i = position - 1
        return (self._hits[i] + _PRIOR_HITS) / (self._tries[i] + _PRIOR_TRIES)

    def tokens(self, length: int) -> float:
        """Expected tokens of a round with a draft of this length."""
        total = product = 1.0
        for position in range(1, length + 1):
            product *= self.acceptance(position)
            total += product
        return total

    def seconds(self, length: int, n_sequences: int = 1) -> float | None:
        """Expected duration of a round of ``n_sequences`` with drafts of this length; None when too little
        was measured."""
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
        """The length with the most expected tokens per second; the longest when too little was measured."""
        rates = []
        for length in range(self.longest + 1):
            seconds = self.seconds(length, n_sequences)
            if seconds is None:
                return self.longest
            rates.append(self.tokens(length) / max(seconds, 1e-9))
        return max(range(len(rates)), key=rates.__getitem__)

    def choose(self, n_sequences: int = 1) -> int:
        """Choose the length for the next round, of ``n_sequences``."""
        self._rounds += 1
        # Rounds without a draft age the acceptance counts, too.
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


def measured_length(n_max: object) -> DraftLength | None:
    """A new :class:`DraftLength` for ``n_max="auto"``; None for every other ``n_max``."""
    return DraftLength(AUTO_LONGEST) if _is_auto(n_max) else None


def numeric_n_max(n_max: object) -> int:
    """The option ``n_max`` as a number, with 8 for "auto".

    :raises InvalidInputError: it is neither an integer in 1..1024 nor "auto".
    """
    found = checked_n_max("n_max", n_max)
    return AUTO_LONGEST if found == "auto" else found


def checked_n_max(name: str, n_max: object) -> MaxTokens:
    """The option ``n_max``, checked.

    :raises InvalidInputError: it is neither an integer in 1..1024 nor "auto".
    """
    if _is_auto(n_max):
        return "auto"
    if isinstance(n_max, str):
        raise InvalidInputError(f'{name} must be an integer or "auto", not {shown(n_max)}')
    return integer(name, n_max, 1, 1024)


def request_limit(n_max: object) -> int:
    """Limit on each request to a drafter with this :attr:`Drafter.n_max`; 2**31 - 1 for None and "auto".

    :raises InvalidInputError: it is not a number.
    """
    if n_max is None or _is_auto(n_max):
        return 2**31 - 1
    return integer("the drafter's n_max", n_max, 0)


def checked_n_min(n_min: object, n_max: int, why: str = "") -> int:
    """Check that ``n_min`` is at most ``n_max``.

    :param why: what limits ``n_max``, for the message.
    :raises InvalidInputError: it is not an integer in 0..n_max.
    """
    found = integer("n_min", n_min, 0)
    if found > n_max:
        raise InvalidInputError(
            f"n_min must be at most n_max, {n_max}{why}, not {found}: every draft would be discarded"
        )
    return found


def _is_auto(n_max: object) -> bool:
    return isinstance(n_max, str) and n_max == "auto"
