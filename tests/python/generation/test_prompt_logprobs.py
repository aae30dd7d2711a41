"""Log-probabilities of prompts equal those of a plain decode with all rows as outputs, however chunked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, SAMPLING, Guessing, is_empty, log_softmax, ragged
from support.numerics import computes_with_nan
from support.paths import SMOLLM2_GOLDEN
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35
from support.tiny_models import drafters
from support.tiny_models.registry import FILES

import llamatap as lt
from llamatap._engine_context import EngineContext
from reference import decoder

Rows = NDArray[np.float64]

#: Shorter and longer than an ubatch of 16, and than a batch of 32.
LENGTHS = (9, 1, 40, 16, 23, 71, 2)
CUT: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 16, "n_batch": 32, **EXACT}


def plain(model: lt.Model, prompt: Sequence[int], **options: Any) -> Rows:
    """At each token of a prompt, the log-probabilities of what follows: (n, n_vocab)."""
    batch = lt.Batch()
    for position, token in enumerate(prompt):
        batch.add(token, position, 0, True)
    with model.context(n_ctx=512, **EXACT, **options) as context:
        context.decode(batch)
        return np.stack([log_softmax(context.logits(row)) for row in range(len(prompt))])


def check(found: lt.Generation, rows: Rows, n_top: int, length: int | None = None) -> None:
    """:param length: of what must be there; None for the whole prompt."""
    prompt = found.prompt.tolist()[:length]
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(prompt)
    first, *others = found.prompt_logprobs
    assert first is None
    for token, one, row in zip(prompt[1:], others, rows, strict=False):
        assert one is not None
        assert one.token == token
        assert one.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:n_top]
        assert [id_ for id_, _ in one.top] == best.tolist()
        assert [value for _, value in one.top] == pytest.approx(row[best].tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def prompts(tiny_model: lt.Model) -> list[list[int]]:
    return ragged(np.random.default_rng(5), tiny_model.n_vocab, LENGTHS)


@pytest.fixture(scope="module")
def expected(tiny_model: lt.Model, prompts: list[list[int]]) -> list[Rows]:
    return [plain(tiny_model, prompt) for prompt in prompts]


def test_the_oracle_is_the_formula(tiny: TinyLlama, prompts: list[list[int]], expected: list[Rows]) -> None:
    for prompt, rows in zip(prompts, expected, strict=True):
        _, _, logits = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(prompt, np.int32)))
        by_hand = np.stack([log_softmax(row.astype(np.float32)) for row in logits])
        assert np.abs(by_hand - rows).max() < 1e-4


@pytest.mark.parametrize("n_seq_max", [1, 3])
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_outputs_max", [0, 5])
def test_prompts_in_pieces_beside_each_other(
    n_seq_max: int,
    kv_unified: bool,
    n_outputs_max: int,
    tiny_model: lt.Model,
    prompts: list[list[int]],
    expected: list[Rows],
) -> None:
    sizes = {**CUT, "n_seq_max": n_seq_max, "kv_unified": kv_unified, "n_outputs_max": n_outputs_max}
    options: dict[str, Any] = {"max_tokens": 9, "seed": 4, "ignore_eos": True, **SAMPLING["drawn"]}
    with tiny_model.context(**sizes) as context:
        without = list(lt.generate(context, prompts, **options))
        found = list(lt.generate(context, prompts, prompt_logprobs=4, **options))
        assert is_empty(context)
    for one, other, rows in zip(found, without, expected, strict=True):
        check(one, rows, 4)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.logprobs, other.prompt_logprobs) == (None, None)


def test_beside_prompts_that_want_none_or_more(
    tiny_model: lt.Model, prompts: list[list[int]], expected: list[Rows]
) -> None:
    """Texts that go on, prompts with states, prompts of all log-probabilities: each gets what it asks for."""
    wanted: list[dict[str, Any]] = [
        {"prompt_logprobs": 0, "max_tokens": 30},
        {"max_tokens": 30, "logprobs": 2},
        {"prompt_logprobs": 1024, "max_tokens": 5, "logprobs": 1},
        {"prompt_logprobs": 2, "prompt_states": True, "layers": [-1, 2], "max_tokens": 6},
        {"prompt_states": True, "states": "full", "max_tokens": 7},
        {"prompt_logprobs": 3, "states": "last", "max_tokens": 2},
        {"prompt_logprobs": 5, "max_tokens": 0},
    ]
    done: dict[int, lt.Generation] = {}
    with tiny_model.context(**CUT, n_seq_max=4) as context, lt.Session(context) as session:
        for prompt, options in zip(prompts, wanted, strict=True):
            session.add(prompt, ignore_eos=True, **options)
        while session.pending:
            done |= {event.index: event.final for event in session.step() if event.final is not None}
    for index, (prompt, options) in enumerate(zip(prompts, wanted, strict=True)):
        found = done[index]
        if "prompt_logprobs" in options:
            check(found, expected[index], min(options["prompt_logprobs"], tiny_model.n_vocab))
        else:
            assert found.prompt_logprobs is None
        assert len(found.tokens) == options["max_tokens"]
        if options.get("prompt_states"):
            with lt.Extractor(tiny_model, **EXACT) as extractor:
                states = extractor(prompt, options.get("layers", [-2])).array
            assert found.prompt_states is not None
            assert np.allclose(found.prompt_states.array, states, atol=1e-4)


def test_with_drafters(
    tiny: TinyLlama, tiny_model: lt.Model, prompts: list[list[int]], expected: list[Rows], tmp_path: Path
) -> None:
    makers: dict[str, Callable[[lt.Context], Any]] = {
        "a drafter of one's own": lambda _: Guessing(tiny_model.n_vocab, wrong=0.5),
        "ngram": lambda _: lt.NGramDrafter(2, 1, n_max=4),
        "eagle3": lambda context: lt.Eagle3Drafter(
            lt.SpeculativeContext(context, drafters.write_eagle3(tmp_path / "eagle3.gguf"), n_threads=1)
        ),
        "model": lambda context: lt.ModelDrafter(
            context,
            lt.SpeculativeContext(context, tiny.write(tmp_path / "same.gguf"), as_model=True, n_threads=1),
        ),
    }
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with tiny_model.context(**CUT, n_seq_max=3) as context:
        without = [one.tokens.tolist() for one in lt.generate(context, prompts, **options)]
        for name, make in makers.items():
            found = list(
                lt.generate(context, prompts, make(context), prompt_logprobs=2, logprobs=2, **options)
            )
            assert [one.tokens.tolist() for one in found] == without, name
            for one, rows in zip(found, expected, strict=True):
                check(one, rows, 2)
            assert sum(one.stats.drafted for one in found) > 0


#: A file's writer, and options of contexts.
TARGETS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "window": (TinyGemma3, {"swa_full": False, "n_ubatch": 8, "n_batch": 16}),
    "window, all kept": (TinyGemma3, {"swa_full": True, "n_ubatch": 4, "n_batch": 16}),
    "hybrid, taken back": (TinyQwen35, {"n_rs_seq": 4, "n_ubatch": 9, "n_batch": 16}),
    "hybrid, saved": (TinyQwen35, {"kv_unified": False, "n_ubatch": 9, "n_batch": 16}),
    "recurrent": (FILES["rwkv7"], {"n_ubatch": 16}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_other_memories(name: str, tmp_path: Path) -> None:
    make, options = TARGETS[name]
    with lt.Model(make().write(tmp_path / "model.gguf")) as model:
        prompts = ragged(np.random.default_rng(6), model.n_vocab, (33, 5, 48, 17))
        with model.context(**{**CUT, "n_seq_max": 3, **options}) as context:
            drafter = Guessing(model.n_vocab, wrong=0.5, longest=3)
            found = list(
                lt.generate(context, prompts, drafter, prompt_logprobs=3, max_tokens=12, ignore_eos=True)
            )
            assert is_empty(context)
        for one, prompt in zip(found, prompts, strict=True):
            check(one, plain(model, prompt), 3)
        assert sum(one.stats.accepted for one in found) < sum(one.stats.drafted for one in found)


def test_logits_of_no_more_rows_than_one_ubatch_are_there_at_once(
    tiny_model: lt.Model, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits never exist for a whole prompt; prompts without log-probabilities prefill as before."""
    outputs, sizes = [], []
    decode = EngineContext.decode

    def counting(context: EngineContext, batch: lt.Batch) -> None:
        outputs.append(int(np.sum(batch.outputs)))
        sizes.append(len(batch))
        decode(context, batch)

    monkeypatch.setattr(EngineContext, "decode", counting)
    with tiny_model.context(**CUT, n_seq_max=3) as context:
        (found,) = lt.generate(context, [5] * 300, prompt_logprobs=0, max_tokens=0)
        assert found.prompt_logprobs is not None
        assert len(found.prompt_logprobs) == 300
        assert set(outputs[:-1]) == {16}
        outputs.clear()
        # Three texts have an output each.
        list(lt.generate(context, prompts, prompt_logprobs=0, max_tokens=3))
        assert max(outputs) <= 16 + 2
        sizes.clear()
        with lt.Session(context) as session:
            session.add([5] * 200, max_tokens=0, prompt_logprobs=0)
            session.add([6] * 200, max_tokens=1)
            session.step()
        assert sizes == [32]


