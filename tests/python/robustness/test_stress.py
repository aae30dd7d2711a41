"""Many calls at once and over a long time: right results, and no growth of memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE
from support.numerics import PEAK_MEMORY, random_tokens
from support.tiny import TinyLlama

import llamatap as lt
from llamatap._native import _core

EXACT = {**EXACT_ANYWHERE, "n_threads": 1}
LAYERS: list[lt.LayerId] = [0, 2, -1, "norm"]


@pytest.mark.slow
def test_contexts_of_one_model_in_several_threads(tiny_model: lt.Model) -> None:
    """Decoding, tapping and extracting at once: each thread gets, bit for bit, what it gets alone."""
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, tiny_model, length).tolist() for length in (5, 40, 17, 90)]

    def decoded(prompt: list[int], context: lt.Context) -> NDArray[Any]:
        context.memory.clear()
        context.decode(lt.Batch.of(prompt))
        logits = [context.logits()]
        for step in range(3):
            context.decode(lt.Batch.of([int(logits[-1].argmax())], pos0=len(prompt) + step))
            logits.append(context.logits())
        return np.stack(logits)

    def tapped(prompt: list[int], context: lt.Context) -> NDArray[Any]:
        context.memory.clear()
        with context.tap(LAYERS) as tap:
            context.decode(lt.Batch.of(prompt))
        return tap.states.array

    def extracted(prompt: list[int], context: lt.Context) -> NDArray[Any]:
        context.memory.clear()
        return lt.extract(context, [prompt, prompt[:4]], LAYERS)[0].array

    works: list[Callable[[list[int], lt.Context], NDArray[Any]]] = [decoded, tapped, extracted] * 2

    def contexts() -> list[lt.Context]:
        return [tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) for _ in works]

    with_all = contexts()
    alone = [[work(p, c) for p in prompts] for work, c in zip(works, with_all, strict=True)]
    assert not np.array_equal(alone[0][1], alone[0][2])
    rounds: list[int] = []
    errors: list[BaseException] = []

    def run(index: int) -> None:
        context = contexts()[0] if index % 2 else with_all[index]
        try:
            for _ in range(15):
                for prompt, expected in zip(prompts, alone[index], strict=True):
                    assert np.array_equal(works[index](prompt, context), expected)
                rounds.append(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(rounds) == 15 * len(works)


#: Run in a process of its own: what the heap of a long run of tests takes and gives back would drown a leak.
RESIDENT = """
import gc, logging, resource, sys
import llamatap as lt

logging.getLogger("llamatap").setLevel(logging.CRITICAL)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
"""


def growth(code: str, path: Path) -> int:
    """The growth in bytes that a program prints when given the path of a model."""
    command = [sys.executable, "-c", RESIDENT + code, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout)


measures_memory = pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or bool(_core.build_info()["sanitize"]),
    reason="reads /proc, and AddressSanitizer keeps what was freed",
)


@pytest.mark.slow
@measures_memory
def test_ten_thousand_decodes_take_no_memory(tiny_path: Path) -> None:
    """Leaking a row of states each time would come to 10 MB, a hundred bytes to 1 MB."""
    code = """
with lt.Model(sys.argv[1]) as model, model.context(n_ctx=256, n_threads=1) as context, \\
        context.tap([0, 2, -1, "norm"]) as tap:

    def decode(count):
        for step in range(count):
            if step % 100 == 0:
                context.memory.clear()
            context.decode(lt.Batch.of([5 + step % 200], pos0=step % 100))
            assert tap.states.array.shape == (1, 4, 64)
            context.logits()

    decode(1000)
    before = resident()
    decode(10_000)
    print(resident() - before)
"""
    assert growth(code, tiny_path) < 2**20


@pytest.mark.slow
@measures_memory
def test_a_thousand_loads_take_no_memory(tiny_path: Path) -> None:
    """A model is 0.7 MB and its context more; of 4 kB each time, a leak would be seen."""
    code = """
def load(count):
    for _ in range(count):
        with lt.Model(sys.argv[1]) as model, model.context(n_ctx=256, n_threads=1) as context:
            context.decode(lt.Batch.of([5]))

load(150)
grown = []
for _ in range(2):
    before = resident()
    load(1000)
    grown.append(resident() - before)
# A leak is in both; what the allocator took once is in one.
print(min(grown))
"""
    assert growth(code, tiny_path) < 4 * 2**20


@pytest.mark.slow
def test_a_long_context_and_a_large_vocabulary_take_no_memory_for_their_product(tmp_path: Path) -> None:
    """32,768 positions of 152,000 logits would be 20 GB."""
    path = TinyLlama(n_vocab=152_000, n_ctx=32_768).write(tmp_path / "vocab.gguf", tokenizer=False)
    code = f"""{PEAK_MEMORY}
import llamatap as lt
with lt.Model({str(path)!r}) as model:
    resident, reserved = peak_memory(), peak_memory("VmPeak")
    with model.context(n_ctx=32768) as context:
        context.decode(lt.Batch.of(range(3, 1003)))
        assert context.logits(999).shape == (152000,)
        lt.extract(model, range(3, 1003), [-1], max_length=1000)
    print(peak_memory() - resident, peak_memory("VmPeak") - reserved)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    resident, reserved = map(float, done.stdout.split())
    print(resident, reserved)
    assert resident < 500
    assert reserved < 4000
