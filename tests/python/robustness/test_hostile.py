"""Threads, forks, signals, callbacks and exits at bad moments.

What can hang or end the process runs in one of its own. Others are in test_model.py (a plain fork, Ctrl-C,
exits while something runs) and test_context.py (two threads on one context).
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT as EXACT_ANYWHERE

import llamatap as lt
from llamatap._native import _core

EXACT = {**EXACT_ANYWHERE, "n_threads": 1}

PRELUDE = """
import gc, os, signal, sys, threading, time
import llamatap as lt
path = sys.argv[1]
model = lt.Model(path)
expected = lt.extract(model, [5, 6, 7], [1]).array.copy()

def check(model=None):
    with lt.Model(path) if model is None else model as model:
        found = lt.extract(model, [5, 6, 7], [1]).array
        assert (found == expected).all()

def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread

def join_child(child):
    # A child that hangs is ended by its alarm.
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
"""


def run(path: Path, code: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# A prompt that takes long enough to be interrupted; and waiting until it is being computed.
LONG = """
long = [5] * 4000
def computing():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            context.memory.last(0)
        except lt.BusyError:
            return
    raise SystemExit("nothing was computed")
def extracting():
    while True:
        try:
            lt.extract(model, [5], [1])
            time.sleep(0.02)
        except lt.BusyError:
            return
context = model.context(n_ctx=4096, n_threads=1)
"""


@pytest.mark.slow
def test_a_signal_handler_that_closes_what_is_extracting(tiny_path: Path) -> None:
    """The handler gets BusyError, which ends the extraction as any error of a handler does."""
    run(
        tiny_path,
        LONG
        + """
signal.signal(signal.SIGUSR1, lambda *_: model.close())
def kick():
    extracting()
    os.kill(os.getpid(), signal.SIGUSR1)
thread = start(kick)
while True:
    try:
        lt.extract(model, [long] * 4, [-1])
    except lt.BusyError as error:
        # Errors of the handler, not of the other thread's calls.
        if "this thread" in str(error):
            break
thread.join()
check(model)
""",
    )


@pytest.mark.slow
def test_a_log_handler_that_closes_raises_or_works_inside(tiny_path: Path) -> None:
    run(
        tiny_path,
        """
import logging
fresh = lt.Model(path)
seen = []
class Closing(logging.Handler):
    def emit(self, record):
        try:
            fresh.close()
        except lt.BusyError:
            seen.append("busy")
logger = logging.getLogger("llamatap")
logger.setLevel(1)
handler = Closing()
logger.addHandler(handler)
try:
    lt.extract(fresh, [5, 6, 7], [1])
except lt.ClosedError:
    seen.append("closed")
logger.removeHandler(handler)
assert seen
check(model)
""",
    )


def test_a_log_handler_that_fails_or_computes(tiny_path: Path, tiny_model: lt.Model) -> None:
    logger = logging.getLogger("llamatap")
    context = tiny_model.context(n_ctx=256, **EXACT)
    computed: list[int] = []

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("from the handler")

    class Computing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(computed) < 3:
                context.decode(lt.Batch.of([5], pos0=len(computed)))
                computed.append(context.memory.last(0))

    for handler in (Failing(), Computing()):
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            if isinstance(handler, Failing):
                with pytest.raises(RuntimeError, match="from the handler"):
                    lt.Model(tiny_path)
            else:
                lt.Model(tiny_path).close()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert computed == [0, 1, 2]
    context.close()
    assert lt.extract(tiny_model, [5], [1]).array.shape == (1, 1, 64)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, ValueError])
def test_progress_that_raises_anything(tiny_path: Path, error: type[BaseException]) -> None:
    def fail(fraction: float) -> None:
        raise error("enough")

    with pytest.raises(error):
        lt.Model(tiny_path, progress=fail)
    lt.Model(tiny_path).close()


def test_progress_that_loads_another_model(tiny_path: Path) -> None:
    depth: list[float] = []

    def again(fraction: float) -> None:
        if len(depth) < 4:
            depth.append(fraction)
            with lt.Model(tiny_path, progress=again) as inner:
                assert lt.extract(inner, [5], [1]).array.shape == (1, 1, 64)

    lt.Model(tiny_path, progress=again).close()
    assert len(depth) == 4


@pytest.mark.slow
def test_a_child_forked_while_a_thread_extracts(tiny_path: Path) -> None:
    """The child is told, may close what it inherits, and may load the file itself; the parent goes on."""
    run(
        tiny_path,
        LONG
        + """
