"""Misused drafters raise the documented error, and the next draft is right."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafting import EXACT, PAIRS, Loop, Pair, add, assert_drafted, opened, random_text

import llamatap as lt

KINDS = ["eagle3", "mtp", "mtp 3 heads", "model"]
N_SEQ = 3


class Twice(Mapping[int, lt.DraftRequest]):
    """A mapping that gives each request twice, which no dict does."""

    def __init__(self, requests: Mapping[int, lt.DraftRequest]) -> None:
        self.requests = requests

    def __getitem__(self, seq: int) -> lt.DraftRequest:
        return self.requests[seq]

    def __iter__(self) -> Iterator[int]:
        return (seq for seq in self.requests for _ in range(2))

    def __len__(self) -> int:
        return 2 * len(self.requests)


def asked(seq: Any = 0, last: Any = 50, offset: int = 0, n_max: Any = 4) -> Callable[[Loop], Any]:
    """A wrong request. The text of sequence 0 has 9 tokens, of which 8 were processed."""
    return lambda loop: loop.drafter.draft({seq: lt.DraftRequest(last, 8 + offset, n_max)})


def shown(*entries: tuple[int, int, int]) -> Callable[[Loop], Any]:
    """A batch that the target decodes and the drafter must refuse."""

    def call(loop: Loop) -> None:
        try:
            loop.feed(entries)
        finally:
            for _, position, seq in entries:
                if position < 100:
                    loop.context.memory.remove(seq, position)

    return call


def skipped(*entries: tuple[int, int, int]) -> Callable[[Loop], Any]:
    """Like shown(), but the drafter has missed the previous token of sequence 1."""

    def call(loop: Loop) -> None:
        loop.context.decode(add(lt.Batch(), [(60, 0, 1)]))
        try:
            loop.feed(entries)
        finally:
            loop.context.memory.remove(1)
            loop.context.memory.remove(0, 8)

    return call


MISUSE: dict[str, Callable[[Loop], Any]] = {
    "a sequence of which nothing was processed": lambda loop: loop.drafter.draft(
        {1: lt.DraftRequest(5, 0, 4)}
    ),
    "the same, further on": lambda loop: loop.drafter.draft({1: lt.DraftRequest(5, 8, 4)}),
    "a position too far": asked(offset=1),
    "a position too early": asked(offset=-1),
    "a negative position": asked(offset=-9),
    "a position beyond 32 bits": asked(offset=2**40),
    "a sequence twice": lambda loop: loop.drafter.draft(Twice(loop.requests([0]))),
    "one right, one wrong": lambda loop: loop.drafter.draft(
        {**loop.requests([0]), 1: lt.DraftRequest(5, 0, 4)}
    ),
    "a sequence id that is none": asked(seq=N_SEQ),
    "a negative sequence id": asked(seq=-1),
    "a sequence id of text": asked(seq="0"),
    "a last token beyond": asked(last=259),
    "a negative last token": asked(last=-1),
    "a last token that is a fraction": asked(last=5.0),
    "no last token": asked(last=None),
    "n_max a fraction": asked(n_max=1.5),
    "n_max beyond 32 bits": asked(n_max=2**40),
    "accept of more than there were": lambda loop: loop.drafter.accept(0, 8),
    "accept of a negative number": lambda loop: loop.drafter.accept(0, -1),
    "accept of a fraction": lambda loop: loop.drafter.accept(0, 1.0),  # type: ignore[arg-type]
    "accept where nothing was processed": lambda loop: loop.drafter.accept(1, 0),
    "accept of no sequence": lambda loop: loop.drafter.accept(N_SEQ, 0),
    "reset of no sequence": lambda loop: loop.drafter.reset(N_SEQ),
    "reset of a negative id": lambda loop: loop.drafter.reset(-1),
    "process of no batch": lambda loop: loop.drafter.process([5]),  # type: ignore[arg-type]
    "process of a batch that was not seen from its start": skipped((61, 1, 1)),
    "process of two sequences, one of them wrong": skipped((61, 1, 1), (7, 8, 0), (8, 9, 0)),
    "the wrong one last": skipped((7, 8, 0), (8, 9, 0), (61, 1, 1)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mistake", MISUSE)
@pytest.mark.parametrize("name", KINDS)
def test_a_mistake_raises_and_changes_nothing(
    name: str, mistake: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with opened(PAIRS[name](tmp_path), n_seq_max=N_SEQ) as loop:
        text = random_text(rng, 9)
        loop.start({0: text})
        expected = loop.draft()[0]
        for drafted in (True, False):
            with pytest.raises(lt.InvalidInputError) as caught:
                MISUSE[mistake](loop)
            assert str(caught.value)
            found = loop.draft()
            assert found.keys() == {0}
            assert found[0].tokens.tolist() == expected.tokens.tolist()
            if drafted:
                # Now with all of the text waiting.
                loop.reset(0)
                loop.start({0: text})


def with_tap(*args: Any, **options: Any) -> Callable[[Loop, lt.Batch], None]:
    def call(loop: Loop, batch: lt.Batch) -> None:
        with loop.context.tap(*args, **options) as tap:
            loop.context.decode(batch)
        loop.drafter.process(batch, tap.states)

    return call


def without_states(loop: Loop, batch: lt.Batch) -> None:
    with loop.context.tap(layers=loop.drafter.target_layers):
        loop.context.decode(batch)
    loop.drafter.process(batch)


def with_an_array(loop: Loop, batch: lt.Batch) -> None:
    with loop.context.tap(layers=loop.drafter.target_layers) as tap:
        loop.context.decode(batch)
    loop.drafter.process(batch, tap.states.array)  # type: ignore[arg-type]


def before_the_decode(loop: Loop, batch: lt.Batch) -> None:
    with loop.context.tap(layers=loop.drafter.target_layers) as tap:
        loop.drafter.process(batch, tap.states)


def of_another_batch(*entries: tuple[int, int, int]) -> Callable[[Loop, lt.Batch], None]:
    def call(loop: Loop, batch: lt.Batch) -> None:
        with loop.context.tap(layers=loop.drafter.target_layers) as tap:
            loop.context.decode(batch)
        loop.drafter.process(add(lt.Batch(), entries), tap.states)

    return call


def of_embeddings(loop: Loop, batch: lt.Batch) -> None:
    embeddings = lt.Batch(n_embd=64)
    for position in (8, 9):
        embeddings.add_embedding(np.ones(64, np.float32), position)
    loop.show(embeddings)


TAPS: dict[str, tuple[Callable[[Loop, lt.Batch], None], str]] = {
    "no states": (without_states, r"with context.tap\(layers="),
    "an array": (with_an_array, "states must be a States"),
    "nothing decoded": (before_the_decode, "nothing was decoded"),
    "outputs alone": (with_tap(range(4), rows="outputs"), "rows='all'"),
    "a layer is missing": (with_tap([0]), r"layers \[0\]"),
    "another dtype": (with_tap(range(4), dtype="float16"), "float16"),
    "another batch": (of_another_batch((50, 8, 0)), "2 tokens, but the batch has 1"),
    "another batch as long": (of_another_batch((40, 8, 0), (42, 9, 0)), "states of its own decode"),
    "embeddings": (of_embeddings, "token ids"),
}


@pytest.mark.parametrize("wrong", TAPS)
@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp 3 heads"])
def test_states_that_are_not_there_are_asked_for(
    name: str, wrong: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    call, words = TAPS[wrong]
    pair = PAIRS[name](tmp_path)
    with opened(pair) as loop:
        loop.start({0: random_text(rng, 9)})
        batch = add(lt.Batch(), [(40, 8, 0), (41, 9, 0)])
        with pytest.raises(lt.InvalidInputError, match=words):
            call(loop, batch)
        assert_drafted(loop.draft(n=3).get(0), pair.oracle, loop.texts[0], 3)
        # A tap of more layers, in another order, serves as well.
        loop.context.memory.remove(0, 8)
        n = loop.context.model.n_layer
        with loop.context.tap(layers=[n, 0, *range(n, -1, -1), "norm"]) as tap:
            loop.context.decode(batch)
        loop.drafter.process(batch, tap.states)
        loop.texts[0][8:] = [40, 41, 42]
        assert_drafted(loop.draft(n=3).get(0), pair.oracle, loop.texts[0], 3)


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_more_sequences_than_the_draft_has(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pair = PAIRS[name](tmp_path)
    with (
        lt.Model(pair.target, load_mtp=True) as model,
        model.context(n_ctx=256, n_seq_max=2, **EXACT) as context,
        lt.SpeculativeContext(context, pair.draft or model, n_seq_max=1, **EXACT) as spec,
    ):
        maker = lt.Eagle3Drafter if name == "eagle3" else lt.MtpDrafter
        loop = Loop(context, maker(spec))
        loop.start({0: random_text(rng, 5)})
        with pytest.raises(lt.InvalidInputError, match="1"):
            loop.feed([(5, 0, 1)])
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], 4)


def test_a_drafter_is_made_for_one_kind_of_file(tmp_path: Path) -> None:
    makers: dict[str, Callable[..., lt.Drafter]] = {
        "eagle3": lt.Eagle3Drafter,
        "mtp": lt.MtpDrafter,
        "model": lambda spec: lt.ModelDrafter(spec.target, spec),
    }
    for kind in makers:
        with opened(PAIRS[kind](tmp_path)) as loop:
            assert isinstance(loop.drafter, (lt.Eagle3Drafter, lt.MtpDrafter, lt.ModelDrafter))
            spec = loop.drafter.spec
            for other, make in makers.items():
                if other != kind:
                    with pytest.raises(lt.InvalidInputError, match=f"kind {other}.*of kind {kind}"):
                        make(spec)
            for make in (lt.Eagle3Drafter, lt.MtpDrafter):
                with pytest.raises(lt.InvalidInputError, match="SpeculativeContext"):
                    make(loop.context)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KINDS)
def test_threads_that_share_a_drafter_get_errors_of_ours(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_seq_max=2) as loop:
        loop.start({0: random_text(rng, 9)})
        expected = loop.draft()[0].tokens.tolist()
        found: list[list[int]] = []
        wrong: list[BaseException] = []

        def work() -> None:
            for _ in range(150):
                try:
                    found.append(loop.draft([0])[0].tokens.tolist())
                    loop.drafter.accept(0, 0)
                    loop.drafter.reset(1)
                except lt.BusyError:  # noqa: PERF203
                    pass
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert found
        assert all(tokens == expected for tokens in found)
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], len(expected))


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp 3 heads"])
def test_another_thread_at_the_draft_context_changes_no_draft(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The other thread decodes its own sequence: either may find it busy, and results never mix."""
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_seq_max=2) as loop:
        assert isinstance(loop.drafter, (lt.Eagle3Drafter, lt.MtpDrafter))
        spec = loop.drafter.spec
        loop.start({0: random_text(rng, 9)})
        expected = loop.draft()[0].tokens.tolist()
        stop = threading.Event()
        wrong: list[BaseException] = []
        states = np.ones((3, spec.n_state), np.float32)

        def spin() -> None:
            while not stop.is_set():
                for head in range(spec.n_heads):
                    try:
                        with contextlib.suppress(lt.BusyError):
                            spec.decode([5, 6, 7], states, [0, 1, 2], 1, head=head)
                        with contextlib.suppress(lt.BusyError):
                            spec.memory.remove(1)
                    except lt.InvalidInputError:  # noqa: PERF203  what it could not remove is still there
                        pass
                    except BaseException as error:
                        wrong.append(error)
                time.sleep(0.0003)  # lets the other have its turn

        thread = threading.Thread(target=spin)
        thread.start()
        found: list[list[int]] = []
        try:
            for _ in range(1500):
                with contextlib.suppress(lt.BusyError):
                    found.append(loop.draft([0])[0].tokens.tolist())
        finally:
            stop.set()
            thread.join()
        assert not wrong
        assert all(tokens == expected for tokens in found)
        assert_drafted(loop.draft([0]).get(0), pair.oracle, loop.texts[0], len(expected))


def closed_in_some_order(pair: Pair, text: list[int], order: str) -> Any:
    with opened(pair) as loop:
        loop.start({0: text})
        assert isinstance(loop.drafter, (lt.Eagle3Drafter, lt.MtpDrafter, lt.ModelDrafter))
        spec = loop.drafter.spec
        parts: dict[str, Any] = {"c": loop.context, "s": spec, "m": loop.context.model, "d": spec.model}
        for part in order:
            parts[part].close()
        return loop.draft().get(0)


@pytest.mark.parametrize("order", ["c", "s", "m", "d", "mdcs", "scdm"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_closed_ends_no_process(
    name: str, order: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A drafter holds what it needs, or says that it is closed."""
    pair = PAIRS[name](tmp_path)
    text = random_text(rng, 9)
    try:
        draft = closed_in_some_order(pair, text, order)
    except lt.ClosedError:
        return
    assert_drafted(draft, pair.oracle, text, 3 if "heads" in name else 4)
