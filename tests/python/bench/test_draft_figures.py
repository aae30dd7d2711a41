"""Figures of bench/drafting.py: loops, rounds along a known text, break-even, tables."""

from __future__ import annotations

import numpy as np
import pytest
from draft_figures import Counts, WatchedText, break_even, in_loops, markdown, right_tokens, spread


def positions(tokens: list[int], **options: int) -> list[int]:
    return np.flatnonzero(in_loops(tokens, **options)).tolist()


def test_a_part_that_stands_three_times_in_a_row_is_a_loop() -> None:
    assert positions([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 7]) == list(range(2, 11))
    # The third copy is not complete.
    assert positions([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 7, 7]) == []
    assert positions([1, 2, 2, 2, 3]) == [1, 2, 3]
    assert positions([1, 2, 2, 3]) == []


def test_loops_of_several_periods_and_at_the_ends() -> None:
    assert positions([5, 5, 5, 1, 6, 7, 6, 7, 6, 7]) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    # A loop that ends within a copy.
    assert positions([1, 2, 1, 2, 1, 2, 1]) == list(range(7))


def test_loops_with_long_periods_do_not_count() -> None:
    part = list(range(65))
    assert positions(part * 3) == []
    assert len(positions(part[:64] * 3)) == 192
    assert positions(part * 3, longest_period=65) == list(range(195))


def test_texts_without_loops() -> None:
    assert in_loops([]).tolist() == []
    assert positions([1]) == []
    assert positions(np.random.default_rng(0).permutation(500).tolist()) == []


@pytest.mark.parametrize("period", [1, 2, 7, 64])
def test_loops_are_those_of_the_definition(period: int) -> None:
    rng = np.random.default_rng(period)
    text = rng.integers(0, 3, 300)
    text[40 : 40 + 3 * period] = np.tile(rng.integers(0, 3, period), 3)
    expected = np.zeros(len(text), bool)
    for length in range(1, 65):
        for begin in range(len(text) - 3 * length + 1):
            part = text[begin : begin + length]
            if (text[begin : begin + 3 * length] == np.tile(part, 3)).all():
                expected[begin : begin + 3 * length] = True
    assert in_loops(text).tolist() == expected.tolist()


def test_right_tokens() -> None:
    assert right_tokens([1, 2, 3], [1, 2, 4, 5]) == (3, 2)
    assert right_tokens([1, 2, 3], [1, 2]) == (2, 2)
    assert right_tokens([1, 7, 3], [1, 2]) == (3, 1)
    assert right_tokens([7], [1]) == (1, 0)
    assert right_tokens([], [1]) == (0, 0)


def test_rounds_along_a_text() -> None:
    """7 tokens: the first is the prompt's, then rounds of 3, 1 and 2 tokens."""
    drafts = [(3, 2), (3, 3), (2, 1), (0, 0), (3, 1), (1, 1)]
    text = WatchedText(drafts, np.array([False] * 4 + [True] * 3))
    counts = Counts()
    counts.add(text, 3)
    assert (counts.tokens, counts.rounds, counts.outside) == (6, 3, [3, 1])
    assert (counts.drafted_at, counts.accepted_at) == ([2, 2, 2], [2, 1, 0])
    figures = counts.figures()
    assert figures["tokens per round"] == 2
    assert figures["tokens per round, outside of loops"] == 3
    assert figures["acceptance by position"] == [1, 0.5, 0]


def test_rounds_with_shorter_drafts() -> None:
    text = WatchedText([(3, 2), (3, 3), (2, 1), (0, 0), (3, 1), (1, 1)], np.zeros(7, bool))
    counts = Counts()
    counts.add(text, 1)
    # Rounds after tokens 0, 2, 4.
    assert (counts.tokens, counts.rounds) == (6, 3)
    assert (counts.drafted_at, counts.accepted_at) == ([3], [3])


def test_a_text_without_rounds_has_no_figures() -> None:
    counts = Counts()
    counts.add(WatchedText([], np.zeros(1, bool)), 2)
    assert counts.figures()["tokens per round"] is None
    assert counts.figures()["acceptance by position"] == []


def test_break_even() -> None:
    seconds = {1: 2.0, 2: 3.0, 3: 3.5}
    assert break_even(seconds, 1) == 1.5
    assert break_even(seconds, 2, draft_seconds=0.5) == 2.0


def test_tables() -> None:
    rows: list[dict[str, object]] = [
        {"a": 1.234, "b": [0.5, 0.25]},
        {"a": spread([1.0, 2.0, 4.0]), "c": "x|y"},
        {"b": None},
    ]
    assert markdown(rows).splitlines() == [
        "| a | b | c |",
        "| --- | --- | --- |",
        "| 1.23 | 0.50 0.25 |  |",
        "| 2.00 (1.00-4.00) |  | x\\|y |",
        "|  |  |  |",
    ]
    assert markdown([]) == ""
