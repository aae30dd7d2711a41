"""Figures of drafting: loops in texts, rounds that drafts would have taken, break-even, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Counts", "WatchedText", "break_even", "in_loops", "markdown", "right_tokens", "spread"]


def in_loops(tokens: ArrayLike, longest_period: int = 64, times: int = 3) -> NDArray[np.bool_]:
    """Which tokens lie in a loop: a part of at most ``longest_period`` tokens, ``times`` or more in a row."""
    text = np.asarray(tokens)
    found = np.zeros(len(text), np.bool_)
    for period in range(1, min(longest_period, len(text) // times) + 1):
        repeats = np.concatenate([[0], text[period:] == text[:-period], [0]])
        edges = np.flatnonzero(np.diff(repeats))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            # The first copy is not a repetition.
            if end - begin >= (times - 1) * period:
                found[begin : end + period] = True
    return found


def right_tokens(draft: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """(verified, accepted) of a draft that stands before this rest of the text.

    As in llamatap.Stats, a text that ends inside a draft says nothing about the tokens after its end.
    """
    accepted = 0
    while accepted < min(len(draft), len(text)) and draft[accepted] == text[accepted]:
        accepted += 1
    return (accepted if accepted == len(text) else len(draft)), accepted


@dataclass
class WatchedText:
    """A text, and how good a drafter's guess was after each of its tokens.

    :ivar drafts: for each token except the last, (drafted, accepted) of the draft after it.
    :ivar loops: which tokens lie in loops.
    """

    drafts: list[tuple[int, int]]
    loops: NDArray[np.bool_]


@dataclass
class Counts:
    """Counts of rounds with drafts of at most a given length.

    :ivar drafted_at: number of verified tokens by position in the draft.
    :ivar accepted_at: number of accepted tokens by position in the draft.
    :ivar outside: (tokens, rounds) of the rounds whose first new token lies in no loop.
    """

    tokens: int = 0
    rounds: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, text: WatchedText, n_max: int) -> None:
        """Count the rounds of a text: each begins after the last token of the one before."""
        missing = n_max - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        newest, last = 0, len(text.drafts)
        while newest < last:
            drafted, accepted = (min(n, n_max) for n in text.drafts[newest])
            for i in range(drafted):
                self.drafted_at[i] += 1
                self.accepted_at[i] += i < accepted
            n_new = min(accepted + 1, last - newest)
            if not text.loops[newest + 1]:
                self.outside[0] += n_new
                self.outside[1] += 1
            newest += n_new
            self.tokens += n_new
            self.rounds += 1

    def figures(self) -> dict[str, Any]:
        drafted, accepted = sum(self.drafted_at), sum(self.accepted_at)
        used = [i for i, n in enumerate(self.drafted_at) if n]
        return {
            "tokens per round": _ratio(self.tokens, self.rounds),
            "tokens per round, outside of loops": _ratio(*self.outside),
            "rounds": self.rounds,
            "drafted": drafted,
            "accepted": _ratio(accepted, drafted),
            # As in llamatap.Stats: the share of drafts at least that long that were accepted up to there.
            "acceptance by position": [_ratio(self.accepted_at[i], self.drafted_at[i]) for i in used],
        }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def break_even(pass_seconds: Mapping[int, float], n_max: int, draft_seconds: float = 0.0) -> float:
    """Tokens per round and sequence from which drafts of ``n_max`` tokens pay.

    :param pass_seconds: seconds of a pass of the target, by its number of tokens for each sequence.
    :param draft_seconds: seconds that the drafter takes in a round.
    """
    return (pass_seconds[n_max + 1] + draft_seconds) / pass_seconds[1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def markdown(rows: Iterable[Mapping[str, object]]) -> str:
    """A Markdown table with a column for each key, in the order in which keys come; missing cells are
    empty."""
    listed = list(rows)
    columns = list(dict.fromkeys(key for row in listed for key in row))
    if not columns:
        return ""
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in listed]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, Mapping):  # of spread()
        return f"{value['median']:.2f} ({value['least']:.2f}-{value['most']:.2f})"
    if isinstance(value, (list, tuple)):
        return " ".join(_cell(one) for one in value)
    return str(value).replace("|", "\\|")
