"""Generation without a drafter gives the tokens of a hand-written loop, for any number of prompts at once."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import (
    EXACT,
    SAMPLING,
    Noting,
    by_hand,
    is_empty,
    log_softmax,
    ragged,
    scripted,
    seed_of,
)
from support.tiny import TinyQwen3
from support.tiny_models import rigged
from support.tiny_models.rigged import by_token, cycle

import llamatap as lt
from llamatap._engine_context import EngineContext
from llamatap._options import read_options
from llamatap.generation.api import GenerateOptions, generate
from llamatap.generation.logprobs import of_logits
from llamatap.sampler import SamplingOptions

F = cycle()
#: Shorter and longer than an ubatch of 16, and than a batch of 32.
LENGTHS = (9, 1, 40, 16, 23, 71, 2)
CUT = {"n_ubatch": 16, "n_batch": 32}
SEED = 2**32 - 5  # the seeds of later prompts go round


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each decode of a context had."""
    found = []
    decode = EngineContext.decode

    def counting(context: EngineContext, batch: lt.Batch) -> None:
        found.append(len(batch))
        decode(context, batch)

    monkeypatch.setattr(EngineContext, "decode", counting)
    return found


def tokens_of(found: Iterator[lt.Generation]) -> list[list[int]]:
    return [one.tokens.tolist() for one in found]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_one_prompt_is_what_a_loop_by_hand_gives(
    sampling: str, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """The seed of the first prompt is the seed that is given."""
    (prompt,) = ragged(rng, tiny_model.n_vocab, [37])
    expected = by_hand(tiny_model, prompt, 60, seed=11, **SAMPLING[sampling])
    assert len(set(expected)) > 5
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        (found,) = lt.generate(context, prompt, max_tokens=60, seed=11, ignore_eos=True, **SAMPLING[sampling])
        assert is_empty(context)
    assert found.tokens.tolist() == expected
    assert found.tokens.dtype == np.int32
    assert found.prompt.tolist() == prompt
    assert (found.index, found.finish_reason) == (0, "length")
    assert found.text == tiny_model.detokenize(found.tokens, skip_special=True)
    assert (found.states, found.logprobs) == (None, None)
    stats = found.stats
    assert (stats.prompt_tokens, stats.tokens, stats.rounds, stats.drafted) == (37, 60, 59, 0)
    assert stats.tokens_per_round == 1
    assert np.isnan(stats.acceptance)
    assert stats.acceptance_by_position == []
    assert stats.target_seconds > 0
    assert stats.sampling_seconds > 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 7])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_prompts_together_are_those_alone(
    sampling: str, n_seq_max: int, kv_unified: bool, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """With fewer sequences than prompts, a prompt starts when another text ends."""
    prompts = ragged(rng, tiny_model.n_vocab, LENGTHS)
    whole = [
        by_hand(tiny_model, prompt, 30, seed=seed_of(SEED, i), **SAMPLING[sampling])
        for i, prompt in enumerate(prompts)
    ]
    stops = {whole[0][4], whole[3][10], whole[4][7]}
    expected = [
        tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), None)] for tokens in whole
    ]
    assert len({len(tokens) for tokens in expected}) > 3
    options = {"n_ctx": 1024, "n_seq_max": n_seq_max, "kv_unified": kv_unified, **CUT, **EXACT}
    with tiny_model.context(**options) as context:
        for _ in range(2):
            found = list(
                lt.generate(
                    context,
                    prompts,
                    max_tokens=30,
                    seed=SEED,
                    stop_tokens=stops,
                    ignore_eos=True,
                    **SAMPLING[sampling],
                )
            )
            assert [one.index for one in found] == list(range(len(prompts)))
            assert [one.prompt.tolist() for one in found] == prompts
            assert [one.tokens.tolist() for one in found] == expected
            assert is_empty(context)


