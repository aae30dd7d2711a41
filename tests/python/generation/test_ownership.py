"""A generation owns its context and its drafter until it ends; others get an error that says so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, PROMPT, CheckedContext, Guessing, Noting, is_empty

import llamatap as lt
from llamatap._engine_context import engine_of
from llamatap._native import native_of

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


CHANGES: dict[str, Callable[[lt.Context], Any]] = {
    "clear": lambda c: c.memory.clear(),
    "remove": lambda c: c.memory.remove(0, 0, 4),
    "copy": lambda c: c.memory.copy(0, 1),
    "keep": lambda c: c.memory.keep(1),
    "shift": lambda c: c.memory.shift(0, 0, None, 1),
    "decode": lambda c: c.decode(lt.Batch.of([5, 6], seq=1)),
    "restore": lambda c: c.restore(1, c.save(0)),
    "generate": lambda c: lt.generate(c, PROMPT),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_memory_is_not_changed_under_a_generation(name: str, checked: CheckedContext) -> None:
    """Refused between rounds, from inside its drafter, and while it holds nothing for a moment."""

    class Meddling(Guessing):
        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            super().process(batch, states)
            with pytest.raises(lt.BusyError, match="in use by a generation"):
                CHANGES[name](checked.context)

    with checked.model.context(n_ctx=256, **EXACT) as context:
        tokens: list[list[int]] = [[], []]
        for event in lt.generate(context, [PROMPT] * 2, stream=True, **OPTIONS):
            tokens[event.index].append(event.token)
            if event.index == 0 or event.final is None:
                with pytest.raises(lt.BusyError, match="in use by a generation"):
                    CHANGES[name](context)
        assert tokens == [checked.expected] * 2
        CHANGES["clear"](context)
    drafter = Meddling(checked.model.n_vocab, [[*PROMPT, *checked.expected]])
    (found,) = lt.generate(checked.context, PROMPT, drafter, **OPTIONS)
    assert found.tokens.tolist() == checked.expected


def test_a_drafter_may_look_at_the_context(checked: CheckedContext) -> None:
    class Looking(Noting):
        target_layers = (1,)
        saved = b""

        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            super().process(batch, states)
            assert states is not None
            assert states.tokens.tolist() == batch.tokens.tolist()
            assert states.layers == (1,)
            assert checked.context.memory.last(0) >= 0
            self.saved = checked.context.save(0)

    drafter = Looking()
    (found,) = lt.generate(checked.context, PROMPT, drafter, **OPTIONS)
    assert found.tokens.tolist() == checked.expected
    checked.context.restore(0, drafter.saved)
    assert checked.context.memory.last(0) == len(PROMPT) + 10
    checked.context.memory.clear()


@pytest.mark.parametrize("stream", [False, True])
def test_with_its_last_result_it_is_over(stream: bool, checked: CheckedContext) -> None:
    """The generation ends with its last result, without a further call of next()."""
    drafter = lt.NGramDrafter()
    events: Any = lt.generate(
        checked.context, PROMPT, drafter, states="last", **{"stream": stream, **OPTIONS}
    )
    for event in events:
        if not stream or event.final is not None:
            break
    assert engine_of(checked.context).capture is None
    assert is_empty(checked.context)
    (other,) = lt.generate(checked.context, PROMPT, drafter, **OPTIONS)
    assert other.tokens.tolist() == checked.expected
    assert list(events) == []


@pytest.mark.slow
def test_a_context_that_another_thread_uses_at_the_end_is_not_busy_for_ever(tiny_path: Path) -> None:
    """The memory cannot be freed then, which is said; the generation is over all the same."""
    with lt.Model(tiny_path) as model, model.context(n_ctx=8192, n_seq_max=2, **EXACT) as context:
        stream = lt.generate(context, PROMPT, Noting(), stream=True, **OPTIONS)
        next(stream)
        batch = lt.Batch.of(np.random.default_rng(0).integers(3, 259, 6000).tolist(), seq=1)
        # As a call that came in before the generation.
        thread = threading.Thread(target=native_of(context).decode, args=[batch])
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
        with pytest.raises(lt.BusyError):
            stream.close()
        thread.join()
        with pytest.raises(lt.InvalidInputError, match="holds tokens"):
            lt.generate(context, PROMPT)
        context.memory.clear()
        (found,) = lt.generate(context, PROMPT, **OPTIONS)
        assert len(found.tokens) == 12


def test_a_context_is_given_back_whatever_ends_the_tidying(checked: CheckedContext) -> None:
    class Impatient(Noting):
        impatient = False

        def reset(self, seq: int) -> None:
            super().reset(seq)
            if self.impatient:
                raise KeyboardInterrupt

    drafter = Impatient()
    stream = lt.generate(checked.context, [PROMPT] * 2, drafter, stream=True, **OPTIONS)
    next(stream)
    drafter.impatient = True
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    drafter.impatient = False
    assert is_empty(checked.context)
    (found,) = lt.generate(checked.context, PROMPT, drafter, **OPTIONS)
    assert found.tokens.tolist() == checked.expected


def test_the_first_cause_comes_out(checked: CheckedContext, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Noting):
        failed = False

        def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
            self.failed = True
            raise LookupError("the cause")

        def reset(self, seq: int) -> None:
            if self.failed:
                raise RuntimeError("of the tidying")

    with caplog.at_level(logging.WARNING, "llamatap"), pytest.raises(LookupError, match="the cause"):
        list(lt.generate(checked.context, [PROMPT] * 2, Failing(), **OPTIONS))
    assert "of the tidying" in caplog.text
    # Without another cause it is raised itself.
    failing = Failing()
    stream = lt.generate(checked.context, PROMPT, failing, stream=True, **OPTIONS)
    next(stream)
    failing.failed = True
    with pytest.raises(RuntimeError, match="of the tidying"):
        stream.close()


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: [lt.NGramDrafter(), [d]]])
def test_a_drafter_is_of_one_generation_at_a_time(wrap: Any, checked: CheckedContext) -> None:
    drafter = Guessing(checked.model.n_vocab, [[*PROMPT, *checked.expected]])
    with checked.model.context(n_ctx=256, **EXACT) as other:
        late = lt.generate(other, PROMPT, wrap(drafter), **OPTIONS)
        stream = lt.generate(checked.context, PROMPT, wrap(drafter), stream=True, **OPTIONS)
        tokens = [next(stream).token]
        with pytest.raises(lt.BusyError, match="drafter is in use"):
            lt.generate(other, PROMPT, wrap(drafter), **OPTIONS)
        with pytest.raises(lt.BusyError, match="drafter is in use"):
            next(late)
        tokens += [event.token for event in stream]
        assert tokens == checked.expected
        (found,) = lt.generate(other, PROMPT, wrap(drafter), **OPTIONS)
        assert found.tokens.tolist() == checked.expected


def test_what_a_drafter_knows_from_before_is_forgotten(checked: CheckedContext) -> None:
    """The drafter was driven by hand before and never reset."""
    known: list[lt.Drafter] = [
        lt.NGramDrafter(2, 1),
        Noting(),
        lt.CallableDrafter(lambda tokens: tokens[-2:]),
    ]
    for drafter in known:
        drafter.process(lt.Batch.of([7, 8, 9], seq=0))
        drafter.process(lt.Batch.of([7, 8], seq=1))
        found = list(lt.generate(checked.context, [PROMPT] * 2, drafter, **OPTIONS))
        assert [one.tokens.tolist() for one in found] == [checked.expected] * 2
