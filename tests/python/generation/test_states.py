"""Hidden states of generated tokens equal those of the whole text extracted afterwards, a row a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, ragged, scripted, seed_of
from support.numerics import relative
from support.tiny import TinyLlama
from support.tiny_models import drafters

import llamatap as lt
from llamatap._engine_context import engine_of

MAX_TOKENS = 20
SEED = 21
LENGTHS = (7, 40, 1, 18)
EVERY: tuple[lt.LayerId, ...] = (0, 1, 2, 3, 4, "norm")


@dataclass(frozen=True)
class KnownTexts:
    model: lt.Model
    eagle3: Path
    mtp: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    def rows(self, text: Sequence[int], count: int, layers: Sequence[lt.LayerId]) -> NDArray[np.float32]:
        """The last ``count`` of a text in one piece."""
        with lt.Extractor(self.model, **EXACT) as extractor:
            array: NDArray[np.float32] = extractor(text, layers).array[len(text) - count :]
        return array


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnownTexts]:
    folder = tmp_path_factory.mktemp("states")
    with lt.Model(TinyLlama().write(folder / "target.gguf")) as model:
        prompts = ragged(np.random.default_rng(8), model.n_vocab, LENGTHS)
        expected = [
            by_hand(model, prompt, MAX_TOKENS, seed=seed_of(SEED, i), **SAMPLING["drawn"])
            for i, prompt in enumerate(prompts)
        ]
        yield KnownTexts(
            model,
            drafters.write_eagle3(folder / "eagle3.gguf"),
            drafters.write_mtp_block(folder / "mtp.gguf", n_layer=4),
            prompts,
            expected,
        )


def drafter_of(kind: str, known: KnownTexts, context: lt.Context) -> Any:
    if kind == "guessing":
        texts = [[*p, *t] for p, t in zip(known.prompts, known.expected, strict=True)]
        return Guessing(known.model.n_vocab, texts, wrong=0.3)
    if kind == "ngram":
        return lt.NGramDrafter(2, 1)
    path = {"eagle3": known.eagle3, "mtp": known.mtp}.get(kind)
    if path is None:
        return None
    spec = lt.SpeculativeContext(context, path, n_threads=1)
    drafter = lt.Eagle3Drafter(spec) if kind == "eagle3" else lt.MtpDrafter(spec)
    # The drafter's own layers must not get into the states of results.
    assert set(drafter.target_layers) <= set(EVERY)
    assert len(drafter.target_layers) == (3 if kind == "eagle3" else 1)
    return [drafter, drafter_of("guessing", known, context)]


KINDS = ("none", "guessing", "ngram", "eagle3", "mtp")
LAYERS: tuple[tuple[lt.LayerId, ...], ...] = ((-1,), (0, "norm", -1), (3, 1), (2, 2, -2, "norm"), EVERY)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_whole_text(
    kind: str, layers: tuple[lt.LayerId, ...], known: KnownTexts
) -> None:
    """One row a token, of that token: https://github.com/sgl-project/sglang/issues/26163"""
    options: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "seed": SEED,
        "ignore_eos": True,
        "layers": layers,
        **SAMPLING["drawn"],
    }
    with known.model.context(n_ctx=512, n_seq_max=3, n_ubatch=16, n_batch=32, **EXACT) as context:
        drafter = drafter_of(kind, known, context)
        full = list(lt.generate(context, known.prompts, drafter, states="full", **options))
        last = list(lt.generate(context, known.prompts, drafter, states="last", **options))
        events = list(lt.generate(context, known.prompts, drafter, states="full", stream=True, **options))
        ends = list(lt.generate(context, known.prompts, drafter, states="last", stream=True, **options))
        assert is_empty(context)
        assert engine_of(context).capture is None
    for index, (prompt, tokens) in enumerate(zip(known.prompts, known.expected, strict=True)):
        expected = known.rows([*prompt, *tokens], MAX_TOKENS, layers)
        assert full[index].tokens.tolist() == last[index].tokens.tolist() == tokens
        states = full[index].states
        assert states is not None
        assert states.array.shape == (MAX_TOKENS, len(layers), known.model.n_embd)
        assert states.array.dtype == np.float32
        assert states.tokens.tolist() == tokens
        assert relative(states.array, expected) < 1e-5
        assert max(relative(a, b) for a, b in zip(states.array, expected, strict=True)) < 1e-4
        for layer in layers:
            column = expected[:, list(layers).index(layer)]
            assert relative(states[layer], column) < 1e-5
        only = last[index].states
        assert only is not None
        assert only.array.shape == (1, len(layers), known.model.n_embd)
        assert only.tokens.tolist() == tokens[-1:]
        assert relative(only.array[0], expected[-1]) < 1e-5
        own = [event for event in events if event.index == index]
        for event, token, row in zip(own, tokens, states.array, strict=True):
            assert event.token == token
            assert event.states is not None
            assert event.states.tokens.tolist() == [token]
            assert event.states.layers == states.layers
            assert relative(event.states.array[0], row) < 1e-5
        *before, end = [event for event in ends if event.index == index]
        assert all(event.states is None for event in before)
        assert end.states is not None
        assert relative(end.states.array, only.array) < 1e-5
        assert end.final is not None
        assert end.final.states is not None