def test_heads_of_another_width_and_seeds(tmp_path: Path, rng: np.random.Generator) -> None:
    with lt.Model(TinyQwen3().write(tmp_path / "qwen3.gguf")) as model:
        prompts = ragged(rng, model.n_vocab, (12, 30))
        options: dict[str, Any] = {"max_tokens": 25, "temperature": 1.0, "ignore_eos": True}
        with model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
            for seed in (0, 1, 2**32 - 2):
                expected = [
                    by_hand(model, prompt, 25, temperature=1.0, seed=seed_of(seed, i))
                    for i, prompt in enumerate(prompts)
                ]
                assert tokens_of(lt.generate(context, prompts, seed=seed, **options)) == expected
            # One prompt several times: each has numbers of its own. Without a seed all are new ones.
            same = tokens_of(lt.generate(context, prompts[:1] * 4, seed=5, **options))
            more = [tokens_of(lt.generate(context, prompts[0], **options))[0] for _ in range(4)]
            assert len(set(map(tuple, same + more))) == 8


def test_a_model_gets_a_context_of_its_own(rigged_model: lt.Model) -> None:
    prompts = [[1, *range(3, 3 + length)] for length in (30, 5, 1, 50, 2, 9, 9, 9, 9, 9, 9, 9)]
    found = list(lt.generate(rigged_model, prompts, max_tokens=5))
    for prompt, one in zip(prompts, found, strict=True):
        assert one.tokens.tolist() == list(range(prompt[-1] + 1, prompt[-1] + 6))
    (alone,) = lt.generate(rigged_model, [1, 9], max_tokens=300)
    assert len(alone.tokens) == 300
    assert alone.finish_reason == "length"


def test_a_model_s_own_context_is_no_longer_than_it_was_trained_with(tmp_path: Path) -> None:
    """Whatever max_tokens is; texts end there, each of them."""
    model_file = scripted(range(3, 40))
    model_file.n_ctx = 300
    with lt.Model(model_file.write(tmp_path / "short.gguf")) as model:
        for max_tokens in (300_000, 2**31 - 1):
            found = list(lt.generate(model, [[3] * 290, [3, 4], [3] * 299, [3] * 300], max_tokens=max_tokens))
            assert [len(one.prompt) + len(one.tokens) for one in found] == [301] * 4
            assert [one.finish_reason for one in found] == ["context"] * 4
        (found_alone,) = lt.generate(model, [3] * 290, max_tokens=5)
        assert (len(found_alone.tokens), found_alone.finish_reason) == (5, "length")


def test_the_options_are_those_that_are_annotated() -> None:
    """Type checkers see the annotations, people and `help` the signatures."""
    for function, declaration, others in (
        (generate, GenerateOptions, {"model_or_context", "prompts", "drafter", "stream"}),
        (lt.Session.add, GenerateOptions, {"self", "prompt"}),
        (lt.Sampler, SamplingOptions, {"model"}),
    ):
        options = read_options(declaration)
        parameters = inspect.signature(function).parameters
        assert set(parameters) == {*others, *options}
        for name, option in options.items():
            assert parameters[name].default == option.default
            assert f":param {name}: " in (function.__doc__ or "") or function is lt.Session.add
        assert set(declaration.__annotations__) <= set(options)


def test_prompts_may_be_text(rigged_model: lt.Model) -> None:
    with rigged_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        (found,) = lt.generate(context, "abc", max_tokens=4)
        assert found.prompt.tolist() == rigged_model.tokenize("abc").tolist() == [1, 5, 6, 7]
        assert found.text == "defg"
        mixed: list[Any] = ["xyz", "m", [1, 40, 41]]
        texts = [one.text for one in lt.generate(context, mixed, max_tokens=3)]
        assert texts == ["ABC", "nop", rigged_model.detokenize([42, 43, 44])]
        (array,) = lt.generate(context, np.array([1, 5, 6, 7], np.int64), max_tokens=4)
        assert array.text == "defg"


