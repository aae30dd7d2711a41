"""Sessions, generators and taps that lose their last reference free what they held.

They do so at once where they are in no cycle, and silently at the exit of the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.generation import EXACT, Noting, is_empty

import llamatap as lt
from llamatap._engine_context import engine_of

OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def context(tiny_model: lt.Model) -> Iterator[lt.Context]:
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        yield context


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Switch the garbage collector off, so that only reference counts free objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def begun(context: lt.Context, drafter: lt.Drafter | None = None) -> lt.Session:
    session = lt.Session(context, drafter)
    for prompt in ("hello", "you", "waits"):
        session.add(prompt, **OPTIONS)
    while not session.step():
        pass
    session.step()
    assert not is_empty(context)
    return session


def assert_free(context: lt.Context, *drafters: lt.Drafter) -> None:
    assert engine_of(context).owner is None
    assert is_empty(context)
    context.memory.clear()
    for drafter in drafters or (None,):
        (found,) = lt.generate(context, "x", drafter, max_tokens=3, ignore_eos=True)
        assert len(found.tokens) == 3


def test_a_lost_session(context: lt.Context) -> None:
    session = lt.Session(context)
    with pytest.raises(lt.BusyError):
        lt.generate(context, "x")
    del session
    assert_free(context)


def test_a_lost_session_with_texts_under_way(context: lt.Context) -> None:
    noting = Noting()
    begun(context, noting)
    assert noting.texts == {}
    assert_free(context, noting)


def test_drafters_in_a_list_are_free_again(context: lt.Context) -> None:
    noting, ngrams = Noting(), lt.NGramDrafter()
    session = lt.Session(context, [noting, ngrams])
    session.add("hello", **OPTIONS)
    session.step()
    for drafter in (noting, ngrams):
        with pytest.raises(lt.BusyError):
            lt.generate(context, "x", drafter)
    del session
    assert_free(context, noting, ngrams)


def test_a_session_is_lost_whichever_thread_loses_it(context: lt.Context) -> None:
    held = [begun(context)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert_free(context)


@pytest.mark.slow
def test_a_lost_session_in_a_cycle(context: lt.Context) -> None:
    """The session is in a cycle through `on_states`; the collector frees it while the context is in use."""

    class Keeper:
        def __init__(self, context: lt.Context, drafter: lt.Drafter) -> None:
            self.session = lt.Session(context, drafter)
            self.session.add("hello", states="full", on_states=self.keep, **OPTIONS)
            self.session.step()

        def keep(self, generation: lt.Generation) -> None:
            raise AssertionError("nothing is finished")

    noting = Noting()
    Keeper(context, noting)
    gc.collect()
    assert_free(context, noting)


def test_lost_with_its_context(tiny_model: lt.Model) -> None:
    context = tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT)
    session = begun(context)
    gone = weakref.ref(context)
    del context, session
    assert gone() is None


@pytest.mark.parametrize("what", ["context", "drafter"])
def test_lost_after_what_it_used_was_closed(what: str, tiny_model: lt.Model, capfd: Any, caplog: Any) -> None:
    context = tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT)
    drafter = lt.ModelDrafter(context, tiny_model)
    session = begun(context, drafter)
    (context if what == "context" else drafter.spec).close()
    del session
    assert engine_of(context).owner is None
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_a_session_whose_making_failed_is_no_trouble(context: lt.Context, capfd: Any) -> None:
    context.decode(lt.Batch.of([5]))
    with pytest.raises(lt.InvalidInputError, match="holds tokens"):
        lt.Session(context)
    with pytest.raises(lt.InvalidInputError):
        lt.Session("x")  # type: ignore[arg-type]
    context.memory.clear()
    assert_free(context)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_generator(stream: bool, context: lt.Context) -> None:
    noting = Noting()
    results: Any = lt.generate(
        context, ["a", "bcd"], noting, stream=stream, max_tokens=3 if not stream else 40
    )
    next(results)
    del results
    assert_free(context, noting)


@pytest.mark.slow
def test_the_context_that_a_lost_generator_made(tiny_model: lt.Model) -> None:
    def contexts() -> weakref.WeakSet[lt.Context]:
        return weakref.WeakSet(one for one in gc.get_objects() if isinstance(one, lt.Context))

    before = contexts()
    events = lt.generate(tiny_model, "abc", stream=True, **OPTIONS)
    next(events)
    made = weakref.WeakSet(contexts() - before)
    assert len(made) == 1
    del events
    assert len(made) == 0


def test_an_abandoned_loop(context: lt.Context) -> None:
    def abandon(_: object) -> None:
        raise ZeroDivisionError

    def loop() -> None:
        for event in lt.generate(context, "abc", stream=True, **OPTIONS):
            abandon(event)

    with pytest.raises(ZeroDivisionError):
        loop()
    assert_free(context)


def test_a_lost_tap(context: lt.Context) -> None:
    tap = context.tap([1]).__enter__()
    context.decode(lt.Batch.of([5, 6]))
    capture = engine_of(context).capture
    assert capture is not None
    assert capture.states is tap.states
    del capture
    gone = weakref.ref(tap)
    del tap
    assert gone() is None
    assert engine_of(context).capture is None
    with context.tap([2]):
        # The with block holds it, though it has no name.
        context.decode(lt.Batch.of([7], pos0=2))
        capture = engine_of(context).capture
        assert capture is not None
        assert capture.states is not None
        assert capture.states.layers == (2,)
        with pytest.raises(lt.InvalidInputError, match="already has an open tap"):
            context.tap([3]).__enter__()
    assert engine_of(context).capture is None


@pytest.mark.slow
def test_the_exit_of_the_interpreter_is_quiet(tiny_path: Path, tmp_path: Path) -> None:
    """The objects are still alive at exit, held by a module's name and by one that outlives the package."""
    keeper = tmp_path / "keeper.py"
    keeper.write_text(
        "kept = []\n"
        "def fill(path):\n"
        "    import llamatap as lt\n"
        "    model = lt.Model(path)\n"
        "    context = model.context(n_ctx=256, n_seq_max=2)\n"
        "    session = lt.Session(context, lt.NGramDrafter())\n"
        "    session.add('hello', max_tokens=50, ignore_eos=True)\n"
        "    session.step()\n"
        "    events = lt.generate(model, 'x', stream=True, max_tokens=50, ignore_eos=True)\n"
        "    next(events)\n"
        "    other = model.context(n_ctx=256)\n"
        "    tap = other.tap([1])\n"
        "    tap.__enter__()\n"
        "    kept.extend([session, events, tap])\n"
        "    return kept\n"
    )
    endings = ("", "; keeper.kept.append(keeper.kept)", "; import builtins; builtins.kept = keeper.kept")
    for ending in (*endings, "; (session, events, tap) = keeper.kept; keeper.kept.clear()"):
        code = f"import keeper; keeper.fill({str(tiny_path)!r}){ending}"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), ending
