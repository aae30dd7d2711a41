"""Tokens drawn with and without drafts follow the target's distribution: chi-square tests.

Rigged models of a low margin: after token t, F[t] has a logit of 3 and every other token of 0. So the
distance from F[t] to what is drawn has one distribution, whatever the text. Drafters prefer other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drawing import CONTEXT, LIKELY, MARGIN, PROMPTS, RARE, Array, Drawing, F, G, N, drawn, p_value
from support.generation import EXACT, is_empty, nearly
from support.tiny import TinyLlama, TinyQwen35
from support.tiny_models import rigged
from support.tiny_models.block_drafters import write_rigged_dspark

import llamatap as lt


def target_distribution(temperature: float = 1.0, top_k: int = 0) -> Array:
    """The target's distribution over the distance from F[t]."""
    weights = np.ones(N)
    weights[0] = math.exp(MARGIN / temperature)
    if top_k == 1:
        weights[1:] = 0
    result: Array = weights / weights.sum()
    return result


def distances(found: Iterable[lt.Generation]) -> list[list[int]]:
    """Distance of each token from the table's prediction after the token before it, for each text."""
    result = []
    for one in found:
        text = [int(one.prompt[-1]), *one.tokens.tolist()]
        result.append([(token - F[before]) % N for before, token in pairwise(text)])
    return result


def counted(values: Iterable[int]) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.bincount(np.fromiter(values, np.int64), minlength=N)
    return counts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    path = rigged.write_rigged_model(tmp_path_factory.mktemp("p") / "target.gguf", F, margin=MARGIN)
    with lt.Model(path) as model:
        yield model


@pytest.fixture(scope="module")
def context(target: lt.Model) -> Iterator[lt.Context]:
    with target.context(**CONTEXT) as context:
        yield context


def beside(context: lt.Context, path: Path, **options: Any) -> lt.SpeculativeContext:
    return lt.SpeculativeContext(context, path, n_threads=1, **options)


def own(context: lt.Context, folder: Path) -> lt.Drafter:
    return Drawing(3)


def model(context: lt.Context, folder: Path) -> lt.Drafter:
    path = rigged.write_rigged_model(folder / "drafter.gguf", G, n_layer=1, margin=MARGIN)
    return lt.ModelDrafter(context, beside(context, path, as_model=True), n_max=3, temperature=1, seed=4)


def eagle3(context: lt.Context, folder: Path) -> lt.Drafter:
    """An EAGLE-3 drafter whose head knows every other token."""
    path = rigged.write_rigged_eagle3(
        folder / "drafter.gguf", F, G, half="token", draft_vocab=range(0, N, 2), margin=MARGIN
    )
    return lt.Eagle3Drafter(beside(context, path), n_max=3, temperature=1.5, seed=4)


def mtp(context: lt.Context, folder: Path) -> lt.Drafter:
    path = rigged.write_rigged_mtp(folder / "drafter.gguf", F, [G, F, G], trunk=False, margin=MARGIN)
    return lt.MtpDrafter(beside(context, path), n_max=3, temperature=0.8, seed=4)


def dspark(context: lt.Context, folder: Path) -> lt.Drafter:
    """Draws each token of a block by itself, after the likeliest one before it."""
    path = write_rigged_dspark(folder / "drafter.gguf", G, margin=MARGIN)
    return lt.DFlashDrafter(beside(context, path, kv_unified=True), n_max=3, temperature=1, seed=4)


def rigged_qwen35(path: Path) -> Path:
    """A qwen35 file with the target's distribution: its blocks add nothing, but they have recurrent state."""
    model = TinyQwen35(n_vocab=N)
    for name, values in model.weights.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            values[:] = 0
        elif name.endswith("norm.weight"):
            values[:] = 1
    model.weights["token_embd.weight"][:] = np.eye(N) * rigged.SIZE
    model.weights["output.weight"][:] = 0
    model.weights["output.weight"][F, np.arange(N)] = MARGIN / rigged.SIZE
    return model.write(path, tokenizer=False)


KINDS = (own, model, eagle3, mtp, dspark)
OPTIONS: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