def test_no_text(tiny_model: lt.Model, prompts: list[list[int]], expected: list[Rows]) -> None:
    """``max_tokens=0``: the prompt alone, in a context that it fills; nothing is chosen."""
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        full = [7] * 256
        found = list(lt.generate(context, [*prompts, full], max_tokens=0, prompt_logprobs=1))
        assert is_empty(context)
        for one, rows in zip(found, [*expected, plain(tiny_model, full)], strict=True):
            check(one, rows, 1)
            assert (one.tokens.tolist(), one.text, one.finish_reason) == ([], "", "length")
            assert (one.stats.tokens, one.stats.rounds) == (0, 0)
        (event,) = lt.generate(
            context, prompts[0], max_tokens=0, prompt_states=True, states="full", stream=True
        )
        assert (event.token, event.text, event.prompt_logprobs) == (-1, "", None)
        assert event.final is not None
        assert event.final.prompt_states is not None
        assert len(event.final.prompt_states) == len(prompts[0])
        assert event.final.states is not None
        assert len(event.final.states) == 0
    for wrong in ({}, {"logprobs": 3}, {"states": "last"}):
        with pytest.raises(lt.InvalidInputError, match=r"max_tokens must be in 1\.\."):
            lt.generate(tiny_model, "a", max_tokens=0, **wrong)


