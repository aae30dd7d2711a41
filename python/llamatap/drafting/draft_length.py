"""Draft length: the option ``n_max``, its limits, and the measurements of ``n_max="auto"``.

A draft has as many tokens as the least of these allows:

- the drafter's ``n_max`` (:func:`request_limit`), or for "auto" the length that :class:`DraftLength` chooses
  for the round;
- what the target's memory can roll back (:meth:`llamatap.generation.rollback.Rollback.cap_draft`);
- what the request has left of ``max_tokens`` and of the context (:mod:`llamatap.generation.drafting_round`).
"""

from __future__ import annotations

import math
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
# With fewer than so many tries, the prior's included, one more hit is hoped for.
_FEW_TRIES = 8.0
# Acceptance at a position that was never reached, relative to the one before.
_DECLINE = 0.9
# Decay of drafts in the long-run shares.
_LONG_KEPT = 0.995
# Weight of the prior: at first, every other token is accepted.
_PRIOR_TRIES = 2.0
# How often another length is tried, in rounds, so that costs and acceptance do not go stale.
_EXPLORE_EVERY = 16
# How much better than expected such a length may be where no draft seems to pay.
_HOPE = 1.15
# How often a length that was never measured is tried, if it may be better than the best.
_HOPE_EVERY = 4
_MEASURED = 9
# The cost of a length that is older than this many rounds is forgotten when it is measured again.
_STALE = 48
# The budget of trials, in rounds without drafts: at first, more per round, and its limits.
_FIRST_BUDGET, _EXPLORED, _LEAST_BUDGET, _MOST_BUDGET = 0.7, 0.012, -2.0, 4.0
# Slope of the costs of lengths beyond the longest that was measured, relative to the slope before.
_BEYOND = 0.5
# What a drafted token costs before anything is measured, in rounds without drafts.
_GUESSED_SLOPE = 0.35
# Drafts are made if they give this many times the tokens per second of none.
_WORTH = 1.03
# How often a trial that gained is repeated.
_MOST_REPEATS = 3
# After so many rounds without drafts, work may have waited in the drafter.
_PAUSE = 4


class _Shares:
    """Shares of events by position in the draft: how many of the tries were hits, older ones counting less.

    :param prior: what a share is before any try; it weighs as much as two tries.
    :param learns: whether the long-run share takes the place of the prior.
    """

    def __init__(self, longest: int, prior: float, *, learns: bool) -> None:
        self._hits = [0.0] * longest
        self._tries = [0.0] * longest
        self._prior_hits = [_PRIOR_TRIES * prior] * longest
        self._prior_tries = [_PRIOR_TRIES] * longest
        self._learns = learns

    def count(self, i: int, hit: bool) -> None:
        self._tries[i] += 1
        self._hits[i] += hit
        if self._learns:
            self._prior_tries[i] = self._prior_tries[i] * _LONG_KEPT + 1
            self._prior_hits[i] = self._prior_hits[i] * _LONG_KEPT + hit

    def age(self) -> None:
        for i in range(len(self._tries)):
            self._hits[i] *= _KEPT
            self._tries[i] *= _KEPT

    def was_tried(self, i: int) -> bool:
        return self._tries[i] > 0

    def share(self, i: int, hopeful: bool = False) -> float:
        """The share at a position; if hopeful, where there were few tries, as if one more were a hit."""
        prior = self._prior_hits[i] / self._prior_tries[i]
        more = hopeful and self._prior_tries[i] < _FEW_TRIES
        return (self._hits[i] + _PRIOR_TRIES * prior + more) / (self._tries[i] + _PRIOR_TRIES + more)