@pytest.mark.slow
@pytest.mark.parametrize("states", ["full", "last"])
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_a_stop_inside_of_a_draft(states: Literal["full", "last"], wrong: float, known: KnownTexts) -> None:
    """Rows up to the token that stops it, whose own row is there already, or costs a decode."""
    prompt, tokens = known.prompts[1], known.expected[1]
    for count in range(1, MAX_TOKENS):
        if tokens.index(tokens[count - 1]) + 1 < count:
            continue
        for longest in (3, 20):
            drafter = Guessing(known.model.n_vocab, [[*prompt, *tokens]], wrong=wrong, longest=longest)
            with known.model.context(n_ctx=256, **EXACT) as context:
                (*_, found) = lt.generate(
                    context,
                    [known.prompts[0], prompt],
                    drafter,
                    max_tokens=MAX_TOKENS,
                    seed=SEED,
                    stop_tokens=[tokens[count - 1]],
                    ignore_eos=True,
                    states=states,
                    layers=(1, -1),
                    **SAMPLING["drawn"],
                )
                assert is_empty(context)
            assert found.tokens.tolist() == tokens[:count]
            assert found.finish_reason == "stop"
            assert found.states is not None
            n_rows = count if states == "full" else 1
            assert found.states.tokens.tolist() == tokens[:count][-n_rows:]
            expected = known.rows([*prompt, *tokens[:count]], n_rows, (1, -1))
            assert relative(found.states.array, expected) < 1e-5


@pytest.mark.parametrize("length", [0, 1, 4, 30])
def test_a_stop_string_inside_of_a_draft(length: int, tmp_path: Path) -> None:
    """The draft, and what the target made of it, goes on behind the string; the rows do not."""
    script = [3 + byte for byte in b"abcdefghijklmnop"]
    with lt.Model(scripted(script).write(tmp_path / "script.gguf")) as model:
        drafter = lt.CallableDrafter(
            lambda tokens: script[script.index(int(tokens[-1])) + 1 :][:length], n_max=30
        )
        for end in range(3, 12):
            text = bytes(token - 3 for token in script[1:]).decode()[:end]
            with model.context(n_ctx=256, **EXACT) as context:
                events = list(
                    lt.generate(
                        context,
                        script[:1],
                        drafter if length else None,
                        max_tokens=14,
                        stop=text[-2:],
                        states="full",
                        layers=(0,),
                        stream=True,
                    )
                )
            final = events[-1].final
            assert final is not None
            assert final.text == text[:-2]
            assert final.tokens.tolist() == script[1 : end + 1]
            assert final.states is not None
            # The state of a token of the script is its own unit vector.
            assert final.states.array[:, 0].argmax(axis=1).tolist() == list(range(1, end + 1))
            own = [event.states.array[0, 0].argmax() for event in events if event.states is not None]
            assert own == list(range(1, end + 1))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("states", ["full", "last"])