def test_of_a_model(tiny_model: lt.Model, prompts: list[list[int]], expected: list[Rows]) -> None:
    """A Model brings a context that is sized to prompts without generated tokens."""
    for one, rows in zip(
        lt.generate(tiny_model, prompts, max_tokens=0, prompt_logprobs=0), expected, strict=True
    ):
        assert one.prompt_logprobs is not None
        for entry, row in zip(one.prompt_logprobs[1:], rows, strict=False):
            assert entry is not None
            # The KV cache is float16 here.
            assert entry.logprob == pytest.approx(row[entry.token], abs=2e-2)


def test_streams_have_them_in_the_first_event(
    tiny_model: lt.Model, prompts: list[list[int]], expected: list[Rows]
) -> None:
    seen = set()
    with tiny_model.context(**CUT, n_seq_max=3) as context:
        for event in lt.generate(
            context, prompts, max_tokens=4, ignore_eos=True, prompt_logprobs=2, states="full", stream=True
        ):
            assert (event.prompt_logprobs is None) == (event.index in seen)
            if event.index not in seen:
                assert event.prompt_logprobs is not None
                assert len(event.prompt_logprobs) == len(prompts[event.index])
            seen.add(event.index)
            if event.final is not None:
                check(event.final, expected[event.index], 2)
    assert len(seen) == len(prompts)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_cancelled_prompt_has_those_that_were_computed(rounds: int, tiny_model: lt.Model) -> None:
    prompt = ragged(np.random.default_rng(7), tiny_model.n_vocab, [100])[0]
    with tiny_model.context(**CUT) as context, lt.Session(context) as session:
        session.add(prompt, prompt_logprobs=2)
        for _ in range(rounds):
            assert session.step() == []
        session.cancel(0)
        (event,) = session.step()
    assert event.final is not None
    assert event.final.finish_reason == "cancelled"
    assert event.prompt_logprobs == event.final.prompt_logprobs
    # One row more than rows of its own: the last computed row predicts the next token.
    check(event.final, plain(tiny_model, prompt), 2, 16 * rounds + 1)


