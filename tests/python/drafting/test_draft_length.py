"""Choosing the draft length by the tokens and time of past rounds, here simulated with known costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import llamatap as lt
from llamatap.drafting.draft_length import DraftLength

LONGEST = 8
#: The seconds of a round with a draft of this length.
Cost: TypeAlias = "Callable[[int], float]"
Shares: TypeAlias = "Sequence[float]"


def rates(shares: Shares, cost: Cost) -> NDArray[np.float64]:
    """Tokens per second of each length, by its definition: the target's token and those that stand before."""
    standing = np.cumprod([1.0, *shares])
    return np.array([standing[: length + 1].sum() / cost(length) for length in range(LONGEST + 1)])


def rounds(
    length: DraftLength,
    shares: Shares,
    cost: Cost,
    count: int,
    rng: np.random.Generator,
    noise: float = 0.0,
    n_sequences: int = 1,
) -> NDArray[np.int64]:
    """The lengths chosen in this many rounds; a part of the seconds is noise, which only ever adds."""
    chosen = []
    for _ in range(count):
        drafted = length.choose(n_sequences)
        chosen.append(drafted)
        accepted = 0
        while accepted < drafted and rng.random() < shares[accepted]:
            accepted += 1
        if drafted:
            length.observe(drafted, accepted)
        seconds = cost(drafted) * (1 + noise * abs(rng.standard_normal()))
        length.measure(drafted, seconds, n_sequences)
    return np.array(chosen)


#: Shares of drafts whose i-th token stands after the ones before it, and costs.
CLEAR: dict[str, tuple[Shares, Cost, int]] = {
    "drafts never pay": ([0.05] * 8, lambda length: 1 + 0.3 * length, 0),
    "drafts cost more than they give": ([0.3] * 8, lambda length: 1 + 0.5 * length, 0),
    "drafts are free": ([0.8] * 8, lambda length: 1.0, 8),
    "nearly all stand": ([0.95] * 8, lambda length: 1 + 0.03 * length, 8),
    "batches beyond four are slow": ([0.9] * 8, lambda length: 1.0 if length < 4 else 3.0, 3),
    "one token stands": ([0.95, *[0.02] * 7], lambda length: 1 + 0.2 * length, 1),
}
#: Cases in which several lengths are nearly as good.
FLAT: dict[str, tuple[Shares, Cost]] = {
    "a processor": ([0.6] * 8, lambda length: 1 + 0.12 * length),
    "less and less stands": ([0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05], lambda length: 1 + 0.1 * length),
    "a drafter with a price of its own": (
        [0.7] * 8,
        lambda length: 1.0 if length == 0 else 1.8 + 0.02 * length,
    ),
    "dearer and dearer": ([0.85] * 8, lambda length: 1 + 0.02 * length**2),
    "nothing stands after three": ([0.95] * 3 + [0.0] * 5, lambda length: 1 + 0.05 * length),
    "they just do not pay": ([0.3] * 8, lambda length: 1 + 0.35 * length),
}
#: The rest may be lost to trials of other lengths and to estimates.
WORTH = 0.93


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", CLEAR)
def test_the_best_length_is_chosen(case: str, seed: int) -> None:
    shares, cost, best = CLEAR[case]
    assert rates(shares, cost).argmax() == best
    chosen = rounds(DraftLength(LONGEST), shares, cost, 600, np.random.default_rng(seed))
    assert (chosen[200:] == best).mean() >= 0.9


@pytest.mark.sampled(9)
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("case", [*CLEAR, *FLAT])
def test_what_is_chosen_is_worth_nearly_as_much_as_the_best(case: str, noise: float) -> None:
    """This holds also where the first rounds were misleading, as they are for some seeds."""
    shares, cost = (CLEAR | FLAT)[case][:2]
    known = rates(shares, cost)
    for seed in range(8):
        chosen = rounds(DraftLength(LONGEST), shares, cost, 500, np.random.default_rng(seed), noise)[200:]
        assert known[chosen].mean() > WORTH * known.max(), f"seed {seed}: {np.bincount(chosen)}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("before", "after", "slope"),
    [(0.9, 0.1, 0.2), (0.1, 0.9, 0.2), (0.02, 0.95, 0.05), (0.8, 0.4, 0.1), (0.4, 0.8, 0.1)],
)
def test_it_follows_when_acceptance_changes(before: float, after: float, slope: float) -> None:
    def cost(length: int) -> float:
        return 1 + slope * length

    known = rates([after] * 8, cost)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        length = DraftLength(LONGEST)
        rounds(length, [before] * 8, cost, 300, rng)
        chosen = rounds(length, [after] * 8, cost, 300, rng)[150:]
        assert known[chosen].mean() > WORTH * known.max(), f"seed {seed}: {np.bincount(chosen)}"


def test_it_follows_when_drafts_become_dear() -> None:
    """Drafts become dear when something else takes the machine's time.

    Trials of unused lengths, as the budget allows, replace their old timings.
    """
    for seed in range(5):
        rng = np.random.default_rng(seed)
        length = DraftLength(LONGEST)
        rounds(length, [0.7] * 8, lambda n: 1 + 0.02 * n, 200, rng)
        chosen = rounds(length, [0.7] * 8, lambda n: 1 + 1.0 * n, 300, rng)[150:]
        assert (chosen == 0).mean() >= 0.9
        chosen = rounds(length, [0.7] * 8, lambda n: 1.0, 400, rng)[200:]
        known = rates([0.7] * 8, lambda n: 1.0)
        assert known[chosen].mean() > WORTH * known.max()