@pytest.mark.parametrize(
    ("penalties", "rest", "stays"),
    [
        ({"presence_penalty": 7.9}, [13, 12], True),
        ({"presence_penalty": 8.1}, [13, 12], False),
        ({"frequency_penalty": 4.1}, [13, 12], True),
        ({"frequency_penalty": 4.1}, [13, 20, 13, 12], False),
        ({"presence_penalty": 8.1, "penalty_last_n": 3}, [13, 20, 12], False),
        ({"presence_penalty": 8.1, "penalty_last_n": 2}, [13, 20, 12], True),
        ({"presence_penalty": 8.1, "penalty_last_n": 0}, [13, 12], True),
    ],
    ids=str,
)
def test_penalties_see_the_prompt(
    penalties: dict[str, Any], rest: list[int], stays: bool, rigged_model: lt.Model
) -> None:
    """After 12 the logit of 13 is 8, of all others 0."""
    (found,) = lt.generate(rigged_model, [1, *rest], max_tokens=1, ignore_eos=True, **penalties)
    if stays:
        assert found.tokens.tolist() == [13]
    else:
        assert found.tokens[0] not in rest


def test_one_decode_serves_all(rigged_model: lt.Model, decodes: list[int]) -> None:
    """A drafter that drafts nothing records what each pass holds."""
    prompts = [[1, *range(3, 3 + length)] for length in (5, 2, 30, 11)]
    with rigged_model.context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        noting = Noting()
        found = list(lt.generate(context, prompts, noting, max_tokens=6))
    assert [one.tokens.tolist() for one in found] == [
        list(range(prompt[-1] + 1, prompt[-1] + 7)) for prompt in prompts
    ]
    first, *rounds = noting.batches[:6]
    assert first == {0: 6, 1: 3, 2: 31}
    assert rounds == [{0: 1, 1: 1, 2: 1}] * 5
    last = noting.batches[6:]
    assert [list(counts.values()) for counts in last] == [[12], [1], [1], [1], [1], [1]]
    assert noting.texts == {}
    # The drafter is told of every pass.
    assert decodes == [40, 3, 3, 3, 3, 3, 12, 1, 1, 1, 1, 1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n_seq_max", [1, 3])
@pytest.mark.parametrize("n_batch", [8, 32, 50])
def test_long_prompts_enter_in_pieces(
    n_batch: int, n_seq_max: int, tiny_model: lt.Model, rng: np.random.Generator, decodes: list[int]
) -> None:
    """Chunks are at most one engine call, while other texts go on: memory does not grow with prompts."""
    prompts = ragged(rng, tiny_model.n_vocab, (5, 300, 9, 170, 1))
    expected = [by_hand(tiny_model, prompt, 20, seed=seed_of(3, i)) for i, prompt in enumerate(prompts)]
    decodes.clear()
    shapes: list[int] = []

    class Seeing(Noting):
        target_layers = (1, -1)

        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            super().process(batch, states)
            assert states is not None
            shapes.append(states.array.shape[0])

    options = {"n_ctx": 2048, "n_seq_max": n_seq_max, "n_batch": n_batch, "n_ubatch": 8, **EXACT}
    with tiny_model.context(**options) as context:
        noting = Seeing()
        found = list(lt.generate(context, prompts, noting, max_tokens=20, seed=3, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == expected
    assert shapes == decodes == [sum(counts.values()) for counts in noting.batches]
    # A batch that is full without prompts takes an ubatch of them.
    assert max(decodes) <= max(n_batch, n_seq_max + 8)
    assert sum(decodes) == sum(len(prompt) + 19 for prompt in prompts)
    if n_seq_max > 1:
        # The first text goes on beside the second prompt.
        assert sum(counts.get(0) == 1 and counts.get(1, 0) > 1 for counts in noting.batches) >= 4


@pytest.mark.parametrize("states", ["last", "full"])
def test_states_of_texts_are_not_those_of_prompts(
    states: Any, tiny_model: lt.Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of a prompt is captured."""
    rows = []
    decode = EngineContext.decode

    def seeing(context: EngineContext, batch: lt.Batch) -> None:
        decode(context, batch)
        capture = context.capture
        rows.append(0 if capture is None or capture.states is None else len(capture.states.array))

    monkeypatch.setattr(EngineContext, "decode", seeing)
    with tiny_model.context(n_ctx=512, **EXACT) as context:
        (prompt,) = ragged(rng, tiny_model.n_vocab, [200])
        (found,) = lt.generate(context, prompt, max_tokens=4, states=states, layers=[1, -1], ignore_eos=True)
    assert found.states is not None
    assert rows == [0, 1, 1, 1, 1]


def test_the_last_state_costs_a_decode_when_asked(rigged_model: lt.Model, decodes: list[int]) -> None:
    """It costs a decode where no pass has seen the last token; a text that ends inside a draft needs none."""
    follow = lt.CallableDrafter(lambda tokens: by_token(F)(tokens.tolist(), 4))
    with rigged_model.context(n_ctx=256, **EXACT) as context:
        cases: list[tuple[Any, Any, list[int], list[int]]] = [
            (None, None, [], [2, 1, 1, 1, 1, 1]),
            ("last", None, [], [2, 1, 1, 1, 1, 1, 1]),
            ("full", None, [], [2, 1, 1, 1, 1, 1, 1]),
            (None, follow, [], [2, 5]),
            ("last", follow, [], [2, 5, 1]),
            (None, follow, [13], [2, 5]),
            ("full", follow, [13], [2, 5]),
        ]
        for states, drafter, stops, expected in cases:
            decodes.clear()
            options: dict[str, Any] = {"max_tokens": 6, "stop_tokens": stops, "states": states}
            made = lt.generate(context, [1, 9], drafter, **options)
            assert next(made).tokens.tolist() == [10, 11, 12, 13, 14, 15][: 4 if stops else 6]
            assert decodes == expected


def test_prompts_wait_where_all_would_not_fit(rigged_model: lt.Model) -> None:
    """Each may take 100 of 256 places: two at once, whatever sequence ids there are."""
    prompts = [[1, *range(3, 63)] for _ in range(5)]
    with rigged_model.context(n_ctx=256, n_seq_max=4, **EXACT) as context:
        noting = Noting()
        found = list(lt.generate(context, prompts, noting, max_tokens=39))
        assert is_empty(context)
    assert all(one.tokens.tolist() == found[0].tokens.tolist() for one in found)
    assert [one.finish_reason for one in found] == ["length"] * 5
    assert {len(counts) for counts in noting.batches[:39]} == {2}
    assert max(len(counts) for counts in noting.batches) == 2


def test_results_come_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    """The first prompt takes longest."""
    table = cycle()
    table[30] = 2
    path = rigged.write_rigged_model(tmp_path / "ends.gguf", table)
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        prompts = [[1, last] for last in (5, 29, 20, 30, 28)]
        found = list(lt.generate(context, prompts, max_tokens=50))
        assert [one.index for one in found] == [0, 1, 2, 3, 4]
        for prompt, one in zip(prompts, found, strict=True):
            assert one.tokens.tolist() == [*range(prompt[-1] + 1, 31), 2]
            assert one.finish_reason == "stop"
        # Finished generations are given out before all are finished.
        results = lt.generate(context, [[1, 30], [1, 5], [1, 5]], max_tokens=25)
        assert next(results).tokens.tolist() == [2]
        assert not is_empty(context)
        assert [one.index for one in results] == [1, 2]
        assert is_empty(context)


def test_a_context_does_other_work_before_and_after(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    (prompt,) = ragged(rng, tiny_model.n_vocab, [20])
    expected = by_hand(tiny_model, prompt, 10)
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        for _ in range(3):
            states = lt.extract(context, [prompt, prompt[:7]], [-1])
            assert (
                tokens_of(lt.generate(context, [prompt, prompt], max_tokens=10, ignore_eos=True))
                == [expected] * 2
            )
            again = lt.extract(context, [prompt, prompt[:7]], [-1])
            assert np.array_equal(states[0].array, again[0].array)
            context.decode(lt.Batch.of(prompt))
            assert int(context.logits().argmax()) == expected[0]
            context.memory.clear()


def test_log_probabilities_are_those_of_a_fresh_prefill(
    tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """They are of the raw logits: neither penalties nor temperature change them."""
    prompts = ragged(rng, tiny_model.n_vocab, (25, 8))
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        found = list(
            lt.generate(
                context,
                prompts,
                max_tokens=12,
                logprobs=5,
                seed=3,
                ignore_eos=True,
                **SAMPLING["penalties"],
            )
        )
    greedy = 0
    for prompt, one in zip(prompts, found, strict=True):
        text = [*prompt, *one.tokens.tolist()]
        assert one.logprobs is not None
        assert [entry.token for entry in one.logprobs] == one.tokens.tolist()
        for i, entry in enumerate(one.logprobs):
            with tiny_model.context(n_ctx=256, **EXACT) as context:
                context.decode(lt.Batch.of(text[: len(prompt) + i]))
                expected = log_softmax(context.logits())
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-4)
            assert [token for token, _ in entry.top] == np.argsort(-expected)[:5].tolist()
            values = [value for _, value in entry.top]
            assert values == pytest.approx(np.sort(expected)[::-1][:5].tolist(), abs=1e-4)
            assert values == sorted(values, reverse=True)
            greedy += entry.token == entry.top[0][0]
    assert greedy < 20  # of 24


def test_log_probabilities_of_the_token_alone_or_of_all(tiny_model: lt.Model) -> None:
    (alone,) = lt.generate(tiny_model, [1, 9], max_tokens=3, logprobs=0)
    assert alone.logprobs is not None
    assert [entry.top for entry in alone.logprobs] == [()] * 3
    (every,) = lt.generate(tiny_model, [1, 9], max_tokens=3, logprobs=1024)
    assert every.logprobs is not None
    for entry in every.logprobs:
        assert sorted(token for token, _ in entry.top) == list(range(tiny_model.n_vocab))
        assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1)


def test_log_probabilities_of_tokens_that_are_alike_come_in_order() -> None:
    """Equally likely tokens come in the order of their ids."""
    logits = np.array([1, 3, 3, 5, 3, 2, 3, -np.inf], np.float32)
    for n in range(10):
        found = of_logits(logits, 5, n)
        assert [token for token, _ in found.top] == [3, 1, 2, 4, 6, 5, 0, 7][:n]
    assert found.logprob == pytest.approx(log_softmax(logits)[5])


def test_log_probabilities_of_large_vocabularies_are_not_sorted(rng: np.random.Generator) -> None:
    """Sorting them takes much longer than what it takes to add them up."""
    logits = rng.standard_normal(200_000, np.float32)

    def seconds(action: Any) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    sorting = min(seconds(lambda: np.argsort(-logits.astype(np.float64), kind="stable")) for _ in range(5))
    assert min(seconds(lambda: of_logits(logits, 5, 5)) for _ in range(5)) < 0.7 * sorting


def test_a_script_is_followed(tmp_path: Path) -> None:
    """Other tests rely on `scripted` models."""
    tokens = [3 + byte for byte in b"the quick"]
    tokens = list(dict.fromkeys(tokens))
    with lt.Model(scripted(tokens).write(tmp_path / "script.gguf")) as model:
        (found,) = lt.generate(model, tokens[:1], max_tokens=len(tokens) + 1, logprobs=2)
    assert found.tokens.tolist() == [*tokens[1:], tokens[-1], tokens[-1]]
    assert found.logprobs is not None
    assert all(entry.top[0][1] - entry.top[1][1] == pytest.approx(8, rel=1e-4) for entry in found.logprobs)