def test_of_smollm2_those_of_transformers(smollm2_f32_path: Path) -> None:
    """The last rows, of which the golden file has the logits; with the F32 weights that it was made with."""
    golden = np.load(SMOLLM2_GOLDEN)
    with lt.Model(smollm2_f32_path) as model, model.context(**{**CUT, "n_seq_max": 2}) as context:
        texts = [golden[f"tokens_{index}"].tolist() for index in range(3)]
        rows = [log_softmax(golden[f"logits_{index}"]) for index in range(3)]
        follow = [int(np.argsort(-row)[rank]) for row, rank in zip(rows, (0, 3, 20000), strict=True)]
        prompts = [[*text, token] for text, token in zip(texts, follow, strict=True)]
        found = list(lt.generate(context, prompts, max_tokens=0, prompt_logprobs=5))
        for one, prompt, row in zip(found, prompts, rows, strict=True):
            check(one, plain(model, prompt), 5)
            assert one.prompt_logprobs is not None
            last = one.prompt_logprobs[-1]
            assert last is not None
            assert last.logprob == pytest.approx(row[prompt[-1]], abs=2e-3)
            assert [token for token, _ in last.top] == np.argsort(-row)[:5].tolist()


@computes_with_nan
def test_a_model_that_computes_infinity(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["output.weight"][9] = np.inf
    with lt.Model(tiny.write(tmp_path / "inf.gguf")) as model, model.context(**CUT) as context:
        with pytest.raises(lt.NotFiniteError, match="log-probabilities"):
            list(lt.generate(context, [5, 6, 7], max_tokens=0, prompt_logprobs=0))
        assert is_empty(context)


def test_wrong_values(tiny_model: lt.Model) -> None:
    wrong: Any
    for wrong in (-1, True, 1025, 1.0, "5"):
        with pytest.raises(lt.InvalidInputError, match="prompt_logprobs must be"):
            lt.generate(tiny_model, "a", prompt_logprobs=wrong)


def test_the_core_says_what_is_wrong(tiny_model: lt.Model) -> None:
    from llamatap.generation import logprobs

    with tiny_model.context(**CUT) as context:
        context.decode(lt.Batch.of([5, 6, 7]))
        for first_row, tokens, words in ((0, [5], "not an output"), (2, [259], "259"), (2, [5, 6], "row 3")):
            with pytest.raises(lt.InvalidInputError, match=words):
                logprobs.at_outputs(context, first_row, tokens, 0)
        logits = context.logits()
    for bad in (np.nan, np.inf):
        logits[100] = bad
        with pytest.raises(lt.NotFiniteError):
            logprobs.of_logits(logits, 5, 2)
    logits[:] = -np.inf
    with pytest.raises(lt.NotFiniteError):
        logprobs.of_logits(logits, 5, 2)


def test_log_probabilities_are_as_exact_as_numbers_are(rng: np.random.Generator) -> None:
    from llamatap.generation import logprobs

    for scale in (0.1, 5.0, 80.0):
        logits = (scale * rng.standard_normal(50_000)).astype(np.float32)
        expected = log_softmax(logits)
        found = logprobs.of_logits(logits, 77, 40)
        assert found.logprob == pytest.approx(expected[77], abs=1e-5)
        assert all(value == pytest.approx(expected[token], abs=1e-5) for token, value in found.top)
        assert all(one[1] >= other[1] for one, other in pairwise(found.top))
