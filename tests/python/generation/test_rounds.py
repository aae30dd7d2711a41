"""Rounds, drafts and acceptance, token by token, of rigged models whose every token is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from support.generation import EXACT, Noting, is_empty
from support.tiny_models import rigged
from support.tiny_models.rigged import Draft, Simulation, Table, by_state, by_token, cycle, simulate, wrong_at

import llamatap as lt

F = cycle()
#: A text that ends in 12 goes on 13, 14, 15, ...
#: Wrong after 15, 18, 21, ...: of a draft of three or more, the first two stand.
TWO_STAND = wrong_at(F, range(15, 64, 3))
NONE_STAND = wrong_at(F, range(64))
NOW_AND_THEN = wrong_at(F, [15, 16, 23, 31, 32, 33, 40, 50, 3, 7])
TABLES = {"all": F, "none": NONE_STAND, "two": TWO_STAND, "now and then": NOW_AND_THEN}

PROMPTS = [[1, 9, 30, 11, 12], [1, 14, 15], [1, *range(20, 40)], [1, 5, 6, 7, 8, 9, 10, 41], [1, 11, 12]]
MAX_TOKENS = 23

#: Given a context, a folder, the drafter's table and its n_max: a drafter and what it drafts.
Made: TypeAlias = "tuple[Any, Draft]"
Maker: TypeAlias = "Callable[[lt.Context, Path, Table, int], Made]"


def beside(context: lt.Context, path: Path, *, as_model: bool = False) -> lt.SpeculativeContext:
    return lt.SpeculativeContext(context, path, n_threads=1, as_model=as_model)


def model(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    path = rigged.write_rigged_model(folder / "drafter.gguf", table, n_layer=1)
    drafter = lt.ModelDrafter(context, beside(context, path, as_model=True), n_max=n_max)
    return drafter, by_token(table)


def eagle3_by_state(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    path = rigged.write_rigged_eagle3(folder / "drafter.gguf", F, table)
    return lt.Eagle3Drafter(beside(context, path), n_max=n_max), by_state(F, table)


def eagle3_by_token(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    path = rigged.write_rigged_eagle3(folder / "drafter.gguf", F, table, half="token")
    return lt.Eagle3Drafter(beside(context, path), n_max=n_max), by_token(table)


def mtp_by_state(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    path = rigged.write_rigged_mtp(folder / "drafter.gguf", F, [table], half="state", trunk=False)
    return lt.MtpDrafter(beside(context, path), n_max=n_max), by_state(F, table)


def mtp_by_token(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    path = rigged.write_rigged_mtp(folder / "drafter.gguf", F, [table], trunk=False)
    return lt.MtpDrafter(beside(context, path), n_max=n_max), by_token(table)


def chained_mtp(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    """Three heads: the second is always right, the others follow the table. More than three it cannot."""
    tables = [table, F, table]
    path = rigged.write_rigged_mtp(folder / "drafter.gguf", F, tables, trunk=False)
    return lt.MtpDrafter(beside(context, path), n_max=n_max), by_token(*tables)


def ngrams(longest: int, shortest: int) -> Draft:
    """Oracle of NGramDrafter: the continuation of the latest earlier longest n-gram, repeated as needed."""

    def draft(text: Sequence[int], n_max: int) -> list[int]:
        for n in range(longest, shortest - 1, -1):
            for end in range(len(text) - 1, n - 1, -1):
                if list(text[end - n : end]) == list(text[-n:]):
                    return (list(text[end:]) * n_max)[:n_max]
        return []

    return draft


def ngram(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    return lt.NGramDrafter(3, 1, n_max=n_max), ngrams(3, 1)


def function(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    follow = by_token(table)
    return lt.CallableDrafter(lambda tokens: follow(tokens.tolist(), 9), n_max=n_max), follow


def subclass(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    follow = by_token(table)

    class Follower(Noting):
        def guess(self, text: list[int], most: int) -> list[int]:
            return follow(text, min(n_max, most))

    return Follower(), follow


def chain(context: lt.Context, folder: Path, table: Table, n_max: int) -> Made:
    """N-grams first; the model drafts where they find none."""
    first = ngrams(2, 2)
    drafter, second = model(context, folder, table, n_max)
    return [lt.NGramDrafter(2, 2, n_max=n_max), drafter], lambda text, n: first(text, n) or second(text, n)


MAKERS = (
    model,
    eagle3_by_state,
    eagle3_by_token,
    mtp_by_state,
    mtp_by_token,
    chained_mtp,
    ngram,
    function,
    subclass,
    chain,
)


def check(found: lt.Generation, expected: Simulation) -> None:
    assert found.tokens.tolist() == expected.tokens
    stats, rounds = found.stats, expected.rounds
    assert stats.tokens == len(expected.tokens)
    assert (stats.rounds, stats.drafted, stats.accepted) == (
        len(rounds),
        expected.n_drafted,
        expected.n_accepted,
    )
    longest = max((len(round.drafted) for round in rounds), default=0)
    tried = [sum(len(round.drafted) > i for round in rounds) for i in range(longest)]
    stood = [sum(round.n_accepted > i for round in rounds) for i in range(longest)]
    assert (stats.drafted_at, stats.accepted_at) == (tried, stood)
    assert stats.acceptance_by_position == [a / b for a, b in zip(stood, tried, strict=True)]
    assert stats.tokens_per_round == pytest.approx(1 + expected.n_accepted / len(rounds))
    if expected.n_drafted:
        assert stats.acceptance == expected.n_accepted / expected.n_drafted


@pytest.mark.sampled(16)
@pytest.mark.parametrize("n_max", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_rounds_are_those_of_the_simulation(
    make: Maker, name: str, n_max: int, rigged_model: lt.Model, tmp_path: Path
) -> None:
    """Five prompts on three sequences: each has the rounds that it would have alone."""
    with rigged_model.context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        drafter, draft = make(context, tmp_path, TABLES[name], n_max)
        for _ in range(2):
            found = list(lt.generate(context, PROMPTS, drafter, max_tokens=MAX_TOKENS, ignore_eos=True))
            for prompt, one in zip(PROMPTS, found, strict=True):
                check(one, simulate(F, draft, prompt, n_max, MAX_TOKENS))
            assert is_empty(context)


@pytest.mark.parametrize(("name", "per_round"), [("all", 5.0), ("none", 1.0), ("two", 3.0)])
def test_the_tables_are_what_they_are_called(
    name: str, per_round: float, rigged_model: lt.Model, tmp_path: Path
) -> None:
    """31 = 1 + 30 tokens: six rounds of five, thirty of one, ten of three."""
    with rigged_model.context(n_ctx=256, **EXACT) as context:
        drafter, _ = model(context, tmp_path, TABLES[name], 4)
        (found,) = lt.generate(context, [1, 11, 12], drafter, max_tokens=31)
    stats = found.stats
    assert stats.tokens_per_round == per_round
    stands = {"all": [1, 1, 1, 1], "none": [0, 0, 0, 0], "two": [1, 1, 0, 0]}[name]
    assert stats.acceptance_by_position == stands


def test_ngrams_of_a_text_that_goes_round(tmp_path: Path) -> None:
    """Ten tokens over and over: drafts are right once the text or its prompt has repeated."""
    table = cycle()
    table[22] = 13
    path = rigged.write_rigged_model(tmp_path / "round.gguf", table)
    prompts = [[1, 13], [1, *range(13, 23), 13], [1, 30, 14, 31, 13, 14], [1, 15, 17, 15, 18, 14]]
    accepted = []
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        for longest, shortest in ((1, 1), (2, 1), (4, 2), (3, 3)):
            for n_max in (1, 3, 8):
                drafter = lt.NGramDrafter(longest, shortest, n_max=n_max)
                found = list(lt.generate(context, prompts, drafter, max_tokens=40))
                for prompt, one in zip(prompts, found, strict=True):
                    check(one, simulate(table, ngrams(longest, shortest), prompt, n_max, 40))
                    accepted.append(one.stats.accepted)
    assert max(accepted) > 30


@pytest.mark.parametrize("make", [model, eagle3_by_state, mtp_by_token, chained_mtp, function, chain])
def test_one_sequence_ends_and_the_others_go_on(make: Maker, tmp_path: Path) -> None:
    """After 33 comes </s>, at which the first prompt arrives soon, the second later, the third never."""
    table = cycle()
    table[33] = 2
    table[50] = 40
    path = rigged.write_rigged_model(tmp_path / "ends.gguf", table)
    prompts = [[1, 30], [1, 9, 8, 20], [1, 35], [1, 29], [1, 33]]
    drafts = wrong_at(F, range(14, 64, 3))
    n_max, max_tokens = 3, 40
    with lt.Model(path) as ends, ends.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        drafter, draft = make(context, tmp_path, drafts, n_max)
        if make is eagle3_by_state:
            draft = by_state(F, drafts)
        found = list(lt.generate(context, prompts, drafter, max_tokens=max_tokens))
        assert is_empty(context)
    for prompt, one in zip(prompts, found, strict=True):
        whole = simulate(table, draft, prompt, n_max, max_tokens)
        rounds = []
        for round in whole.rounds if whole.first != 2 else ():
            # No drafter here drafts </s>, so it is always the target's own token, the last of a round.
            rounds.append(round)
            if 2 in round.emitted:
                assert round.emitted.index(2) == len(round.emitted) - 1
                break
        if rounds:
            check(one, Simulation(whole.first, tuple(rounds)))
        else:
            assert one.tokens.tolist() == [2]
            assert one.stats.rounds == 0
            assert np.isnan(one.stats.tokens_per_round)
    assert [one.finish_reason for one in found] == ["stop", "stop", "length", "stop", "stop"]
    assert [len(one.tokens) for one in found] == [4, 14, 40, 5, 1]


def test_a_draft_leaves_room_for_the_target(rigged_model: lt.Model, tmp_path: Path) -> None:
    """A text is never longer than asked for, and the last rounds draft no more than can be used."""
    with rigged_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        drafter, draft = model(context, tmp_path, F, 5)
        for max_tokens in range(1, 16):
            found = list(lt.generate(context, PROMPTS[:2], drafter, max_tokens=max_tokens))
            for prompt, one in zip(PROMPTS, found, strict=False):
                expected = simulate(F, draft, prompt, 5, max_tokens)
                assert one.tokens.tolist() == expected.tokens
                assert one.stats.rounds == len(expected.rounds)
                assert one.stats.drafted == one.stats.accepted == expected.n_drafted


def test_every_length_of_acceptance(rigged_model: lt.Model) -> None:
    """Drafts of 0 to 8 tokens of which the first 0 to 8 are accepted, each in its own round."""
    plan = [(length, right) for length in range(9) for right in range(length + 1)]

    class Planned(Noting):
        def __init__(self) -> None:
            super().__init__()
            self.left = list(plan)

        def guess(self, text: list[int], most: int) -> list[int]:
            length, right = self.left.pop(0) if self.left else (0, 0)
            tokens = by_token(F)(text, length)
            if right < length:
                tokens[right] = NONE_STAND[tokens[right - 1] if right else text[-1]]
            return tokens

    n_tokens = 1 + sum(right + 1 for _, right in plan)
    with rigged_model.context(n_ctx=512, **EXACT) as context:
        drafter = Planned()
        (found,) = lt.generate(context, [1, 12], drafter, max_tokens=n_tokens + 10)
    assert found.tokens.tolist() == simulate(F, by_token(F), [1, 12], 0, n_tokens + 10).tokens
    assert drafter.left == []
    stats = found.stats
    assert stats.rounds == len(plan) + 10
    assert stats.drafted_at == [sum(length > i for length, _ in plan) for i in range(8)]
    assert stats.accepted_at == [sum(right > i for _, right in plan) for i in range(8)]
    assert [counts[0] for counts in drafter.batches[1:]] == [1 + length for length, _ in plan] + [1] * 10