class DraftLength:
    """Chooses the length of drafts that gives the most tokens per second, 0 (no draft) included.

    :param longest: the longest draft that is considered.
    :param warms_up: whether a draft after rounds without one also does work that has waited since, as with
        drafters that have a KV cache. Such a round is not measured, and the next one has as long a draft.

    ``a[i]`` is the acceptance rate at position i: the share of drafts whose i-th token was accepted, among
    those whose first i-1 tokens were. ``s[i]`` is the share of drafts that have an i-th token at all, among
    those that were asked for as many and whose first i-1 tokens were accepted. A draft of at most k tokens
    gives ``1 + s[1]a[1] + ... + s[1]a[1]...s[k]a[k]`` tokens a round. ``c[x]`` is the duration of rounds with
    x drafted tokens a sequence: the median of the last 9, interpolated linearly. The chosen length is the k
    that maximises tokens per second, and 0 unless it gives 3 % more than no draft. Older rounds count less:
    the weight of a round is 0.98 of that of the next. What is left of a rate without recent drafts is its
    average over some 200 drafts.

    Durations are kept by the number of sequences: a round of 8 takes longer than a round of 1, and a pass
    that is full without drafts makes each drafted token dearer. Where none is known yet, durations relative
    to rounds without a draft are those of the nearest number of sequences, if it is not half or double.

    Trying a length costs time when its drafts do not pay. A budget bounds that: 0.7 rounds without drafts at
    the start, and 1.2 % of the rounds since, plus what drafts have saved lately. A length is tried only if
    what it is expected to lose is left, and what it does lose is taken off. The first rounds try none, one
    token, half of the longest draft and the longest, twice each; with another number of sequences, once
    each. Later every 16th round tries another length: in turn those next to the best, the longest, and half
    of it. Every 4th round tries a length that was never measured and would be better than the best if it
    cost no more than a shorter one. A trial that gained is repeated where no draft seemed to pay. Costs that
    were last measured 48 rounds ago or earlier are discarded when the length is measured again.
    """

    def __init__(self, longest: int, *, warms_up: bool = False) -> None:
        self.longest = integer("longest", longest, 1)
        self._warms_up = warms_up
        self._accepted = _Shares(longest, 0.5, learns=True)
        # Drafts that go on, among those accepted so far and among all.
        self._goes_on = _Shares(longest, 1.0, learns=False)
        self._has = _Shares(longest, 1.0, learns=False)
        # By the number of sequences and the drafted tokens a sequence, rounded up: (these tokens, seconds).
        self._measured: dict[int, dict[int, deque[tuple[float, float]]]] = {}
        self._measured_at: dict[tuple[int, int], int] = {}
        # Seconds of asking a drafter that then had no draft.
        self._in_vain: dict[int, deque[float]] = {}
        self._first: dict[int, list[int]] = {}
        self._rounds = 0
        # In rounds without drafts.
        self._budget = _FIRST_BUDGET
        self._chosen = 0
        self._n_sequences = 0
        # Whether the round tries a length, and does so although no draft seems to pay.
        self._trial = False
        self._hopes = False
        self._again = False
        self._n_repeated = 0
        self._must_try = False
        self._without = 0
        self._gained = 0

    def observe(self, drafted: int, accepted: int, asked: int | None = None) -> None:
        """Count a draft of ``drafted`` tokens, ``accepted`` of them accepted.

        :param asked: how many could have been drafted, if a shorter draft says that the drafter had no more.
        """
        self._gained += accepted
        limit = min(drafted if asked is None else asked, self.longest)
        for i in range(limit):
            if drafted >= i:
                self._has.count(i, drafted > i)
            if accepted >= i:
                self._goes_on.count(i, drafted > i)
                if drafted > i:
                    self._accepted.count(i, accepted > i)

    def measure(
        self, drafted: float, seconds: float, n_sequences: int = 1, in_vain: float | None = None
    ) -> None:
        """Record a round.

        :param drafted: drafted tokens, divided by the number of sequences.
        :param seconds: its duration, including drafting.
        :param in_vain: if no draft came back, the seconds of asking for it.
        """
        if in_vain is not None:
            self._in_vain.setdefault(n_sequences, deque(maxlen=_MEASURED)).append(in_vain)
        plain = self.seconds(0, n_sequences)
        if drafted > 0 and self._warms_up and self._without >= _PAUSE:
            self._again = True
        else:
            self._record(drafted, seconds - (in_vain or 0), n_sequences)
        self._without = 0 if drafted > 0 else self._without + 1
        self._budget += _EXPLORED
        if plain and drafted > 0:
            if self._trial:
                # A single slow round must not use up the budget for long.
                gain = max(1 + self._gained / n_sequences - seconds / plain, -2 * drafted)
                self._again |= self._hopes and gain > 0 and self._n_repeated < _MOST_REPEATS
            else:
                gain = max(self.tokens(self._chosen) - seconds / plain, 0.0)
            self._budget += gain
        self._budget = min(max(self._budget, _LEAST_BUDGET), _MOST_BUDGET)

    def _record(self, drafted: float, seconds: float, n_sequences: int) -> None:
        bucket = min(math.ceil(drafted), self.longest)
        known = self._measured.setdefault(n_sequences, {}).setdefault(bucket, deque(maxlen=_MEASURED))
        if self._rounds - self._measured_at.get((n_sequences, bucket), self._rounds) >= _STALE:
            known.clear()
        self._measured_at[n_sequences, bucket] = self._rounds
        known.append((min(drafted, self.longest), seconds))

    def acceptance(self, position: int) -> float:
        """Acceptance rate at ``position`` (from 1), among the drafts accepted up to there."""
        return self._accepted.share(position - 1)

    def tokens(self, length: int, *, hopeful: bool = False) -> float:
        """Expected tokens of a round with a draft of at most this length; if hopeful, with some luck as long
        as few drafts are known."""
        total = product = accepted = 1.0
        for i in range(length):
            # A position that was never reached is probably a little worse than the one before.
            if i == 0 or self._accepted.was_tried(i):
                accepted = self._accepted.share(i, hopeful)
            else:
                accepted *= _DECLINE
            product *= self._goes_on.share(i) * accepted
            total += product
        return total

    def seconds(self, length: float, n_sequences: int = 1) -> float | None:
        """Expected duration of a round of ``n_sequences`` with so many drafted tokens each; None when too
        little was measured."""
        known = {
            statistics.median(drafted for drafted, _ in values): statistics.median(
                seconds for _, seconds in values
            )
            for values in self._measured.get(n_sequences, {}).values()
            if values
        }
        if length in known:
            return known[length]
        if len(known) < 2:
            return None
        lengths = sorted(known)
        above = next((i for i, k in enumerate(lengths) if k > length), len(lengths) - 1)
        low, high = lengths[max(above - 1, 0)], lengths[max(above, 1)]
        slope = (known[high] - known[low]) / (high - low)
        if length > high:
            # The first drafted tokens are the dearest; and what is hoped for is measured soon.
            return known[high] + max(slope, 0.0) * _BEYOND * (length - high)
        # Noise must not make a longer draft free.
        return max(known[low] + slope * (length - low), min(known.values()) * 0.5)

    def best(self, n_sequences: int = 1) -> int:
        """The length with the most expected tokens per second; the longest when too little was measured."""
        if self.seconds(0, n_sequences) is None or self.seconds(self.longest, n_sequences) is None:
            return self.longest
        return self._best(n_sequences)

    def settled(self, n_sequences: int = 1) -> int:
        """The best length, for a round that is not measured: 0 when too little was measured."""
        known = any(self.seconds(self.longest, n) is not None for n in self._measured)
        return self._best(n_sequences) if known else 0

    def _best(self, n_sequences: int) -> int:
        """The best length by what is known, measured or guessed."""
        gains = [self.tokens(k) / self._relative(k, n_sequences) for k in range(self.longest + 1)]
        longest = max(range(len(gains)), key=gains.__getitem__)
        return longest if gains[longest] > _WORTH * gains[0] else 0

    def _relative(self, length: int, n_sequences: int) -> float:
        """Expected duration of a round with drafts of at most this length, relative to one without."""
        if length == 0:
            return 1.0
        rows, product = 0.0, 1.0
        for i in range(length):
            product *= self._has.share(i)
            rows += product
        some = 1 - (1 - self._has.share(0)) ** n_sequences
        guess = 1 + _GUESSED_SLOPE * rows
        for n in sorted(self._measured, key=lambda n: abs(n - n_sequences)):
            plain, drafted = self.seconds(0, n), self.seconds(rows / max(some, 1e-9), n)
            if plain and drafted is not None:
                in_vain = self._in_vain.get(n)
                lost = statistics.median(in_vain) / plain if in_vain else 0.0
                found = max(some * drafted / plain + (1 - some) * (1 + lost), 1e-9)
                return min(found, guess) if _far(n, n_sequences) else found
        return guess

    def _others(self, best: int, n_sequences: int) -> list[int]:
        """The lengths to try in this round, the first of them first."""
        number, rest = divmod(self._rounds, _EXPLORE_EVERY)
        if rest % _HOPE_EVERY:
            return []
        # They come first: trials of other lengths would use up what theirs cost.
        if (hoped := self._hoped(best, n_sequences)) or rest:
            return hoped
        turns = ([best + 1], [self.longest, best + 1], [best - 1], [self.longest // 2, best + 1])
        return turns[number % len(turns)]

    def _hoped(self, best: int, n_sequences: int) -> list[int]:
        """The unmeasured lengths that would be better than the best if they cost no more than the next
        shorter one that was measured, the best of them first."""
        measured = self._measured.get(n_sequences, {})
        enough = (1.0 if best else 1 / _HOPE) * self.tokens(best) / self._relative(best, n_sequences)
        rates, cost = {}, 1.0
        for length in range(1, self.longest + 1):
            if length in measured:
                cost = self._relative(length, n_sequences)
            elif (rate := self.tokens(length, hopeful=True) / cost) > enough:
                rates[length] = rate
        return sorted(rates, key=rates.__getitem__, reverse=True)

    def _affordable(self, length: int, n_sequences: int) -> bool:
        rounds = 2 if length and self._warms_up and self._without >= _PAUSE else 1
        # A few drafts say little. What is really lost is known afterwards.
        loss = self._relative(length, n_sequences) - self.tokens(length, hopeful=True)
        return rounds * loss <= max(self._budget, 0.0)

    def choose(self, n_sequences: int = 1) -> int:
        """Choose the length for the next round, of ``n_sequences``."""
        self._rounds += 1
        self._gained = 0
        # Rounds without a draft age the counts, too.
        for shares in (self._accepted, self._goes_on, self._has):
            shares.age()
        self._again &= n_sequences == self._n_sequences
        self._n_sequences = n_sequences
        self._chosen = self._next(n_sequences)
        return self._chosen

    def _next(self, n_sequences: int) -> int:
        if self._again and self._chosen:
            self._again = False
            self._n_repeated += 1
            return self._chosen
        self._again, self._n_repeated = False, 0
        self._trial, self._hopes = True, False
        if n_sequences not in self._first:
            times = 1 if self._first else 2
            self._must_try = all(_far(n, n_sequences) for n in self._measured)
            lengths = (0, 1, self.longest // 2, self.longest)
            self._first[n_sequences] = [k for k in lengths for _ in range(times)]
        while self._first[n_sequences]:
            length = self._first[n_sequences].pop(0)
            must, self._must_try = self._must_try and length == 1, self._must_try and length != 1
            if self._affordable(length, n_sequences) or (must and self._budget > _LEAST_BUDGET / 2):
                return length
        best = self._best(n_sequences)
        for other in self._others(best, n_sequences):
            if 0 <= other <= self.longest and other != best and self._affordable(other, n_sequences):
                self._hopes = best == 0
                return other
        self._trial = False
        return best


def _far(a: int, b: int) -> bool:
    """Whether numbers of sequences differ so much that the costs of one say little about the other."""
    return max(a, b) >= 2 * min(a, b)


def measured_length(n_max: object, *, warms_up: bool = False) -> DraftLength | None:
    """A new :class:`DraftLength` for ``n_max="auto"``; None for every other ``n_max``.

    :param warms_up: as in :class:`DraftLength`.
    """
    return DraftLength(AUTO_LONGEST, warms_up=warms_up) if _is_auto(n_max) else None


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
