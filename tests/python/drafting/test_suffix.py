"""The suffix drafter: against a search through all texts, its memory, sessions and requests that share it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llamatap as lt

#: No limit but n_max.
LONG: dict[str, Any] = {"max_spec_factor": 1e6, "p_min": 0.0}


@dataclass
class Searched:
    """Oracle: all texts, searched from their ends for each draft."""

    #: Texts, and how many of their tokens were in another one already.
    texts: list[tuple[list[int], int]] = field(default_factory=list)
    #: When each token of each text was added.
    times: list[list[int]] = field(default_factory=list)
    now: int = 0

    def new(self, shared: Sequence[int] = ()) -> int:
        self.texts.append((list(shared), len(shared)))
        self.times.append([0] * len(shared))
        return len(self.texts) - 1

    def add(self, number: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.now += 1
            self.texts[number][0].append(token)
            self.times[number].append(self.now)

    def next(self, context: Sequence[int]) -> tuple[int, int, float]:
        """(length of the longest match, its most frequent continuation, that one's share)."""
        longest = 0
        found: dict[int, list[int]] = {}
        for (text, n_shared), times in zip(self.texts, self.times, strict=True):
            for end in range(max(1, n_shared), len(text)):
                n = 0
                while n < min(end, len(context)) and text[end - 1 - n] == context[-1 - n]:
                    n += 1
                if n > longest:
                    longest, found = n, {}
                if n == longest > 0:
                    found.setdefault(text[end], []).append(times[end])
        if not found:
            return 0, -1, 0.0
        best = max(found, key=lambda token: (len(found[token]), max(found[token])))
        return longest, best, len(found[best]) / sum(map(len, found.values()))

    def draft(self, context: Sequence[int], n_max: int, factor: float, p_min: float) -> list[int]:
        drafted: list[int] = []
        match, prob = 0, 1.0
        while len(drafted) < n_max:
            length, token, share = self.next([*context, *drafted])
            if length == 0 or 2 * length < match:
                break
            if not drafted:
                match = length
                n_max = min(n_max, int(factor * match))
            prob *= share
            if prob < p_min or n_max == 0:
                break
            drafted.append(token)
        return drafted


def request(position: int, last_token: int, n_max: int = 100) -> lt.DraftRequest:
    return lt.DraftRequest(last_token, position, n_max)


def tokens_of(drafts: dict[int, lt.Draft], seq: int = 0) -> list[int]:
    return drafts[seq].tokens.tolist() if seq in drafts else []


def after(drafter: lt.Drafter, text: Sequence[int]) -> list[int]:
    """The draft for a new text."""
    drafter.reset(0)
    if len(text) > 1:
        drafter.process(lt.Batch.of(text[:-1]))
    return tokens_of(drafter.draft({0: request(len(text) - 1, text[-1])}))  # type: ignore[arg-type]


@pytest.mark.fuzz
@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_drafts_are_those_of_a_search_through_all_texts(data: st.DataObject) -> None:
    """Three sequences that begin, grow, have drafts rejected, are taken back further, and end."""
    draw = data.draw
    n_tokens = draw(st.integers(1, 4))
    n_max = draw(st.integers(1, 8))
    factor = draw(st.sampled_from([0.5, 1.0, 1.5, 100.0]))
    p_min = draw(st.sampled_from([0.0, 0.3, 0.6]))
    drafter = lt.SuffixDrafter(n_max=n_max, max_spec_factor=factor, p_min=p_min, max_bytes=2**20)
    tokens = st.lists(st.integers(0, n_tokens - 1), min_size=1, max_size=8)
    searched = Searched()
    numbers: dict[int, int] = {}
    for _ in range(draw(st.integers(1, 12))):
        seq = draw(st.integers(0, 2))
        if seq in numbers and draw(st.integers(0, 5)) == 0:
            drafter.reset(seq)
            del numbers[seq]
        added = draw(tokens)
        if seq not in numbers:
            numbers[seq] = searched.new()
            drafter.process(lt.Batch.of(added, seq=seq))
            searched.add(numbers[seq], added)
            # Certain once a draft is requested.
            drafter.draft({seq: request(len(added), 0)})
        else:
            text = searched.texts[numbers[seq]][0]
            start = len(text)
            if draw(st.integers(0, 4)) == 0:
                start = draw(st.integers(1, len(text)))
                if start < len(text):
                    numbers[seq] = searched.new(text[:start])
            drafter.process(lt.Batch.of(added, pos0=start, seq=seq))
            n = draw(st.integers(0, len(added) - 1))
            drafter.accept(seq, n)
            searched.add(numbers[seq], added[: n + 1])
        for one, number in numbers.items():
            text = searched.texts[number][0]
            last = draw(st.integers(0, n_tokens - 1))
            found = tokens_of(drafter.draft({one: request(len(text), last)}), one)
            assert found == searched.draft([*text, last], n_max, factor, p_min)


def test_what_followed_the_longest_suffix_in_any_text_is_drafted() -> None:
    drafter = lt.SuffixDrafter(**LONG)
    assert after(drafter, [5, 6, 7, 8, 9, 10]) == []
    assert after(drafter, [1, 6, 7]) == [8, 9]
    assert after(drafter, [7]) == []
    # The own text counts too, and a longer match before a more frequent one.
    assert after(drafter, [3, 7, 4, 2, 3, 7])[:2] == [4, 2]
    # Most frequent, else the latest.
    for text in ([20, 21, 0], [20, 22, 0], [20, 21, 0], [20, 22, 0]):
        after(drafter, text)
    assert after(drafter, [11, 20])[:1] == [22]


def test_drafts_carry_the_frequencies() -> None:
    drafter = lt.SuffixDrafter(**LONG)
    for text in ([20, 21, 22, 0], [20, 21, 23, 0], [20, 21, 22, 0], [20, 25, 0]):
        after(drafter, text)
    drafter.reset(0)
    drafter.process(lt.Batch.of([9]))
    draft = drafter.draft({0: request(1, 20)})[0]
    assert draft.tokens.tolist() == [21, 22]
    assert draft.probs is not None
    np.testing.assert_allclose(draft.probs, [3 / 4, 2 / 3])
    assert draft.distributions is None


def test_a_second_generation_knows_the_first_ones_text(cycle_context: lt.Context) -> None:
    drafter = lt.SuffixDrafter()
    options: Any = {"max_tokens": 40, "ignore_eos": True}
    (plain,) = lt.generate(cycle_context, "abc", **options)
    (first,) = lt.generate(cycle_context, "abc", drafter, **options)
    (second,) = lt.generate(cycle_context, "abc", drafter, **options)
    assert first.text == second.text == plain.text
    assert second.stats.rounds < first.stats.rounds
    assert second.stats.accepted > first.stats.accepted


@pytest.fixture
def cycle_context(tiny_model: lt.Model) -> Any:
    with tiny_model.context(n_ctx=256, n_seq_max=2, n_threads=1) as context:
        yield context


def test_two_sessions_cannot_share_a_drafter_at_once(tiny_model: lt.Model) -> None:
    drafter = lt.SuffixDrafter()
    with tiny_model.context(n_ctx=64) as one, tiny_model.context(n_ctx=64) as another:
        with lt.Session(one, drafter), pytest.raises(lt.BusyError, match="give each generation its own"):
            lt.Session(another, drafter)
        # One after the other they can.
        with lt.Session(another, drafter) as session:
            session.add([5, 6, 7, 5, 6], max_tokens=4)
            while session.pending:
                session.step()


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 1000},
        {"max_bytes": 2**40},
        {"max_bytes": 1e6},
        {"n_max": 0},
        {"n_max": "all"},
        {"n_min": 65},
        {"p_min": 1.5},
        {"p_min": float("nan")},
        {"max_spec_factor": 0},
        {"max_spec_factor": float("inf")},
    ],
    ids=str,
)
def test_wrong_options_raise(options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.SuffixDrafter(**options)


_FILLS = """
import sys
from pathlib import Path
import numpy as np
import llamatap as lt

def rss():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024

kind, max_bytes = sys.argv[1], 8 * 2**20
drafter = lt.SuffixDrafter(max_bytes=max_bytes)
rng = np.random.default_rng(0)
most = before = 0
for number in range(1020):
    text = np.full(1000, 7) if kind == "one token" else rng.integers(0, 49152, 1000)
    drafter.process(lt.Batch.of(text))
    drafter.reset(0)
    if number == 20:
        before = rss()
    most = max(most, rss())
print(most - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["one token", "random"])
def test_a_million_tokens_stay_within_the_bytes(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FILLS, kind], capture_output=True, text=True, check=True)
    # Beside the cache: the allocator's own.
    assert int(done.stdout) < 8 * 2**20 + 2**20
