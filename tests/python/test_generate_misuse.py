"""Calls of generate that are wrong: each raises what is documented, and the next text is right.

Drafters that are wrong are in test_generate_bad_drafters.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generating import EXACT, PROMPT, Guessing, Noting, World, by_hand, is_empty, small_world
from tinies import drafters
from tinies.files import FILES
from tiny import TinyLlama

import llamatap
from llamatap._native import native_of

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def whole_world(tiny_path: Path) -> Iterator[World]:
    with small_world(tiny_path) as world:
        yield world


@pytest.fixture
def world(whole_world: World) -> Iterator[World]:
    yield whole_world
    whole_world.check()


def options(**wrong: Any) -> Callable[[World], Any]:
    return lambda w: lt.generate(w.context, PROMPT, **{"max_tokens": 3, **wrong})


def prompts(wrong: Any) -> Callable[[World], Any]:
    return lambda w: lt.generate(w.context, wrong, max_tokens=3)


def drafter(wrong: Any) -> Callable[[World], Any]:
    return lambda w: lt.generate(w.context, PROMPT, wrong, max_tokens=3)


INVALID: dict[str, Callable[[World], Any]] = {
    "a path for a model": lambda w: lt.generate(w.model.path, PROMPT),
    "None for a model": lambda w: lt.generate(None, PROMPT),
    "the core's context": lambda w: lt.generate(native_of(w.context), PROMPT),
    "an extractor": lambda w: lt.generate(lt.Extractor(w.model), PROMPT),
    "prompts: None": prompts(None),
    "prompts: a number": prompts(5),
    "prompts: none": prompts([]),
    "prompts: bytes": prompts(b"abc"),
    "prompts: a generator": prompts(x for x in [[5]]),
    "prompts: an array of two dimensions": prompts(np.zeros((2, 3), np.int32)),
    "prompts: an empty text": prompts(""),
    "prompts: an empty one": prompts([[5], []]),
    "prompts: floats": prompts([5.0, 6.0]),
    "prompts: bools": prompts([True, False]),
    "prompts: a token beyond the vocabulary": prompts([5, 259]),
    "prompts: a negative token": prompts([[5], [-1]]),
    "prompts: a dict": prompts({5: 6}),
    "prompts: a text and a number": prompts(["a", 5]),
    "max_tokens: 0": options(max_tokens=0),
    "max_tokens: negative": options(max_tokens=-1),
    "max_tokens: a float": options(max_tokens=3.0),
    "max_tokens: None": options(max_tokens=None),
    "max_tokens: a bool": options(max_tokens=True),
    "max_tokens: beyond 32 bits": options(max_tokens=2**31),
    "temperature: negative": options(temperature=-0.1),
    "temperature: NaN": options(temperature=NAN),
    "temperature: infinite": options(temperature=INF),
    "temperature: None": options(temperature=None),
    "temperature: a text": options(temperature="1"),
    "top_k: negative": options(top_k=-1),
    "top_k: a float": options(top_k=1.5),
    "top_p: 0": options(top_p=0.0),
    "top_p: above 1": options(top_p=1.1),
    "min_p: negative": options(min_p=-0.1),
    "min_p: above 1": options(min_p=1.5),
    "repeat_penalty: 0": options(repeat_penalty=0.0),
    "repeat_penalty: NaN": options(repeat_penalty=NAN),
    "frequency_penalty: infinite": options(frequency_penalty=INF),
    "presence_penalty: a list": options(presence_penalty=[1.0]),
    "penalty_last_n: negative": options(penalty_last_n=-1, repeat_penalty=1.1),
    "penalty_last_n: a text": options(penalty_last_n="64"),
    "penalty_last_n: too many": options(penalty_last_n=2**21),
    "seed: negative": options(seed=-1),
    "seed: the engine's word for any": options(seed=2**32 - 1),
    "seed: a float": options(seed=1.0),
    "seed: a bool": options(seed=True),
    "stop: empty": options(stop=""),
    "stop: an empty one": options(stop=["a", ""]),
    "stop: bytes": options(stop=b"ab"),
    "stop: bytes in a list": options(stop=[b"ab"]),
    "stop: a number": options(stop=5),
    "stop: None": options(stop=None),
    "stop: tokens": options(stop=[5, 6]),
    "stop_tokens: a number": options(stop_tokens=5),
    "stop_tokens: None": options(stop_tokens=None),
    "stop_tokens: texts": options(stop_tokens=["a"]),
    "stop_tokens: negative": options(stop_tokens=[-1]),
    "stop_tokens: floats": options(stop_tokens=[5.0]),
    "stop_tokens: beyond 32 bits": options(stop_tokens=[2**31]),
    "stop_tokens: beyond the vocabulary": options(stop_tokens=[259]),
    "ignore_eos: a text": options(ignore_eos="no"),
    "ignore_eos: a number": options(ignore_eos=1),
    "logprobs: negative": options(logprobs=-1),
    "logprobs: a bool": options(logprobs=True),
    "logprobs: too many": options(logprobs=1025),
    "states: a bool": options(states=True),
    "states: another word": options(states="all"),
    "states: a list": options(states=["full"]),
    "states: an array": options(states=np.array(["full", "last"])),
    "layers: out of range": options(states="full", layers=[5]),
    "layers: without states": options(layers=[1]),
    "layers: a float": options(states="full", layers=1.0),
    "layers: another word": options(states="full", layers="last"),
    "rejection: a number": options(rejection=1),
    "stream: a number": options(stream=1),
    "drafter: a number": drafter(5),
    "drafter: a text": drafter("ngram"),
    "drafter: a path": drafter(Path("eagle3.gguf")),
    "drafter: a model among drafters": lambda w: lt.generate(w.context, PROMPT, [w.model]),
    "drafter: a class": drafter(llamatap.NGramDrafter),
    "drafter: no drafters": drafter([]),
    "drafter: None among drafters alone": drafter([None]),
    "drafter: a number among drafters": drafter([llamatap.NGramDrafter(), 5]),
    "drafter: a model": lambda w: lt.generate(w.context, PROMPT, w.model),
}


@pytest.mark.parametrize("name", INVALID)
def test_wrong_arguments_raise_before_anything(name: str, world: World) -> None:
    """Not at the first token, but when generate is called; with a message that says what was found."""
    with pytest.raises(lt.InvalidInputError) as caught:
        INVALID[name](world)
    assert len(str(caught.value)) > 10
    assert is_empty(world.context)


def test_words_of_errors_are_those_of_the_arguments(world: World) -> None:
    wrong: dict[str, Any]
    for wrong, words in (
        ({"max_tokens": 0}, "max_tokens must be in 1.*not 0"),
        ({"stop_tokens": [259]}, "259"),
        ({"seed": -1}, "seed must be in 0.*not -1"),
        ({"states": "all"}, "states must be 'last', 'full' or None, not 'all'"),
        ({"logprobs": -1}, "logprobs must be in 0"),
    ):
        with pytest.raises(lt.InvalidInputError, match=words):
            options(**wrong)(world)
    for wrong_drafter in ("eagle3.gguf", Path("eagle3.gguf"), world.model):
        with pytest.raises(lt.InvalidInputError, match=r"load_drafter\(context"):
            drafter(wrong_drafter)(world)
    prompt: Any
    for prompt in (None, [], np.zeros((2, 3), np.int32)):
        with pytest.raises(lt.InvalidInputError, match="prompt"):
            prompts(prompt)(world)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: [llamatap.NGramDrafter(), d]])
def test_a_drafter_of_another_context_is_refused(wrap: Any, world: World, tmp_path: Path) -> None:
    """In a chain as well: it would be told of texts that are not in its target."""
    with world.model.context(n_ctx=256, n_seq_max=2, **EXACT) as other:
        eagle3 = lt.SpeculativeContext(other, drafters.write_eagle3(tmp_path / "eagle3.gguf"))
        for foreign in (lt.Eagle3Drafter(eagle3), lt.ModelDrafter(other, world.model)):
            for target in (world.context, world.model):
                with pytest.raises(lt.InvalidInputError, match="another context"):
                    lt.generate(target, PROMPT, wrap(foreign), max_tokens=3)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [llamatap.NGramDrafter(), [d]]])
def test_a_draft_context_of_fewer_sequences(wrap: Any, world: World, tmp_path: Path) -> None:
    """No more go at once than it has."""
    path = drafters.write_eagle3(tmp_path / "eagle3.gguf")
    spec = lt.SpeculativeContext(world.context, path, n_seq_max=1, n_threads=1)
    drafter = wrap(lt.Eagle3Drafter(spec))
    found = list(lt.generate(world.context, [PROMPT] * 3, drafter, max_tokens=12, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == [world.expected] * 3
    assert is_empty(world.context)


def test_a_context_that_holds_tokens_is_refused(world: World) -> None:
    world.context.decode(lt.Batch.of([5, 6], seq=1))
    with pytest.raises(lt.InvalidInputError, match=r"sequence 1 .* holds tokens.*clear"):
        lt.generate(world.context, PROMPT)
    assert world.context.memory.last(1) == 1
    world.context.memory.clear()


def test_an_open_tap_is_refused_where_states_are_needed(world: World) -> None:
    """Else it sees the passes of the text."""
    for stream in (False, True):
        with world.context.tap([2]) as tap:
            with pytest.raises(lt.InvalidInputError, match="tap is open"):
                list(lt.generate(world.context, PROMPT, states="last", stream=stream))
            assert is_empty(world.context)
            (found,) = lt.generate(world.context, PROMPT, max_tokens=12, ignore_eos=True)
            assert tap.states.tokens.tolist() == world.expected[-2:-1]
        assert found.tokens.tolist() == world.expected


def test_what_a_drafter_is_made_of_is_none(world: World, tmp_path: Path) -> None:
    spec = lt.SpeculativeContext(world.context, drafters.write_eagle3(tmp_path / "eagle3.gguf"), n_threads=1)
    with pytest.raises(lt.InvalidInputError, match=r"load_drafter\(context"):
        lt.generate(world.context, PROMPT, spec)
    # It does, and says whether it can be used with rejection.
    for temperature in (0.0, 0.5):
        made = lt.load_drafter(world.context, spec, temperature=temperature)
        for drafter in (made, [made], [made, made]):
            if temperature > 0:
                lt.generate(world.context, PROMPT, drafter, rejection=True, temperature=1.0).close()
                continue
            with pytest.raises(lt.InvalidInputError, match="temperature above 0"):
                lt.generate(world.context, PROMPT, drafter, rejection=True, temperature=1.0)
        with pytest.raises(lt.InvalidInputError, match="temperature above 0"):
            lt.generate(world.context, PROMPT, [made, lt.NGramDrafter()], rejection=True)


def test_a_model_that_generates_nothing(world: World, tmp_path: Path) -> None:
    with lt.Model(FILES["bert"]().write(tmp_path / "bert.gguf")) as bert:
        with pytest.raises(lt.UnsupportedError, match="bert models do not generate"):
            lt.generate(bert, [5, 6])
        with bert.context(n_ctx=256) as context, pytest.raises(lt.UnsupportedError):
            lt.generate(context, [5, 6])
    two_way = TinyLlama(causal=False).write(tmp_path / "two-way.gguf")
    with lt.Model(two_way) as model, pytest.raises(lt.UnsupportedError, match="do not generate"):
        lt.generate(model, [5, 6])


def test_what_is_closed_says_so(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    context = model.context(n_ctx=256, **EXACT)
    stream = lt.generate(context, PROMPT, max_tokens=9, ignore_eos=True, stream=True)
    next(stream)
    context.close()
    with pytest.raises(lt.ClosedError):
        next(stream)
    assert list(stream) == []
    with pytest.raises(lt.ClosedError, match="context was closed"):
        lt.generate(context, PROMPT)
    model.close()
    with pytest.raises(lt.ClosedError, match="was closed"):
        lt.generate(model, PROMPT)


def test_a_second_thread_gets_an_error_of_ours(tiny_path: Path) -> None:
    """While the first is in the engine, and while it is between two passes; the first is not disturbed."""
    prompt = np.random.default_rng(0).integers(3, 259, 3000).tolist()
    with lt.Model(tiny_path) as model, model.context(n_ctx=4096, **EXACT) as context:
        expected = by_hand(model, prompt, 3, options={"n_ctx": 4096})
        inside = threading.Event()
        texts: list[list[int]] = []

        class Telling(Noting):
            def draft(self, requests: Mapping[int, Any]) -> Any:
                with pytest.raises(lt.BusyError, match="another generation"):
                    lt.generate(context, PROMPT)
                return super().draft(requests)

        def first() -> None:
            inside.set()
            found = lt.generate(context, prompt, Telling(), max_tokens=3, ignore_eos=True)
            texts.extend(one.tokens.tolist() for one in found)

        thread = threading.Thread(target=first)
        thread.start()
        inside.wait()
        time.sleep(0.05)
        busy = 0
        while thread.is_alive() and not busy:
            # A prompt that is too long, so that nothing is computed should the first be done.
            with contextlib.suppress(lt.InvalidInputError, lt.ContextFullError):
                try:
                    lt.generate(context, [5] * 5000)
                except lt.BusyError:
                    busy += 1
        thread.join()
        assert busy == 1
        assert texts == [expected]
        assert is_empty(context)


def test_threads_that_fight_over_a_context_get_errors_of_ours(tiny_path: Path) -> None:
    """Whoever gets through has the right tokens, and afterwards all is well."""
    with lt.Model(tiny_path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        expected = by_hand(model, PROMPT, 12)
        ended = time.monotonic() + 1.5
        texts: list[list[int]] = []
        done: list[int] = []

        def fight() -> None:
            while time.monotonic() < ended:
                with contextlib.suppress(lt.BusyError, lt.InvalidInputError):
                    drafter = Guessing(259, [[*PROMPT, *expected]])
                    found = lt.generate(context, PROMPT, drafter, max_tokens=12, ignore_eos=True)
                    texts.extend(one.tokens.tolist() for one in found)

            done.append(1)

        threads = [threading.Thread(target=fight) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(done) == 3
        assert texts
        assert all(text == expected for text in texts)
        context.memory.clear()
        World(model, context, expected).check()
