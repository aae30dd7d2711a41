"""Errors in a session are raised as documented: in-flight texts are dropped, and the others go on."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import invalid_arguments
from support.generation import EXACT, PROMPT, CheckedContext, Guessing, Noting, is_empty
from support.sessions import finals
from support.tiny_models import drafters
from support.tiny_models.registry import FILES

import llamatap
from llamatap._engine_context import EngineContext, engine_of
from llamatap._native import native_of

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


class Failing(Guessing):
    """A drafter that knows the text of a `CheckedContext`; one of its methods raises once."""

    def __init__(self, checked: CheckedContext, method: str, countdown: int) -> None:
        super().__init__(checked.model.n_vocab, [[*PROMPT, *checked.expected]], wrong=0.2)
        self.method = method
        self.countdown = countdown

    def _maybe(self, method: str) -> None:
        if method == self.method:
            self.countdown -= 1
            if self.countdown == 0:
                raise LookupError("the cause")

    def process(self, batch: llamatap.Batch, states: llamatap.States | None = None) -> None:
        self._maybe("process")
        super().process(batch, states)

    def draft(self, requests: Mapping[int, llamatap.DraftRequest]) -> Mapping[int, llamatap.Draft]:
        self._maybe("draft")
        return super().draft(requests)

    def accept(self, seq: int, n: int) -> None:
        self._maybe("accept")
        super().accept(seq, n)

    def reset(self, seq: int) -> None:
        self._maybe("reset")
        super().reset(seq)


@dataclass
class Outcome:
    """Outcome of a session's prompts: right texts, and those that were dropped, by step."""

    right: dict[int, list[int]] = field(default_factory=dict)
    dropped: list[tuple[int, ...]] = field(default_factory=list)

    def step(self, session: llamatap.Session, cause: type[BaseException]) -> None:
        try:
            events = session.step()
        except cause:
            assert session.dropped
            self.dropped.append(session.dropped)
            return
        assert session.dropped == ()
        for event in events:
            assert event.index not in sum(self.dropped, ())
            if event.final is not None:
                self.right[event.index] = event.final.tokens.tolist()


def drive(session: llamatap.Session, cause: type[BaseException] = LookupError) -> Outcome:
    """Step until nothing is left, recording what the steps raise."""
    found = Outcome()
    n = session.pending
    while session.pending:
        found.step(session, cause)
    assert sorted([*found.right, *sum(found.dropped, ())]) == list(range(n))
    return found


