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
# Weight of the long-run acceptance beside that of recent rounds, in drafts; and its change per draft.
_PRIOR, _LEARNED = 2.0, 0.05
# Acceptance at a position that was never reached, relative to the one before it.
_DECLINE = 0.9
# How often another length is tried, in rounds, so that costs and acceptance do not go stale.
_TRY_EVERY = 16
# The same while no draft pays, within the budget.
_HOPE_EVERY = 4
_MEASURED = 9
# A duration that is older than this many rounds is forgotten when its length is measured again.
_STALE = 48
# What trials may lose, in rounds without a draft: at first, more in each round, the limits of what is left.
_FIRST_BUDGET, _BUDGET, _LEAST_BUDGET, _MOST_BUDGET = 0.5, 0.012, -2.0, 2.5
# A draft must give this many times the tokens per second of none.
_WORTH = 1.05
# What a drafted token costs before anything is measured, in rounds without a draft: two processor cores.
_GUESSED = 0.35
# Slope of the durations beyond the longest draft that was measured, relative to the slope before.
_BEYOND = 0.5


class DraftLength:
    """Chooses the length of drafts that gives the most tokens per second, 0 (no draft) included.

    :param longest: the longest draft that is considered.

    ``a[i]`` is the acceptance rate at position i: the share of drafts whose i-th token was accepted, among
    those whose first i-1 tokens were. A draft of k tokens gives ``1 + a[1] + a[1] a[2] + ... + a[1]...a[k]``
    tokens a round. ``c[k]`` is the duration of rounds with k drafted tokens: the median of the last 9,
    interpolated linearly between measured lengths. The chosen length is the k that maximises tokens per
    second, and 0 unless it gives 5 % more than no draft. Older rounds count less: the weight of a round is
    0.98 of that of the next; without recent drafts, ``a[i]`` is a long-run average.

    Durations are kept by the number of sequences: a round of 8 takes longer than a round of 1, and a pass
    that is full without drafts makes each drafted token dearer. Acceptance is counted over all rounds.

    Where drafts do not pay, trying them costs time. So all trials have a budget: half a round without drafts,
    and 1.2 % of the rounds since. A length is tried if what it is expected to lose is left, and what it then
    loses is taken off. The first rounds have no draft (two; with another number of sequences, one); then one
    token, half of the longest draft and the longest are tried. Every 16th round (while no draft pays, every
    4th) tries, of these, none and those next to the best, the one that was not measured for longest.
    Durations from 48 rounds ago or earlier are forgotten when their length is measured again.
    """

    def __init__(self, longest: int) -> None:
        self.longest = integer("longest", longest, 1)
        self._hits = [0.0] * self.longest
        self._tries = [0.0] * self.longest
        # Of positions that were reached.
        self._typical: list[float] = []
        # By the number of sequences and the length: (round, seconds).
        self._measured: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._budget = _FIRST_BUDGET
        # Of this round.
        self._is_trial, self._accepted = False, 0
        self._rounds = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """Count a draft of ``drafted`` tokens, ``accepted`` of them accepted."""
        self._accepted += accepted
        for i in range(min(accepted + 1, drafted, self.longest)):
            hit = i < accepted
            if i == len(self._typical):
                self._typical.append(self._prior(i))
            self._tries[i] += 1
            self._hits[i] += hit
            self._typical[i] += _LEARNED * (hit - self._typical[i])

    def measure(self, drafted: int, seconds: float, n_sequences: int = 1) -> None:
        """Record that a round of ``n_sequences`` with ``drafted`` tokens each took ``seconds``, including
        drafting."""
        length = min(drafted, self.longest)
        none = self._known(n_sequences).get(0)
        if self._is_trial and none is not None:
            # One unlucky trial is no reason not to try again.
            tokens = max(1 + self._accepted / n_sequences, self.tokens(length))
            lost = seconds / max(none, 1e-9) - tokens
            self._budget = max(self._budget - lost, _LEAST_BUDGET)
        measured = self._measured.setdefault(n_sequences, {}).setdefault(length, deque(maxlen=_MEASURED))
        while measured and self._rounds - measured[0][0] >= _STALE:
            measured.popleft()
        measured.append((self._rounds, seconds))

    def acceptance(self, position: int) -> float:
        """Acceptance rate at ``position`` (from 1), among the drafts accepted up to there."""
        i = position - 1
        return (self._hits[i] + _PRIOR * self._prior(i)) / (self._tries[i] + _PRIOR)

    def _prior(self, i: int) -> float:
        if i < len(self._typical):
            return self._typical[i]
        return 0.5 if i == 0 else max(0.5, _DECLINE * self.acceptance(i))

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
        return _interpolated(self._known(n_sequences), length)

    def best(self, n_sequences: int = 1) -> int:
        """The length with the most expected tokens per second; 0 when too little was measured."""
        none = self._known(n_sequences).get(0)
        if none is None:
            return 0
        rates = [1 / max(none, 1e-9)]
        for length in range(1, self.longest + 1):
            seconds = self.seconds(length, n_sequences)
            if seconds is None:
                return 0
            rates.append(self.tokens(length) / max(seconds, 1e-9) / _WORTH)
        return max(range(len(rates)), key=rates.__getitem__)

    def choose(self, n_sequences: int = 1) -> int:
        """Choose the length for the next round, of ``n_sequences``."""
        self._rounds += 1
        self._budget = min(self._budget + _BUDGET, _MOST_BUDGET)
        # Rounds without a draft age the acceptance counts, too.
        for i in range(self.longest):
            self._hits[i] *= _KEPT
            self._tries[i] *= _KEPT
        self._is_trial, self._accepted = False, 0
        measured = self._measured.get(n_sequences, {})
        n_none = len(measured.get(0, ()))
        if n_none == 0 or (n_none == 1 and len(measured) == len(self._measured) == 1):
            return 0
        best = self.best(n_sequences)
        usual = {1, self.longest // 2, self.longest} - {0}
        new = sorted(usual - measured.keys())
        others = ({0, best - 1, best + 1} | usual) & set(range(self.longest + 1)) - {best}
        known = sorted(others.difference(new), key=lambda k: measured[k][-1][0] if k in measured else -1)
        is_turn = self._rounds % (_TRY_EVERY if best else _HOPE_EVERY) == 0
        for length in new + known if is_turn else new:
            lost = self._guessed(length, n_sequences) - self.tokens(length)
            # Cheaper ones do not take the budget that others wait for.
            if lost <= _MOST_BUDGET:
                if lost > self._budget:
                    break
                self._is_trial = True
                return length
        return best

    def _known(self, n_sequences: int, since: int = 0) -> dict[int, float]:
        """Median seconds by length, of those that were measured in this round or later."""
        measured = self._measured.get(n_sequences, {})
        return {
            length: statistics.median(seconds for _, seconds in values)
            for length, values in measured.items()
            if values[-1][0] >= since
        }

    def _guessed(self, length: int, n_sequences: int) -> float:
        """Duration of a trial, in rounds without a draft, by what was measured lately: what was dear once may
        be cheap now."""
        known = self._known(n_sequences, self._rounds - _STALE)
        if len(known) < 2:
            known = self._known(n_sequences)
        none = max(self._known(n_sequences)[0], 1e-9)
        found = _interpolated(known, length)
        if found is None:
            return 1 + _GUESSED * length
        longest = max(known)
        if length > longest:
            found = known[longest] + _BEYOND * (found - known[longest])
        return found / none


def _interpolated(known: dict[int, float], length: int) -> float | None:
    """The value at a length, on the line through its neighbours; None with fewer than two."""
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
