"""Wrong calls of generate raise the documented error, and the next text is right.

Drafters that are wrong are in test_bad_drafters.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, PROMPT, CheckedContext, Guessing, Noting, by_hand, is_empty
from support.invalid_arguments import INVALID, with_drafter, with_options, with_prompts
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.registry import FILES

import llamatap

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap


@pytest.mark.parametrize("name", INVALID)
def test_wrong_arguments_raise_before_anything(name: str, checked: CheckedContext) -> None:
    """They raise when generate is called, not at the first token, with a message that names the value."""
    with pytest.raises(lt.InvalidInputError) as caught:
        INVALID[name](checked)
    assert len(str(caught.value)) > 10
    assert is_empty(checked.context)


def test_words_of_errors_are_those_of_the_arguments(checked: CheckedContext) -> None:
    wrong: dict[str, Any]
    for wrong, words in (
        ({"max_tokens": 0}, "max_tokens must be in 1.*not 0"),
        ({"stop_tokens": [259]}, "259"),
        ({"seed": -1}, "seed must be in 0.*not -1"),
        ({"states": "all"}, "states must be 'last', 'full' or None, not 'all'"),
        ({"logprobs": -1}, "logprobs must be in 0"),
    ):
        with pytest.raises(lt.InvalidInputError, match=words):
            with_options(**wrong)(checked)
    for wrong_drafter in ("eagle3.gguf", Path("eagle3.gguf"), checked.model):
        with pytest.raises(lt.InvalidInputError, match=r"load_drafter\(context"):
            with_drafter(wrong_drafter)(checked)
    prompt: Any
    for prompt in (None, [], np.zeros((2, 3), np.int32)):
        with pytest.raises(lt.InvalidInputError, match="prompt"):
            with_prompts(prompt)(checked)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: [llamatap.NGramDrafter(), d]])
def test_a_drafter_of_another_context_is_refused(wrap: Any, checked: CheckedContext, tmp_path: Path) -> None:
    """Chains are refused as well: the drafter would be fed texts that its target does not hold."""
    with checked.model.context(n_ctx=256, n_seq_max=2, **EXACT) as other:
        eagle3 = lt.SpeculativeContext(other, drafters.write_eagle3(tmp_path / "eagle3.gguf"))
        for foreign in (lt.Eagle3Drafter(eagle3), lt.ModelDrafter(other, checked.model)):
            for target in (checked.context, checked.model):
                with pytest.raises(lt.InvalidInputError, match="another context"):
                    lt.generate(target, PROMPT, wrap(foreign), max_tokens=3)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [llamatap.NGramDrafter(), [d]]])
def test_a_draft_context_of_fewer_sequences(wrap: Any, checked: CheckedContext, tmp_path: Path) -> None:
    """No more texts run at once than the draft context has sequences."""
    path = drafters.write_eagle3(tmp_path / "eagle3.gguf")
    spec = lt.SpeculativeContext(checked.context, path, n_seq_max=1, n_threads=1)
    drafter = wrap(lt.Eagle3Drafter(spec))
    found = list(lt.generate(checked.context, [PROMPT] * 3, drafter, max_tokens=12, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == [checked.expected] * 3
    assert is_empty(checked.context)


def test_a_context_that_holds_tokens_is_refused(checked: CheckedContext) -> None:
    checked.context.decode(lt.Batch.of([5, 6], seq=1))
    with pytest.raises(lt.InvalidInputError, match=r"sequence 1 .* holds tokens.*clear"):
        lt.generate(checked.context, PROMPT)
    assert checked.context.memory.last(1) == 1
    checked.context.memory.clear()


def test_an_open_tap_is_refused_where_states_are_needed(checked: CheckedContext) -> None:
    """Without states asked for, the tap sees the passes of the text."""
    for stream in (False, True):
        with checked.context.tap([2]) as tap:
            with pytest.raises(lt.InvalidInputError, match="already has an open tap"):
                list(lt.generate(checked.context, PROMPT, states="last", stream=stream))
            assert is_empty(checked.context)
            (found,) = lt.generate(checked.context, PROMPT, max_tokens=12, ignore_eos=True)
            assert tap.states.tokens.tolist() == checked.expected[-2:-1]
        assert found.tokens.tolist() == checked.expected


def test_what_a_drafter_is_made_of_is_none(checked: CheckedContext, tmp_path: Path) -> None:
    spec = lt.SpeculativeContext(
        checked.context, drafters.write_eagle3(tmp_path / "eagle3.gguf"), n_threads=1
    )
    with pytest.raises(lt.InvalidInputError, match=r"load_drafter\(context"):
        lt.generate(checked.context, PROMPT, spec)
    # load_drafter makes a drafter of it, and says whether it can be used with rejection.
    for temperature in (0.0, 0.5):
        made = lt.load_drafter(checked.context, spec, temperature=temperature)
        for drafter in (made, [made], [made, made]):
            if temperature > 0:
                lt.generate(checked.context, PROMPT, drafter, rejection=True, temperature=1.0).close()
                continue
            with pytest.raises(lt.InvalidInputError, match="temperature above 0"):
                lt.generate(checked.context, PROMPT, drafter, rejection=True, temperature=1.0)
        with pytest.raises(lt.InvalidInputError, match="temperature above 0"):
            lt.generate(checked.context, PROMPT, [made, lt.NGramDrafter()], rejection=True)


def test_a_model_that_generates_nothing(checked: CheckedContext, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_second_thread_gets_an_error_of_ours(tiny_path: Path) -> None:
    """While the first is in the engine, and while it is between two passes; the first is not disturbed."""
    prompt = np.random.default_rng(0).integers(3, 259, 3000).tolist()
    with lt.Model(tiny_path) as model, model.context(n_ctx=4096, **EXACT) as context:
        expected = by_hand(model, prompt, 3, options={"n_ctx": 4096})
        inside = threading.Event()
        texts: list[list[int]] = []

        class Telling(Noting):
            def draft(self, requests: Mapping[int, Any]) -> Any:
                with pytest.raises(lt.BusyError, match="in use by a generation"):
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
    """A thread that gets through has the right tokens, and the context works afterwards."""
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
        CheckedContext(model, context, expected).check()