@pytest.mark.parametrize("countdown", [1, 2, 5])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("cause", [RuntimeError, llamatap.EngineError, KeyboardInterrupt])
def test_a_decode_that_fails(
    cause: type[BaseException],
    drafted: bool,
    countdown: int,
    checked: CheckedContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In-flight texts are dropped, whatever they were doing; waiting ones get the right tokens."""
    calls = 0
    decode = EngineContext.decode

    def failing(context: EngineContext, batch: llamatap.Batch) -> None:
        nonlocal calls
        calls += 1
        if calls == countdown:
            raise cause("the cause")
        decode(context, batch)

    noting = Guessing(checked.model.n_vocab, [[*PROMPT, *checked.expected]]) if drafted else None
    with lt.Session(checked.context, noting) as session:
        for _ in range(4):
            session.add(PROMPT, **OPTIONS)
        monkeypatch.setattr(EngineContext, "decode", failing)
        with pytest.raises(cause, match="the cause"):
            finals(session)
        assert session.dropped == (0, 1)
        assert (session.pending, engine_of(checked.context).capture) == (2, None)
        assert is_empty(checked.context)
        assert noting is None or noting.texts == {}
        session.cancel(0)
        session.add(PROMPT, **OPTIONS)
        found = finals(session)
        assert session.dropped == ()
    assert sorted(found) == [2, 3, 4]
    assert [one.tokens.tolist() for one in found.values()] == [checked.expected] * 3
    assert is_empty(checked.context)


def test_a_decode_for_a_last_state_fails(checked: CheckedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that ended in the same round is dropped with the others: its event is lost."""
    decode = EngineContext.decode

    def failing(context: EngineContext, batch: llamatap.Batch) -> None:
        states = None if context.capture is None else context.capture.states
        if batch.positions.tolist() == [len(PROMPT)] and states is None:
            raise LookupError("the cause")
        decode(context, batch)

    monkeypatch.setattr(EngineContext, "decode", failing)
    with lt.Session(checked.context) as session:
        session.add(PROMPT, max_tokens=1)
        session.add(PROMPT, max_tokens=1, states="last")
        session.add(PROMPT, max_tokens=1, ignore_eos=True)
        with pytest.raises(LookupError):
            session.step()
        assert session.dropped == (0, 1)
        assert [one.tokens.tolist() for one in finals(session).values()] == [checked.expected[:1]]


@pytest.mark.parametrize("countdown", [1, 2, 3, 7])
@pytest.mark.parametrize("method", ["process", "draft", "accept", "reset"])
def test_a_drafter_that_fails(method: str, countdown: int, checked: CheckedContext) -> None:
    failing = Failing(checked, method, countdown)
    with lt.Session(checked.context, failing) as session:
        for _ in range(5):
            session.add(PROMPT, **OPTIONS)
        found = drive(session)
    (dropped,) = found.dropped
    assert 1 <= len(dropped) <= 2
    assert all(tokens == checked.expected for tokens in found.right.values())
    assert is_empty(checked.context)
    assert failing.texts == {}


def test_a_drafter_that_always_fails_ends_with_the_prompts(
    checked: CheckedContext, caplog: pytest.LogCaptureFixture
) -> None:
    """The first error comes out even where the clean-up fails as well."""

    class Broken(Noting):
        def draft(self, requests: Mapping[int, Any]) -> Any:
            self.broken = True
            raise LookupError("the cause")

        def reset(self, seq: int) -> None:
            super().reset(seq)
            if getattr(self, "broken", False):
                self.broken = False
                raise RuntimeError("of the tidying")

    with lt.Session(checked.context, Broken()) as session:
        for _ in range(5):
            session.add(PROMPT, **OPTIONS)
        with caplog.at_level(logging.WARNING, "llamatap"):
            assert drive(session).dropped == [(0, 1), (2, 3), (4,)]
    assert "of the tidying" in caplog.text


def test_wrong_drafts_drop_and_do_not_end(checked: CheckedContext) -> None:
    class Wrong(Noting):
        def draft(self, requests: Mapping[int, Any]) -> Any:
            return 5

    with lt.Session(checked.context, Wrong()) as session:
        session.add(PROMPT, max_tokens=1, ignore_eos=True)
        session.add(PROMPT, **OPTIONS)
        found = drive(session, llamatap.InvalidInputError)
        assert (found.right, found.dropped) == ({0: checked.expected[:1]}, [(1,)])


@pytest.mark.slow
def test_a_memory_that_could_not_be_freed_is_freed_later(tiny_path: Path) -> None:
    """Another thread was in the engine, as a call that came in before the session."""
    with lt.Model(tiny_path) as model, model.context(n_ctx=8192, n_seq_max=3, **EXACT) as context:
        spec = lt.SpeculativeContext(context, tiny_path, as_model=True, n_seq_max=2, n_threads=1)
        with lt.Session(context, lt.ModelDrafter(context, spec)) as session:
            session.add(PROMPT, **OPTIONS)
            session.step()
            batch = lt.Batch.of(np.random.default_rng(0).integers(3, 259, 6000).tolist(), seq=2)
            thread = threading.Thread(target=native_of(context).decode, args=[batch])
            thread.start()
            time.sleep(0.1)
            assert thread.is_alive()
            with pytest.raises(lt.BusyError):
                session.step()
            assert session.dropped == (0,)
            thread.join()
            assert context.memory.last(0) >= 0
            for _ in range(2):
                session.add(PROMPT, **OPTIONS)
            found = finals(session)
            assert found[1].tokens.tolist() == found[2].tokens.tolist()
        assert context.memory.last(0) == context.memory.last(1) == -1


INVALID = {
    name: call
    for name, call in invalid_arguments.INVALID.items()
    if name.partition(":")[0]
    not in (
        "a path for a model",
        "None for a model",
        "the core's context",
        "an extractor",
        "drafter",
        "stream",
    )
}


@pytest.mark.parametrize("name", INVALID)
def test_wrong_arguments_are_refused_as_by_generate(
    name: str, checked: CheckedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the prompt is added. What goes on is not disturbed."""
    with lt.Session(checked.context) as session:
        session.add(PROMPT, **OPTIONS)
        session.step()
        calls = []

        def adding(context: object, prompt: Any, drafter: object = None, **options: Any) -> None:
            calls.append(1)
            many = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
            for one in prompt if many else [prompt]:
                session.add(one, **options)

        monkeypatch.setattr(llamatap, "generate", adding)
        with pytest.raises(lt.InvalidInputError) as caught:
            INVALID[name](checked)
        assert calls
        assert len(str(caught.value)) > 10
        monkeypatch.undo()
        assert finals(session)[0].tokens.tolist() == checked.expected


def test_other_wrong_arguments(checked: CheckedContext, tmp_path: Path) -> None:
    with lt.Session(checked.context) as session:
        for options, words in (
            ({"prompt_states": 1}, "prompt_states must be True or False, not 1"),
            ({"prompt_states": None}, "prompt_states must be True or False"),
            ({"prompt_states": False, "layers": [1]}, "give states=.*prompt_states=True"),
            ({"prompt_states": True, "layers": [5]}, "layer id 5"),
        ):
            with pytest.raises(lt.InvalidInputError, match=words):
                session.add(PROMPT, **options)
        for unknown in ("stream", "n_ctx", "drafter"):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
                session.add(PROMPT, **{unknown: True})
        with pytest.raises(lt.ContextFullError, match=r"the prompt has 513 tokens; .* room for 512"):
            session.add([5] * 513)
        for index in (0, -1, 1.0, True, None, "0"):
            with pytest.raises(lt.InvalidInputError):
                session.cancel(index)
        assert (session.pending, session.step()) == (0, [])
        assert session.add([5] * 512, max_tokens=3) == 0
        assert session.step()[-1].final.finish_reason == "context"
        with pytest.raises(lt.InvalidInputError, match="no prompt 1; 1 were added"):
            session.cancel(1)
    with (
        lt.Session(checked.context, lt.NGramDrafter()) as session,
        pytest.raises(lt.InvalidInputError, match="temperature above 0"),
    ):
        session.add(PROMPT, rejection=True)
    for context in (None, checked.model, native_of(checked.context)):
        with pytest.raises(lt.InvalidInputError, match="context must be a Context"):
            lt.Session(context)
    with pytest.raises(lt.InvalidInputError, match="drafter must be"):
        lt.Session(checked.context, 5)
    with checked.model.context(n_ctx=256, **EXACT) as other:
        eagle3 = lt.SpeculativeContext(other, drafters.write_eagle3(tmp_path / "eagle3.gguf"), n_threads=1)
        with pytest.raises(lt.InvalidInputError, match="another context"):
            lt.Session(checked.context, lt.Eagle3Drafter(eagle3))
        other.decode(lt.Batch.of([5]))
        with pytest.raises(lt.InvalidInputError, match="holds tokens"):
            lt.Session(other)
    with (
        lt.Model(FILES["bert"]().write(tmp_path / "bert.gguf")) as bert,
        bert.context(n_ctx=256) as context,
        pytest.raises(lt.UnsupportedError),
    ):
        lt.Session(context)


def test_a_session_has_its_context_and_drafter_for_itself(checked: CheckedContext) -> None:
    drafter = Guessing(checked.model.n_vocab)
    with checked.model.context(n_ctx=256, **EXACT) as other, lt.Session(checked.context, drafter) as session:
        for call in (
            lambda: lt.Session(checked.context),
            lambda: lt.generate(checked.context, PROMPT),
            lambda: lt.Session(other, [drafter]),
            lambda: lt.generate(other, PROMPT, drafter),
            lambda: checked.context.decode(lt.Batch.of([5])),
            lambda: checked.context.memory.clear(),
        ):
            with pytest.raises(lt.BusyError):
                call()
        session.add(PROMPT, **OPTIONS)
        assert finals(session)[0].tokens.tolist() == checked.expected
    stream = lt.generate(checked.context, PROMPT, stream=True)
    next(stream)
    with pytest.raises(lt.BusyError):
        lt.Session(checked.context)
    stream.close()


def test_one_thread_at_a_time_is_in_a_step(checked: CheckedContext) -> None:
    """Nor may it be closed then; adding and cancelling go on."""
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Noting):
        def process(self, batch: llamatap.Batch, states: llamatap.States | None = None) -> None:
            super().process(batch, states)
            calls: list[Callable[[], Any]] = [session.step, session.close]
            for call in calls:
                with pytest.raises(lt.BusyError, match="step"):
                    call()
            inside.set()
            assert go_on.wait(60)

    found: dict[int, Any] = {}
    with lt.Session(checked.context, Waiting()) as session:
        session.add(PROMPT, **OPTIONS)
        thread = threading.Thread(target=lambda: found.update(finals(session)))
        thread.start()
        assert inside.wait(60)
        for call in (session.step, session.close):
            with pytest.raises(lt.BusyError, match="one thread at a time"):
                call()
        assert not session.closed
        assert session.add(PROMPT, **OPTIONS) == 1
        assert session.add(PROMPT, **OPTIONS) == 2
        session.cancel(2)
        assert session.pending == 3
        go_on.set()
        thread.join()
        assert [found[index].tokens.tolist() for index in range(3)] == [checked.expected] * 2 + [[]]


def test_what_is_closed_says_so(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    context = model.context(n_ctx=256, **EXACT)
    session = lt.Session(context)
    session.add(PROMPT, **OPTIONS)
    session.step()
    session.close()
    for call in (session.step, lambda: session.add(PROMPT)):
        with pytest.raises(lt.ClosedError, match="session was closed"):
            call()
    assert is_empty(context)
    session = lt.Session(context)
    session.add(PROMPT, **OPTIONS)
    session.step()
    context.close()
    with pytest.raises(lt.ClosedError, match="context was closed"):
        session.step()
    assert (session.dropped, session.pending, session.step()) == ((0,), 0, [])
    model.close()
    with pytest.raises(lt.ClosedError, match=r"the model .* was closed"):
        session.add(PROMPT)
    session.close()
    with pytest.raises(lt.ClosedError):
        lt.Session(context)


def test_what_ends_the_block_comes_out(checked: CheckedContext) -> None:
    """The error of the block comes out even if closing raises as well."""

    class Failing(Noting):
        def reset(self, seq: int) -> None:
            super().reset(seq)
            if self.batches:
                raise RuntimeError("of the tidying")

    session = lt.Session(checked.context, Failing())
    session.add(PROMPT, **OPTIONS)

    def block() -> None:
        with session:
            session.step()
            raise LookupError("the cause")

    with pytest.raises(LookupError, match="the cause"):
        block()
    assert session.closed
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(session)
