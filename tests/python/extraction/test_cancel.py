"""Extraction that is cancelled: the engine stops in the middle of its work, and the next is right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.numerics import EXACT

import llamatap as lt

#: Seconds of work on any processor.
LONG = [5] * 6000


@pytest.fixture(scope="module")
def extractor(smollm2_path: Path) -> Iterator[lt.Extractor]:
    with lt.Model(smollm2_path) as model, lt.Extractor(model) as found:
        yield found


class Cancel:
    """A `cancelled` function that returns False for a number of calls, then True."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.threads: list[int] = []

    def __call__(self) -> bool:
        self.threads.append(threading.get_ident())
        return len(self.threads) > self.after


def in_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    for error in failed:
        raise error


@pytest.mark.parametrize("run", [lambda work: work(), in_thread], ids=["main", "thread"])
def test_a_long_pass_ends_and_the_next_is_right(
    extractor: lt.Extractor, run: Callable[[Callable[[], None]], None]
) -> None:
    before = extractor(LONG[:40], [7, -1]).array
    out = np.full((len(LONG), 2, extractor.model.n_embd), np.nan, np.float32)
    cancel = Cancel(after=2)

    def work() -> None:
        with pytest.raises(lt.CancelledError):
            extractor(LONG, [7, -1], out=out, cancelled=cancel)
        assert set(cancel.threads) == {threading.get_ident()}

    run(work)
    assert len(cancel.threads) == 3
    # It had started and did not finish.
    assert np.isnan(out[-1]).all()
    np.testing.assert_array_equal(extractor(LONG[:40], [7, -1]).array, before)


def test_nothing_is_begun_for_nobody(extractor: lt.Extractor) -> None:
    out = np.full((50, 1, extractor.model.n_embd), np.nan, np.float32)
    with pytest.raises(lt.CancelledError):
        extractor(LONG[:50], [3], out=out, cancelled=lambda: True)
    assert np.isnan(out).all()


def test_it_ends_between_batches(tiny_model: lt.Model) -> None:
    """Each of two prompts fills a batch, too short for `cancelled` to be asked within one."""
    prompts = [[5] * 12, [6] * 12]
    outs = [np.full((12, 1, tiny_model.n_embd), np.nan, np.float32) for _ in prompts]
    with lt.Extractor(tiny_model, **{**EXACT, "n_ubatch": 12}) as extractor:
        expected = extractor(prompts[0], [2]).array
        with pytest.raises(lt.CancelledError):
            extractor(prompts, [2], out=outs, cancelled=Cancel(after=1))
    np.testing.assert_array_equal(outs[0], expected)
    assert np.isnan(outs[1]).all()


def test_what_it_raises_comes_out(extractor: lt.Extractor) -> None:
    calls: list[None] = []

    def fails() -> bool:
        calls.append(None)
        if len(calls) > 1:
            raise OverflowError("enough")
        return False

    with pytest.raises(OverflowError, match="enough"):
        extractor(LONG, [7], cancelled=fails)
    assert len(calls) == 2
    assert np.isfinite(extractor(LONG[:20], [7]).array).all()


def test_what_says_no_changes_nothing(extractor: lt.Extractor) -> None:
    cancel = Cancel(after=10**9)
    found = extractor(LONG[:60], [7], cancelled=cancel)
    assert len(cancel.threads) > 1
    np.testing.assert_array_equal(found.array, extractor(LONG[:60], [7]).array)


def test_a_context_is_as_it_was(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=64) as context:
        with pytest.raises(lt.CancelledError):
            lt.extract(context, [[5, 6], [7]], [1], cancelled=lambda: True)
        assert context.memory.last(0) == -1
        context.decode(lt.Batch.of([5, 6, 7]))


def test_it_must_be_a_function(tiny_model: lt.Model) -> None:
    with pytest.raises(lt.InvalidInputError, match="cancelled must be a function, not bool"):
        lt.extract(tiny_model, [5], [1], cancelled=True)  # type: ignore[call-overload]