def test_the_statistic_tells_the_target_from_the_drafter() -> None:
    """The test fails for a drafter whose drafts are all accepted, even with half the tokens."""
    rng = np.random.default_rng(0)
    assert p_value(counted(drawn(target_distribution(), rng, 4000)), target_distribution()) > 0.001
    drafted = np.full(N, RARE)
    drafted[7] = LIKELY
    assert p_value(counted(drawn(drafted, rng, 2000)), target_distribution()) < 1e-50
    slightly = target_distribution(1.15)
    assert p_value(counted(drawn(slightly, rng, 4000)), target_distribution()) < 1e-4


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "rejection"),
    [*((kind, True) for kind in KINDS), (own, False), (model, False)],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_texts_follow_the_target(
    kind: Callable[..., lt.Drafter], rejection: bool, context: lt.Context, tmp_path: Path
) -> None:
    drafter = kind(context, tmp_path)
    found = list(
        lt.generate(context, PROMPTS, drafter, max_tokens=200, seed=6, rejection=rejection, **OPTIONS)
    )
    assert is_empty(context)
    rows = np.array(distances(found))
    assert rows.shape == (20, 200)
    assert p_value(counted(rows.ravel()), target_distribution()) > 0.001
    # Tokens that follow each other are as independent as the target makes them.
    after_likely = rows[:, 1:][rows[:, :-1] == 0]
    assert p_value(counted(after_likely), target_distribution()) > 0.001
    drafted = sum(one.stats.drafted for one in found)
    accepted = sum(one.stats.accepted for one in found)
    assert accepted > (0.2 if rejection else 0.002) * drafted
    if not rejection:
        plain = lt.generate(context, PROMPTS, max_tokens=200, seed=6, **OPTIONS)
        assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in plain]


@pytest.mark.slow
@pytest.mark.parametrize("n_rs_seq", [3, 0], ids=["taken back", "saved"])
def test_texts_of_a_target_with_a_state_follow_it(n_rs_seq: int, tmp_path: Path) -> None:
    with (
        lt.Model(rigged_qwen35(tmp_path / "target.gguf")) as target,
        target.context(**{**CONTEXT, "n_rs_seq": n_rs_seq}) as context,
    ):
        found = list(
            lt.generate(context, PROMPTS, Drawing(3), max_tokens=120, seed=6, rejection=True, **OPTIONS)
        )
        assert is_empty(context)
    rows = np.array(distances(found))
    assert p_value(counted(rows.ravel()), target_distribution()) > 0.001
    drafted = sum(one.stats.drafted for one in found)
    assert 0.2 * drafted < sum(one.stats.accepted for one in found) < 0.8 * drafted


def test_a_drafter_that_lies_changes_the_distribution(context: lt.Context) -> None:
    """The rejection rule is at work: a drafter that lies about its distribution changes the result."""
    drafter = Drawing(1, tells="that all are alike")
    found = lt.generate(context, PROMPTS, drafter, max_tokens=200, seed=6, rejection=True, **OPTIONS)
    counts = counted(distance for row in distances(found) for distance in row)
    assert p_value(counts, target_distribution()) < 1e-50


def test_as_much_is_accepted_as_the_rule_says(context: lt.Context) -> None:
    """The acceptance is sum(min(p, q)) with the rule, and sum(p q) where both sides draw."""
    p = target_distribution()
    q = np.full(N, RARE)
    q[7] = LIKELY
    for rejection, share in ((True, np.minimum(p, q).sum()), (False, (p * q).sum())):
        drafter = Drawing(1)
        found = list(
            lt.generate(context, PROMPTS, drafter, max_tokens=120, seed=2, rejection=rejection, **OPTIONS)
        )
        drafted = sum(one.stats.drafted for one in found)
        accepted = sum(one.stats.accepted for one in found)
        assert drafted > 1000
        assert abs(accepted / drafted - share) < 4 * math.sqrt(share * (1 - share) / drafted)


def test_a_draft_from_the_target_itself_is_always_accepted(
    context: lt.Context, target: lt.Model, tmp_path: Path
) -> None:
    path = rigged.write_rigged_model(tmp_path / "same.gguf", F, margin=MARGIN)
    spec = beside(context, path, as_model=True)
    drafter = lt.ModelDrafter(context, spec, n_max=3, temperature=0.7)
    options = {**OPTIONS, "temperature": 0.7}
    (found,) = lt.generate(context, [1, 9], drafter, max_tokens=401, rejection=True, seed=3, **options)
    assert found.stats.acceptance > 0.99  # but for the last bits of q and p
    (other,) = lt.generate(context, [1, 9], drafter, max_tokens=401, rejection=False, seed=3, **options)
    assert other.stats.acceptance < 0.9


def test_samplers_cut_the_distribution(context: lt.Context, tmp_path: Path) -> None:
    """A token that the target's sampler rules out never comes, however likely a drafter finds it."""
    drafter = model(context, tmp_path)
    options = {**OPTIONS, "temperature": 1.4}
    found = lt.generate(context, PROMPTS, drafter, max_tokens=200, rejection=True, seed=8, **options)
    counts = counted(distance for row in distances(found) for distance in row)
    assert p_value(counts, target_distribution(1.4)) > 0.001
    only = lt.generate(context, PROMPTS, drafter, max_tokens=10, rejection=True, top_k=1, **OPTIONS)
    assert {distance for row in distances(only) for distance in row} == {0}


