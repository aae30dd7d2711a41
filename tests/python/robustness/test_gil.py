"""Long calls release the GIL, and a second thread's call on the same object gets BusyError."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny import TinyLlama

import llamatap as lt
from llamatap._native import _core, native_of
from llamatap.sampler import SamplingOptions

#: 2**19 cells of 512 bytes: what is done to all of them takes a while.
LARGE = 2**19


@contextmanager
def heartbeat() -> Iterator[Callable[[], int]]:
    """A thread that counts whenever it holds the GIL; yields the count.

    Nothing asks for the GIL meanwhile: where the count grows during a call, the call itself released it.
    """
    n = 0
    stop = False

    def beat() -> None:
        nonlocal n
        while not stop:
            n += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=beat)
    thread.start()
    while n == 0:
        time.sleep(0.001)
    sys.setswitchinterval(1000)
    try:
        yield lambda: n
    finally:
        sys.setswitchinterval(interval)
        stop = True
        thread.join()


def leaves_the_gil_free(
    call: Callable[[], object], prepare: Callable[[], object] = lambda: None, attempts: int = 10
) -> bool:
    """Whether another thread runs during a call, in at least one of several attempts.

    A call may be over before the system schedules the thread; while the GIL is held it never runs.
    """
    with heartbeat() as count:
        for _ in range(attempts):
            prepare()
            before = count()
            call()
            if count() > before:
                return True
    return False


def test_the_heartbeat_stops_while_the_gil_is_held() -> None:
    values: list[int] = []
    assert not leaves_the_gil_free(
        lambda: values.sort(), lambda: values.extend(range(300_000, 0, -1)), attempts=5
    )
    assert leaves_the_gil_free(lambda: time.sleep(0.05))


CHANGES: dict[str, Callable[[lt.Memory], object]] = {
    "clear": lambda memory: memory.clear(),
    "remove": lambda memory: memory.remove(0),
    "copy": lambda memory: memory.copy(0, 1),
    "keep": lambda memory: memory.keep(1),
    "shift": lambda memory: memory.shift(0, None, None, 5),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", list(CHANGES))
def test_changing_the_memory_leaves_the_gil_free(tiny_model: lt.Model, name: str) -> None:
    with tiny_model.context(n_ctx=LARGE, n_seq_max=2, n_threads=1, kv_unified=False) as context:

        def prepare() -> None:
            if context.memory.last(0) < 0:
                context.decode(lt.Batch.of([5, 6, 7]))

        assert leaves_the_gil_free(lambda: CHANGES[name](context.memory), prepare)


def test_freeing_a_context_leaves_the_gil_free(tiny_model: lt.Model) -> None:
    held: list[object] = []
    assert leaves_the_gil_free(
        held.clear, lambda: held.append(tiny_model.context(n_ctx=LARGE, n_threads=1)), attempts=5
    )


@pytest.mark.parametrize("last", ["speculative context", "drafter", "the draft's context"])
def test_freeing_a_speculative_context_leaves_the_gil_free(
    tiny_model: lt.Model, tiny_path: Path, last: str
) -> None:
    """The GIL is free whichever object holds the last reference."""
    held: list[object] = []
    with tiny_model.context(n_ctx=256) as target:

        def prepare() -> None:
            spec = lt.SpeculativeContext(target, tiny_path, n_ctx=LARGE)
            if last == "drafter":
                drafter = _core.speculative_drafter(
                    native_of(spec), n_max=3, n_min=0, p_min=0.0, temperature=0.0, seed=0
                )
                held.append(drafter)
            else:
                held.append(native_of(spec).context if last == "the draft's context" else native_of(spec))
            spec.close()

        assert leaves_the_gil_free(held.clear, prepare, attempts=5)


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    """A vocabulary that takes long to sort."""
    tiny = TinyLlama(n_layer=1, n_embd=32, n_vocab=200_000, n_head=2)
    path = tiny.write(tmp_path_factory.mktemp("wordy") / "tiny.gguf", tokenizer=False)
    with lt.Model(path) as model:
        yield model


SLOW: SamplingOptions = {"temperature": 1.0, "top_p": 0.9, "seed": 1}


def test_sampling_leaves_the_gil_free(wordy: lt.Model) -> None:
    sampler = lt.Sampler(wordy, **SLOW)
    with wordy.context(n_ctx=256, n_threads=1) as context:
        context.decode(lt.Batch.of([5, 6]))
        logits = context.logits()
        assert leaves_the_gil_free(lambda: sampler.sample(context))
        assert leaves_the_gil_free(lambda: sampler.sample_logits(logits))


def test_verifying_a_draft_leaves_the_gil_free(wordy: lt.Model) -> None:
    batch = lt.Batch()
    for position in range(3):
        batch.add(5, position, 0, output=True)
    draft = np.array([5, 5], np.int32)
    even = np.full((2, wordy.n_vocab), 1 / wordy.n_vocab, np.float32)
    with wordy.context(n_ctx=256, n_threads=1) as context:
        context.decode(batch)
        for distributions in (None, even):
            sampler = lt.Sampler(wordy, **SLOW)

            def call(
                sampler: lt.Sampler = sampler, distributions: NDArray[np.float32] | None = distributions
            ) -> None:
                _core.verify(native_of(context), native_of(sampler), 0, draft, distributions, True, [])

            assert leaves_the_gil_free(call)


@pytest.mark.slow
def test_two_threads_on_a_sampler_or_on_the_logits_of_a_context(wordy: lt.Model) -> None:
    """The second one gets BusyError, and the first one's tokens are those that it draws alone."""
    with wordy.context(n_ctx=256, n_threads=1) as context:
        context.decode(lt.Batch.of([5, 6]))
        penalised: SamplingOptions = {**SLOW, "repeat_penalty": 1.3}
        alone = lt.Sampler(wordy, **penalised)
        expected = [alone.sample(context) for _ in range(30)]
        sampler = lt.Sampler(wordy, **penalised)
        found: list[int] = []
        told: list[str] = []

        def tells_busy(call: Callable[[], object]) -> bool:
            try:
                call()
            except lt.BusyError as error:
                told.append(str(error))
                return True
            except lt.InvalidInputError:
                pass
            return False

        def draw() -> None:
            while len(found) < len(expected):
                tells_busy(lambda: found.append(sampler.sample(context)))

        thread = threading.Thread(target=draw)
        thread.start()
        # Errors of these arguments are raised once it is their turn.
        calls = (lambda: sampler.accept(-1), lambda: sampler.sample_logits(np.zeros(3, np.float32)))
        busy = [0, 0]
        while thread.is_alive():
            for i, call in enumerate(calls):
                busy[i] += tells_busy(call)
            time.sleep(0)
        thread.join()
        assert found == expected
        assert min(busy) > 0
        assert all("using this sampler" in message for message in told)


def test_a_context_is_asked_how_long_it_took_while_it_computes(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=4096, n_threads=1) as context:
        thread = threading.Thread(target=lambda: context.decode(lt.Batch.of([5] * 4000)))
        thread.start()
        seconds = [native_of(context).engine_seconds]
        while thread.is_alive():
            seconds.append(native_of(context).engine_seconds)
            time.sleep(0.001)
        thread.join()
        seconds.append(native_of(context).engine_seconds)
        assert seconds == sorted(seconds)
        assert seconds[-1] > 0


SUB_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import llamatap as lt

interpreters.create()
model = lt.Model(sys.argv[1])
context = model.context(n_ctx=256, n_threads=1)
drafter = lt.ModelDrafter(context, sys.argv[1])
list(lt.generate(context, [1, 2, 3], drafter=drafter, max_tokens=8))
model.close()
context.close()
del model, context
del drafter
print("freed")
"""


def test_objects_are_freed_where_there_was_a_sub_interpreter(tiny_path: Path) -> None:
    """From then on PyGILState_Check says that each thread has the GIL, also one that has let it go."""
    child = subprocess.run(
        [sys.executable, "-c", SUB_INTERPRETER, str(tiny_path)], capture_output=True, text=True, timeout=120
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "freed\n", "")