@pytest.mark.parametrize(("few", "many"), [(1, 8), (2, 3)])
def test_it_knows_what_rounds_of_as_many_sequences_take(few: int, many: int) -> None:
    """Eight sequences fill a pass, so drafts do not pay; once seven of them end, drafts pay at once."""

    def alone(n: int) -> float:
        return 1 + 0.02 * n

    def together(n: int) -> float:
        return 5 + 4.0 * n

    shares = [0.8] * 8
    known = rates(shares, alone)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        length = DraftLength(LONGEST)
        chosen = rounds(length, shares, together, 200, rng, n_sequences=many)
        assert (chosen[50:] == 0).mean() >= 0.9
        # Four rounds measure; in the seconds of `together` all would seem cheap.
        chosen = rounds(length, shares, alone, 60, rng, n_sequences=few)
        assert sorted(chosen[:4]) == [0, 1, 4, 8]
        assert known[chosen[4:]].mean() > WORTH * known.max()
        # Back again, without new measurements.
        chosen = rounds(length, shares, together, 60, rng, n_sequences=many)
        assert (chosen == 0).mean() >= 0.9


def test_estimates_are_shares_and_medians() -> None:
    length = DraftLength(3)
    for _ in range(2000):
        length.observe(3, 1)
        length.measure(3, 2.0)
        length.measure(0, 1.0)
    assert length.acceptance(1) == pytest.approx(1, abs=0.03)
    assert length.acceptance(2) == pytest.approx(0, abs=0.03)
    # The third token was never tried, as the second was never accepted.
    assert length.acceptance(3) == 0.5
    assert length.tokens(0) == 1
    assert length.tokens(2) == pytest.approx(2, abs=0.06)
    assert (length.seconds(0), length.seconds(3)) == (1.0, 2.0)
    assert length.seconds(1) == pytest.approx(4 / 3)
    # A single slow round changes nothing.
    length.measure(3, 500.0)
    assert length.seconds(3) == 2.0


def test_nothing_known_means_no_draft() -> None:
    length = DraftLength(5)
    assert length.best() == length.choose() == 0
    assert length.seconds(2) is None
    chosen = rounds(length, [0.9] * 5, lambda n: 1.0, 8, np.random.default_rng(0))
    assert set(chosen) == {0, 1, 2, 5}


#: What a drafted token costs, and what asking a drafter costs, in rounds without a draft: a GPU, two
#: processor cores with one sequence, and with eight, where a pass is full without drafts.
MACHINES = {"gpu": (0.03, 0.1), "cpu": (0.35, 0.1), "cpu, eight sequences": (0.95, 0.15)}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_hardly_slower_than_no_drafts(machine: str, share: float) -> None:
    """By at most 4 % over as many rounds as a first answer of 128 tokens has, in which all is unknown, and by
    at most 3 % over ten times as many."""
    slope, price = MACHINES[machine]

    def cost(length: int) -> float:
        return 1 + slope * length + price * (length > 0)

    for count, bound in ((128, 0.96), (1280, 0.97)):
        speeds = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            chosen = rounds(DraftLength(LONGEST), [share] * 8, cost, count, rng, noise=0.05)
            tokens = count + sum(standing(share, int(n)) for n in chosen)
            speeds.append(tokens / sum(cost(int(n)) for n in chosen))
        assert np.mean(speeds) > bound, (np.mean(speeds), np.bincount(chosen))
        assert np.min(speeds) > bound - 0.03


def standing(share: float, n: int) -> float:
    """Tokens of a draft of n that are expected to stand."""
    return float(np.cumprod([share] * n).sum())


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_short_longest_lengths(longest: int) -> None:
    length = DraftLength(longest)
    rng = np.random.default_rng(1)
    chosen = rounds(length, [0.9] * longest, lambda n: 1 + 0.01 * n, 300, rng)
    assert set(chosen) <= set(range(longest + 1))
    assert (chosen[100:] == longest).mean() >= 0.9


def test_odd_measurements_raise_nothing() -> None:
    length = DraftLength(4)
    for drafted, accepted, seconds in ((0, 0, 0.0), (9, 9, 0.0), (2, 0, 1e9), (4, 4, 1e-12), (1, 1, 0.0)):
        length.observe(drafted, accepted)
        length.measure(drafted, seconds)
        assert 0 <= length.choose() <= 4
    for position in range(1, 5):
        assert 0 < length.acceptance(position) < 1


@pytest.mark.parametrize("longest", [0, -1, 1.5, "8", None, True])
def test_wrong_longest_lengths_raise(longest: Any) -> None:
    with pytest.raises(lt.InvalidInputError):
        DraftLength(longest)


def test_whatever_is_measured() -> None:
    """Drafts that are shorter than asked for, rounds that are not measured, durations of 0."""
    rng = random.Random(0)
    for _ in range(200):
        length = DraftLength(rng.randint(1, 8))
        for _ in range(200):
            n_sequences = rng.choice((1, 1, 2, 3))
            chosen = length.choose(n_sequences)
            assert 0 <= chosen <= length.longest
            drafted = rng.randint(0, chosen) if rng.random() < 0.5 else chosen
            if drafted:
                length.observe(drafted, rng.randint(0, drafted))
            if rng.random() < 0.8:
                length.measure(
                    drafted, rng.choice((0.0, rng.random())), n_sequences + rng.choice((0, 0, 0, 1))
                )