@pytest.mark.parametrize("end", ["context", "length", "stop"])
def test_at_the_end_of_a_full_context(
    end: str, states: Literal["full", "last"], wrong: float, known: KnownTexts
) -> None:
    """The last token has no place, so no state: not that of another token instead."""
    prompt = (known.prompts[1] * 7)[:250]
    tokens = by_hand(known.model, prompt, 7)
    drafter = Guessing(known.model.n_vocab, [[*prompt, *tokens, 5, 5]], wrong=wrong)
    ends: dict[str, dict[str, Any]] = {
        "context": {},
        "length": {"max_tokens": 7},
        "stop": {"stop_tokens": tokens[-1:]},
    }
    assert tokens[-1] not in tokens[:-1]
    with known.model.context(n_ctx=256, **EXACT) as context:
        (found,) = lt.generate(
            context, prompt, drafter, states=states, layers=(-1,), ignore_eos=True, **ends[end]
        )
        assert is_empty(context)
    assert found.tokens.tolist() == tokens
    assert found.finish_reason == end
    rows = known.rows([*prompt, *tokens[:-1]], 6, (-1,))
    assert found.states is not None
    assert found.states.tokens.tolist() == (tokens[:-1] if states == "full" else [])
    assert len(found.states.array) == len(found.states.tokens)
    if states == "full":
        assert relative(found.states.array, rows) < 1e-5


def test_one_token_has_its_state(known: KnownTexts) -> None:
    """A decode after the prompt's."""
    prompt, tokens = known.prompts[3], known.expected[3]
    for states in ("full", "last"):
        options: dict[str, Any] = {"states": states, "seed": seed_of(SEED, 3), **SAMPLING["drawn"]}
        (found,) = lt.generate(known.model, prompt, max_tokens=1, ignore_eos=True, **options)
        assert found.tokens.tolist() == tokens[:1]
        assert found.states is not None
        assert found.states.array.shape == (1, 1, known.model.n_embd)
    with known.model.context(n_ctx=256, **EXACT) as context:
        (found,) = lt.generate(context, prompt, max_tokens=1, ignore_eos=True, layers=EVERY, **options)
        assert found.states is not None
        expected = known.rows([*prompt, tokens[0]], 1, EVERY)
        assert relative(found.states.array, expected) < 1e-5


def test_states_are_read_only_and_say_where_they_are_from(known: KnownTexts) -> None:
    with known.model.context(n_ctx=256, **EXACT) as context:
        (found,) = lt.generate(context, known.prompts[0], max_tokens=4, states="full", layers=(-1, "norm"))
    states = found.states
    assert states is not None
    assert states.layers == (4, "norm")
    assert (states.provenance["arch"], states.provenance["rows"]) == ("llama", "full")
    with pytest.raises(ValueError, match="read-only"):
        states.array[0] = 0


def test_layers_are_those_of_extract_and_taps_unless_said(known: KnownTexts) -> None:
    (found,) = lt.generate(known.model, known.prompts[0], max_tokens=3, states="full", ignore_eos=True)
    assert found.states is not None
    assert found.states.layers == lt.extract(known.model, [5]).layers == (3,)
    (same,) = lt.generate(
        known.model, known.prompts[0], max_tokens=3, states="full", layers=None, ignore_eos=True
    )
    assert same.states is not None
    assert np.array_equal(same.states.array, found.states.array)


def test_layers_without_states_are_refused(known: KnownTexts) -> None:
    with pytest.raises(lt.InvalidInputError, match="layer id 9"):
        lt.generate(known.model, [5], layers=9)
    with pytest.raises(lt.InvalidInputError, match="give states="):
        lt.generate(known.model, [5], layers=2)