found = []
def work():
    while not found:
        try:
            found.extend(lt.extract(model, [long] * 4, [-1]))
        except lt.BusyError:
            pass  # of the other thread's tries
thread = start(work)
def more_work():
    left = 2
    while left:
        try:
            lt.extract(context, long, [-1])
            left -= 1
        except lt.BusyError:
            pass  # of the main thread's looks
other = start(more_work)
computing()
extracting()
child = os.fork()
if child == 0:
    signal.alarm(20)
    for call in (
        lambda: lt.extract(model, [5], [1]),
        lambda: lt.Extractor(model)([5], [1]),
        lambda: model.context(n_ctx=256),
        lambda: context.decode(lt.Batch.of([5])),
        lambda: context.memory.last(0),
        lambda: context.save(0),
    ):
        try:
            call()
        except (lt.UnsupportedError, lt.BusyError):
            continue
        os._exit(3)
    assert model.tokenize("a").tolist() == [1, 100]
    model.close()
    context.close()
    del model, context
    gc.collect()
    check()
    os._exit(0)
join_child(child)
thread.join()
other.join()
assert len(found) == 4
check(model)
""",
    )


@pytest.mark.slow
@pytest.mark.skipif(
    bool(_core.build_info()["sanitize"]), reason="a fork may find AddressSanitizer's allocator locked"
)
def test_many_forks_while_threads_log_and_load(tiny_path: Path) -> None:
    run(
        tiny_path,
        """
stop = False
def work():
    while not stop:
        lt.Model(path, vocab_only=True).close()
threads = [start(work) for _ in range(2)]
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        check()
        os._exit(0)
    join_child(child)
stop = True
for thread in threads:
    thread.join()
check(model)
""",
    )


@pytest.mark.slow
def test_a_multiprocessing_child_loads_its_own(tiny_path: Path) -> None:
    run(
        tiny_path,
        """
import multiprocessing
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=lambda: (check(), queue.put(1)))
child.start()
assert queue.get(timeout=30) == 1
child.join()
assert child.exitcode == 0
check(model)
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        "context.decode(lt.Batch.of(long)); context.memory.clear()",
        "lt.extract(model, [5] * 40, [-1])",
        "model.tokenize('x' * 1000)",
        "lt.Model(path).close()",
        "context.save(0)",
    ],
    ids=["decode", "extract", "tokenize", "load", "save"],
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_exit_while_daemon_threads_never_stop(tiny_path: Path, work: str, n_threads: int) -> None:
    run(
        tiny_path,
        LONG
        + f"""
def forever():
    while True:
        try:
            {work}
        except lt.BusyError:
            pass
for _ in range({n_threads}):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
""",
    )


@pytest.mark.slow
def test_objects_deleted_in_any_order_while_a_thread_computes(tiny_path: Path) -> None:
    run(
        tiny_path,
        LONG
        + """
import itertools
def quietly(decode, batch):
    try:
        decode(batch)
    except lt.ClosedError:
        pass  # it was closed, or cleared, before the decode began
    except lt.InvalidInputError as error:
        assert "empty" in str(error)
for order in itertools.permutations(("model", "context", "tap", "batch")):
    things = {"model": lt.Model(path)}
    context = things["context"] = things["model"].context(n_ctx=1024, n_threads=1)
    things["tap"] = context.tap([1, -1])
    things["batch"] = lt.Batch.of([5] * 900)
    opened = things["tap"].__enter__()
    thread = start(lambda c=context, b=things["batch"]: quietly(c.decode, b))
    del context, opened
    for name in order:
        thing = things.pop(name)
        if name in ("model", "context"):
            thing.close()
        if name == "batch":
            thing.clear()
        del thing
        gc.collect()
    thread.join()
check(model)
""",
    )


def test_a_batch_changed_while_it_is_decoded(tiny_model: lt.Model) -> None:
    batch = lt.Batch.of([5] * 2000)
    with tiny_model.context(n_ctx=4096, n_threads=1) as context:
        thread = threading.Thread(target=context.decode, args=(batch,))
        thread.start()
        for _ in range(100):
            batch.add(6, 0)
            batch.clear()
        thread.join()
        assert context.memory.last(0) in (-1, 1999)


def test_an_output_array_lives_as_long_as_it_is_written(tiny_model: lt.Model) -> None:
    done: list[Any] = []

    def work() -> None:
        done.append(lt.extract(tiny_model, [5] * 1500, [-1], out=np.zeros((1500, 1, 64), np.float32)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    first = lt.extract(tiny_model, [5] * 1500, [-1])
    assert np.array_equal(done[0].array, first.array)