@pytest.mark.parametrize("penalty", [{}, {"repeat_penalty": 1.4, "frequency_penalty": 0.2}], ids=str)
def test_without_a_temperature_the_tokens_are_the_most_likely(
    penalty: dict[str, float], tmp_path: Path
) -> None:
    """The same text with the rule as without, penalties inside of a draft included."""
    tiny = TinyLlama()
    path = tiny.write(tmp_path / "target.gguf")
    with lt.Model(path) as target, target.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        spec = beside(context, nearly(tiny, tmp_path / "near.gguf"), as_model=True)
        drafter = lt.ModelDrafter(context, spec, temperature=0.3)
        prompts = [[5, 6, 7, 8], [200, 30, 9] * 9]
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **penalty}
        plain = [one.tokens.tolist() for one in lt.generate(context, prompts, **options)]
        found = list(lt.generate(context, prompts, drafter, rejection=True, **options))
    assert [one.tokens.tolist() for one in found] == plain
    assert sum(one.stats.accepted for one in found) > 0


# A text is one draw of many. With other seeds, and after other tokens, each token must be a new one.


@pytest.mark.slow
def test_a_token_does_not_depend_on_how_the_one_before_was_drawn(context: lt.Context) -> None:
    """The first token comes from the prompt's pass, the second from the rejection rule.

    With one random number for both, the first token would tell whether a draft is accepted.
    """
    found = lt.generate(context, [[1, 9]] * 3000, Drawing(1), max_tokens=3, seed=1, rejection=True, **OPTIONS)
    pairs = np.array([one.tokens[:2] for one in found])
    favoured = pairs[:, 1] == np.array(G)[pairs[:, 0]]
    for low in range(0, N, 4):
        chosen = (pairs[:, 0] >= low) & (pairs[:, 0] < low + 4)
        count = int(chosen.sum())
        assert count > 90
        share = float(favoured[chosen].mean())
        assert abs(share - RARE) < 5 * math.sqrt(RARE / count), f"after tokens {low}..{low + 3}: {share}"


def test_every_seed_of_a_generation_has_drafts_of_its_own(context: lt.Context, tmp_path: Path) -> None:
    """Two thousand texts after one prompt: what comes second in them, all with one drafter."""
    drafter = model(context, tmp_path)
    found = list(
        lt.generate(context, [[1, 9]] * 2000, drafter, max_tokens=3, seed=1, rejection=True, **OPTIONS)
    )
    rows = np.array([row[:2] for row in distances(found)])
    for place in (0, 1):
        assert p_value(counted(rows[:, place]), target_distribution()) > 0.001, f"token {place}"


def test_tokens_that_a_drafter_finds_unlikely_come_as_often(context: lt.Context, tmp_path: Path) -> None:
    """A draft ends before them (p_min), so that what is drafted is drawn from the likely ones alone."""
    path = rigged.write_rigged_model(tmp_path / "drafter.gguf", G, n_layer=1, margin=MARGIN)
    spec = beside(context, path, as_model=True)
    drafter = lt.ModelDrafter(context, spec, n_max=2, temperature=1, p_min=0.1)
    found = list(lt.generate(context, PROMPTS, drafter, max_tokens=200, seed=6, rejection=True, **OPTIONS))
    assert sum(one.stats.drafted for one in found) > 500
    counts = counted(distance for row in distances(found) for distance in row)
    assert p_value(counts, target_distribution()) > 0.001


@pytest.mark.slow
def test_ends_that_make_drafts_too_short_come_as_often(tmp_path: Path) -> None:
    """A draft ends with </s>, and one of a single token is given up (n_min). The drafter is the target."""
    path = rigged.write_rigged_model(tmp_path / "ends.gguf", [2] * N, margin=MARGIN)
    with (
        lt.Model(path) as model,
        model.context(n_ctx=20 * 256, n_seq_max=20, kv_unified=False, **EXACT) as context,
    ):
        spec = beside(context, path, as_model=True)
        drafter = lt.ModelDrafter(context, spec, n_max=2, n_min=2, temperature=1)
        found = list(
            lt.generate(context, PROMPTS, drafter, max_tokens=200, seed=6, rejection=True, **OPTIONS)
        )
    assert sum(one.stats.drafted for one in found) > 500
    ends = np.concatenate([one.tokens for one in found]) == 2
    assert abs(ends.mean() - LIKELY) < 4 * math.sqrt(LIKELY * (1 - LIKELY) / ends.size)


@pytest.mark.parametrize(
    "row",
    [np.full(N, 2.0), np.full(N, np.nan), np.where(np.arange(N) == 3, -0.5, 1.5 / (N - 1)), np.zeros(N)],
    ids=["too much", "no numbers", "negative", "nothing"],
)
def test_distributions_that_are_none_are_refused(row: NDArray[np.float64], context: lt.Context) -> None:
    class Wrong(lt.Drafter):
        draws = True

        def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
            rows = row.astype(np.float32)[None]
            return {seq: lt.Draft(np.array([5], np.int32), None, rows) for seq in requests}

    with pytest.raises(lt.InvalidInputError, match="distribution"):
        list(lt.generate(context, PROMPTS, Wrong(), max_tokens=20, rejection=True, **OPTIONS))
    assert is_empty(context)
