"""``logit_bias``: added to the logits before all else, whatever then chooses, with drafts and without."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drawing import CONTEXT, PROMPTS, F, N, p_value
from support.drawing import Drawing as Drafts
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, log_softmax, ragged, seed_of
from support.tiny_models import rigged

import llamatap as lt

BIAS = {7: 1.5, 100: -2.0, 30: 0.25, 258: 3.0, 9: -math.inf, 8: 0.0}
SEED = 11


def biased(logits: NDArray[np.float32], bias: dict[int, float]) -> NDArray[np.float32]:
    found = logits.copy()
    for token, value in bias.items():
        found[token] += np.float32(value)
    return found


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_sampler_chooses_as_from_biased_logits(
    sampling: str, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """Penalties see biased logits: they divide those above 0 and multiply others."""
    options: dict[str, Any] = {"seed": SEED, **SAMPLING[sampling]}
    one = lt.Sampler(tiny_model, logit_bias=BIAS, **options)
    other = lt.Sampler(tiny_model, **options)
    plain = lt.Sampler(tiny_model, **options)
    differ = 0
    for _ in range(200):
        logits = rng.standard_normal(tiny_model.n_vocab).astype(np.float32)
        token = one.sample_logits(logits)
        assert token == other.sample_logits(biased(logits, BIAS))
        if sampling == "greedy":
            assert token == biased(logits, BIAS).argmax()
        differ += token != plain.sample_logits(logits)
    assert differ > 20


def test_an_order_is_kept(tiny_model: lt.Model) -> None:
    """Bias, then top-k: a token that the bias lifts is among the k."""
    logits = np.zeros(tiny_model.n_vocab, np.float32)
    logits[[5, 6]] = 10
    sampler = lt.Sampler(tiny_model, temperature=1.0, top_k=1, logit_bias={50: 20}, seed=1)
    assert {sampler.sample_logits(logits) for _ in range(20)} == {50}


def test_what_is_ruled_out_never_comes(tiny_model: lt.Model) -> None:
    left = 77
    bias = {token: -math.inf for token in range(tiny_model.n_vocab) if token != left}
    for temperature in (0.0, 1.0):
        sampler = lt.Sampler(tiny_model, temperature=temperature, logit_bias=bias, seed=1)
        assert sampler.sample_logits(np.zeros(tiny_model.n_vocab, np.float32)) == left
    with pytest.raises(lt.InvalidInputError, match="rules all tokens out"):
        lt.Sampler(tiny_model, logit_bias={**bias, left: -math.inf})
    # The remaining token has a logit of -infinity already.
    logits = np.full(tiny_model.n_vocab, 1, np.float32)
    logits[left] = -np.inf
    with pytest.raises(lt.InvalidInputError, match="no token possible"):
        lt.Sampler(tiny_model, logit_bias=bias).sample_logits(logits)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bias_hides_no_nan(bad: float, tiny_model: lt.Model) -> None:
    logits = np.zeros(tiny_model.n_vocab, np.float32)
    logits[9] = bad
    for bias in (-math.inf, -1e6, 5.0):
        with pytest.raises(lt.InvalidInputError, match=r"NaN or infinity \(token 9\)"):
            lt.Sampler(tiny_model, logit_bias={9: bias}).sample_logits(logits)


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({259: 1}, r"a token id of logit_bias must be in 0\.\.258, not 259"),
        ({-1: 1}, "logit_bias"),
        ({"5": 1}, "logit_bias"),
        ({5.0: 1}, "logit_bias"),
        ({True: 1}, "logit_bias"),
        ({5: "1"}, "logit_bias of token 5"),
        ({5: None}, "logit_bias of token 5"),
        ({5: math.nan}, "logit_bias of token 5 must be in"),
        ({5: math.inf}, "logit_bias of token 5 must be in"),
        ({5: 1.1e6}, "logit_bias of token 5 must be in"),
        ({5: 10**400}, "logit_bias of token 5"),
        ([(5, 1)], "logit_bias must map"),
        (5, "logit_bias must map"),
    ],
)
def test_wrong_values(bias: Any, words: str, tiny_model: lt.Model) -> None:
    with pytest.raises(lt.InvalidInputError, match=words):
        lt.Sampler(tiny_model, logit_bias=bias)
    with pytest.raises(lt.InvalidInputError, match=words):
        lt.generate(tiny_model, "a", logit_bias=bias)


def test_later_changes_of_the_mapping_change_nothing(tiny_model: lt.Model) -> None:
    bias: Any = {np.int64(5): np.float32(30)}
    options: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        found = lt.generate(context, [5, 6], logit_bias=bias, **options)
        bias.clear()
        assert next(found).tokens.tolist() == [5] * 5
        assert next(lt.generate(context, [5, 6], logit_bias={}, **options)).tokens.tolist() == by_hand(
            tiny_model, [5, 6], 5
        )


def greedily(model: lt.Model, prompt: list[int], count: int, bias: dict[int, float]) -> list[int]:
    """Greedy text by NumPy's argmax, one decode a token."""
    found: list[int] = []
    with model.context(n_ctx=512, **EXACT) as context:
        context.decode(lt.Batch.of(prompt))
        while len(found) < count:
            found.append(int(biased(context.logits(), bias).argmax()))
            context.decode(lt.Batch.of(found[-1:], pos0=len(prompt) + len(found) - 1))
    return found


@pytest.mark.parametrize("sampling", SAMPLING)
def test_texts_with_drafts_and_without(sampling: str, tiny_model: lt.Model) -> None:
    """Drafts are verified against the biased distribution: the tokens are the same."""
    prompts = ragged(np.random.default_rng(3), tiny_model.n_vocab, (9, 1, 40, 16))
    plain = {"temperature": 0.7, "seed": SEED} if sampling == "greedy" else SAMPLING[sampling]
    options: dict[str, Any] = {"logit_bias": BIAS, **SAMPLING[sampling]}
    expected = [
        by_hand(tiny_model, prompt, 40, seed=seed_of(SEED, i), **options) for i, prompt in enumerate(prompts)
    ]
    if sampling == "greedy":
        assert expected == [greedily(tiny_model, prompt, 40, BIAS) for prompt in prompts]
    texts = [[*prompt, *text] for prompt, text in zip(prompts, expected, strict=True)]
    with tiny_model.context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        for drafter in (
            None,
            lt.NGramDrafter(2, 1, n_max=4),
            Guessing(tiny_model.n_vocab, texts, wrong=0.3),
        ):
            found = list(
                lt.generate(
                    context,
                    prompts,
                    drafter,
                    max_tokens=40,
                    seed=SEED,
                    ignore_eos=True,
                    logprobs=2,
                    **options,
                )
            )
            assert [one.tokens.tolist() for one in found] == expected
            assert is_empty(context)
        assert sum(one.stats.accepted for one in found) > 20
        other = list(lt.generate(context, prompts, max_tokens=40, ignore_eos=True, **{"seed": SEED, **plain}))
        assert [one.tokens.tolist() for one in other] != expected
    # Log-probabilities are of the logits as they are.
    for prompt, one in zip(prompts, found, strict=True):
        batch = lt.Batch()
        for position, token in enumerate([*prompt, *one.tokens.tolist()]):
            batch.add(token, position, 0, True)
        assert one.logprobs is not None
        with tiny_model.context(n_ctx=512, **EXACT) as context:
            context.decode(batch)
            for i, entry in enumerate(one.logprobs, len(prompt) - 1):
                row = log_softmax(context.logits(i))
                assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
                assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()


def test_each_prompt_of_a_session_has_its_own(tiny_model: lt.Model) -> None:
    wanted: Iterable[dict[int, float] | None] = ({5: 30.0}, None, {6: 30.0}, {})
    done: dict[int, lt.Generation] = {}
    with tiny_model.context(n_ctx=512, n_seq_max=4, **EXACT) as context, lt.Session(context) as session:
        for bias in wanted:
            session.add([5, 6, 7], logit_bias=bias, max_tokens=6, ignore_eos=True)
        while session.pending:
            done |= {event.index: event.final for event in session.step() if event.final is not None}
    plain = by_hand(tiny_model, [5, 6, 7], 6)
    assert [done[i].tokens.tolist() for i in range(4)] == [[5] * 6, plain, [6] * 6, plain]


@pytest.mark.parametrize("rejection", [False, True])
def test_the_distribution_is_the_biased_one(rejection: bool, tmp_path: Path) -> None:
    """With drafts that are accepted by rejection sampling, too. Of all tokens after t, F[t] has a logit of 3
    and the others of 0; the bias rules a fifth of the tokens out and lifts others."""
    bias: dict[int, float] = dict.fromkeys(range(0, N, 5), -math.inf)
    bias |= dict.fromkeys(range(1, N, 5), 1.0)
    path = rigged.write_rigged_model(tmp_path / "target.gguf", F, margin=3.0)
    with lt.Model(path) as target, target.context(**CONTEXT) as context:
        found = list(
            lt.generate(
                context,
                PROMPTS,
                Drafts(3),
                max_tokens=200,
                seed=6,
                temperature=1.0,
                ignore_eos=True,
                rejection=rejection,
                logit_bias=bias,
            )
        )
    tokens = [token for one in found for token in one.tokens.tolist()]
    assert not {token % 5 for token in tokens} & {0}
    assert sum(one.stats.accepted for one in found) > 0
    # By class of the token that comes, where the likeliest one is of class 2, which nothing changes.
    weights = np.array([0.0, math.e, 1.0, 1.0, 1.0])
    sizes = np.bincount(np.arange(N) % 5, minlength=5)
    expected = sizes * weights
    expected[2] += math.exp(3.0) - 1
    classes = []
    for one in found:
        before = int(one.prompt[-1])
        for token in one.tokens.tolist():
            if F[before] % 5 == 2:
                classes.append(token % 5)
            before = token
    counts = np.bincount(classes, minlength=5)
    assert len(classes) > 300
    assert p_value(counts, expected / expected.sum()) > 0.001
