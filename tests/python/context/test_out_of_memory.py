"""Contexts, states and weights that do not fit into memory are refused before allocation, with both numbers.

Oracles: the sizes that the engine logs when it allocates, and formulas."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.datasets import random_rows
from support.numerics import EXACT, PEAK_MEMORY, random_tokens
from support.quantisation import quantise
from support.servers import running, tiny_options
from support.speculative_contexts import eagle3_spec
from support.tiny import TinyLlama
from support.tiny_models.encoders import bert
from support.tiny_models.registry import FILES

import llamatap as lt
from llamatap import _system_limits, dataset
from llamatap._native import _core, flush_log
from llamatap.serve import create_app

MIB = 2**20
GIB = 2**30
UNITS = {"MiB": MIB, "GiB": GIB}
#: The notes on each place in a cache, which the engine's log leaves out.
NOTES = 48
#: SmolLM2: keys and values of 30 layers with 3 heads of 64 float16 each.
SMOLLM2_TOKEN = 2 * 30 * 3 * 64 * 2

Limit = Callable[[float], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Set how many bytes of memory appear to be available."""

    def set_limit(size: float) -> None:
        monkeypatch.setattr(_system_limits, "available_memory", lambda: max(1, int(size)))

    return set_limit


@pytest.fixture
def allocated(caplog: pytest.LogCaptureFixture) -> Callable[[], float]:
    """Bytes of context buffers that the engine has logged since the last call."""
    caplog.set_level(logging.DEBUG, "llamatap")

    def told() -> float:
        flush_log()
        sizes = [re.search(r"buffer size = +([0-9.]+) MiB", line) for line in caplog.messages]
        caplog.clear()
        return sum(float(found[1]) for found in sizes if found) * MIB

    return told


@pytest.fixture
def noted(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Bytes of cell metadata of the KV caches in the engine's log.

    Call it before `allocated`, which clears the log.
    """

    def told() -> int:
        flush_log()
        caches = [re.search(r"\( *(\d+) cells, .* \d+/(\d+) seqs\)", line) for line in caplog.messages]
        return sum(NOTES * int(found[1]) * int(found[2]) for found in caches if found)

    return told


def numbers(error: object) -> tuple[float, float]:
    """The bytes needed and available, as the message names them."""
    found = re.search(r"([\d.,]+) (MiB|GiB) of memory, and ([\d.,]+) (MiB|GiB) are available", str(error))
    assert found, error
    needed, unit, available, other = found.groups()
    return float(needed.replace(",", "")) * UNITS[unit], float(available.replace(",", "")) * UNITS[other]


def offered(error: object) -> int:
    found = re.search(r"the largest n_ctx that fits is (\d+)", str(error))
    assert found, error
    return int(found[1])


def test_a_context_beyond_memory_names_both_numbers_and_what_fits(
    smollm2: lt.Model, limit: Limit, allocated: Callable[[], float]
) -> None:
    limit(GIB)
    with pytest.raises(MemoryError) as caught:
        smollm2.context(n_ctx=2**20)
    assert isinstance(caught.value, lt.OutOfMemoryError)
    assert "n_ctx=1048576" in str(caught.value)
    # Planning it allocates nothing, and leaves no lines of contexts that were never made.
    assert allocated() == 0
    needed, available = numbers(caught.value)
    keys_and_values = 2**20 * SMOLLM2_TOKEN
    assert keys_and_values < needed < 1.1 * keys_and_values
    assert available == GIB
    most = offered(caught.value)
    with smollm2.context(n_ctx=most) as context:
        assert context.n_ctx == most
        assert 0.95 * GIB < allocated() + most * NOTES < 1.1 * GIB
        context.decode(lt.Batch.of([1, 2, 3]))
    with pytest.raises(lt.OutOfMemoryError):
        smollm2.context(n_ctx=int(most * 1.05))


@pytest.mark.parametrize("n_ctx", [2**22, 2**30, 2**31 - 1])
def test_the_size_of_impossible_contexts_is_told(smollm2: lt.Model, limit: Limit, n_ctx: int) -> None:
    limit(4 * GIB)
    with pytest.raises(lt.OutOfMemoryError) as caught:
        smollm2.context(n_ctx=n_ctx)
    needed, _ = numbers(caught.value)
    assert n_ctx * SMOLLM2_TOKEN < needed < 1.1 * n_ctx * SMOLLM2_TOKEN
    assert 150_000 < offered(caught.value) < 4 * GIB // SMOLLM2_TOKEN


def test_a_context_as_long_as_the_model_was_trained_for(tmp_path: Path, limit: Limit) -> None:
    limit(256 * MIB)
    with lt.Model(TinyLlama(n_ctx=2**21).write(tmp_path / "long.gguf")) as model:
        with pytest.raises(lt.OutOfMemoryError, match="n_ctx=2097152 needs") as caught:
            model.context()
        model.context(n_ctx=offered(caught.value)).close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 16384},
        {"n_ctx": 16384, "n_seq_max": 4, "kv_unified": False, "swa_full": False, "flash_attn": False},
        {"n_ctx": 8192, "n_seq_max": 16, "n_ubatch": 64},
        {"n_ctx": 16384, "type_k": "f32", "type_v": "f32", "flash_attn": False},
    ],
    ids=["plain", "apart", "sequences", "types"],
)
@pytest.mark.parametrize(
    "name",
    [
        "llama-dense",  # keys and values
        "gemma3-dense",  # sliding windows
        "mamba-dense",  # states alone
        "qwen35-dense",  # both
        "jamba-dense",
        "deepseek2-moe",  # latent attention
        "glm5-next-moe",  # caches of indices
        "qwen4exp-moe",
        "deepseek4-moe",
        "bert",
    ],
)
def test_the_estimate_is_what_the_engine_allocates(
    name: str,
    options: dict[str, Any],
    arch_models: Path,
    tmp_path: Path,
    limit: Limit,
    allocated: Callable[[], float],
    noted: Callable[[], int],
) -> None:
    if name in FILES:
        path = FILES[name]().write(tmp_path / "model.gguf")
        options = {**options, "n_batch": 512}
    else:
        path = arch_models / f"{name}.gguf"
    options = {**options, "n_threads": 1}
    with lt.Model(path) as model:
        allocated()
        # Room for the outputs of all tokens is made where they are asked for; so none more than sequences.
        with model.context(**options, n_outputs_max=options.get("n_seq_max", 1)):
            notes, size = noted(), allocated()
        assert size > 0
        limit(0.97 * size - MIB / 2)
        with pytest.raises(lt.OutOfMemoryError):
            model.context(**options)
        limit(1.03 * (size + notes))
        model.context(**options).close()


def test_recurrent_states_grow_with_sequences_not_with_n_ctx(arch_models: Path, limit: Limit) -> None:
    with lt.Model(arch_models / "mamba-dense.gguf") as model:
        limit(2 * MIB)
        with pytest.raises(lt.OutOfMemoryError, match="smaller n_ctx does not help, but a smaller n_seq"):
            model.context(n_ctx=2**20, n_seq_max=256)
        model.context(n_ctx=2**20, n_ubatch=16).close()


def test_outputs_count_where_they_were_asked_for(smollm2: lt.Model, limit: Limit) -> None:
    row = smollm2.n_vocab * 4
    with smollm2.context(n_ctx=256, n_ubatch=64):
        pass
    limit(150 * MIB)
    smollm2.context(n_ctx=256, n_ubatch=64).close()
    with pytest.raises(lt.OutOfMemoryError) as caught:
        smollm2.context(n_ctx=2048, n_batch=2048, n_ubatch=64, n_outputs_max=2048)
    assert numbers(caught.value)[0] > 2048 * row


def test_a_plan_that_the_engine_refuses_gives_the_engines_reason(smollm2: lt.Model, limit: Limit) -> None:
    limit(MIB)
    with pytest.raises(lt.UnsupportedError, match="flash_attn"):
        smollm2.context(n_ctx=2**20, type_v="q8_0", flash_attn=False)


def test_a_file_that_has_gone_is_not_needed(tiny: TinyLlama, tmp_path: Path, limit: Limit) -> None:
    path = tiny.write(tmp_path / "gone.gguf")
    with lt.Model(path) as model:
        path.unlink()
        limit(MIB)
        model.context(n_ctx=4096).close()


def test_contexts_that_draft(tmp_path: Path, limit: Limit) -> None:
    with eagle3_spec(tmp_path) as tested:
        target, draft = tested.spec.target, tested.spec.model
        limit(64 * MIB)
        with pytest.raises(lt.OutOfMemoryError) as caught:
            lt.SpeculativeContext(target, draft, n_ctx=2**20)
        with lt.SpeculativeContext(target, draft, n_ctx=offered(caught.value)) as spec:
            assert spec.model is draft


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(_core, "allocate", refuse)


@pytest.mark.usefixtures("no_allocation")
def test_states_beyond_memory(tiny_model: lt.Model, limit: Limit) -> None:
    limit(64 * MIB)
    # 64 values of 4 bytes in 5 layers: 1,280 bytes a row.
    prompts = [[5] * 500] * 120
    with pytest.raises(MemoryError) as caught:
        lt.extract(tiny_model, prompts, [*range(tiny_model.n_layer + 1)] * 12, dtype="float32")
    needed, available = numbers(caught.value)
    width = 12 * (tiny_model.n_layer + 1) * tiny_model.n_embd * 4
    assert needed == pytest.approx(120 * 500 * width, rel=0.05)
    assert available == 64 * MIB
    assert "60,000 rows" in str(caught.value)
    # No memory is counted for rows outside a window, for pooled rows, or for the caller's own arrays.
    for fewer in ({"window": (0, 2)}, {"pool": "mean"}):
        with pytest.raises(AssertionError, match="allocated"):
            lt.extract(tiny_model, prompts, [0, 1], **fewer)


def test_states_that_the_caller_makes_room_for(tiny_model: lt.Model, limit: Limit) -> None:
    layers = [0] * 400
    out = np.empty((500, 400, tiny_model.n_embd), np.float32)
    with tiny_model.context(n_ctx=512) as context:
        limit(33 * MIB)
        with pytest.raises(lt.OutOfMemoryError):
            lt.extract(context, [5] * 500, layers)
        assert lt.extract(context, [5] * 500, layers, out=out).array.shape == out.shape


def test_outputs_of_a_decode(smollm2: lt.Model, limit: Limit, rng: np.random.Generator) -> None:
    """The engine makes room for the logits of all that are flagged while it decodes."""
    tokens = random_tokens(rng, smollm2, 700)
    batch = lt.Batch()
    for position, token in enumerate(tokens):
        batch.add(int(token), position, 0, output=True)
    with smollm2.context(n_ctx=1024, n_ubatch=64, **EXACT) as context:
        limit(100 * MIB)
        with pytest.raises(lt.OutOfMemoryError) as caught:
            context.decode(batch)
        needed, _ = numbers(caught.value)
        assert 700 * smollm2.n_vocab * 4 * 0.7 < needed
        # Nothing was computed; a batch of few outputs works.
        assert context.memory.last(0) == -1
        context.decode(lt.Batch.of(tokens.tolist()))
        context.memory.clear()
        limit(GIB)
        context.decode(batch)
        context.memory.clear()
        # The output buffer is large enough now.
        limit(MIB)
        context.decode(batch)


def test_layers_that_pass_the_last_block_need_room_for_outputs(smollm2: lt.Model, limit: Limit) -> None:
    with smollm2.context(n_ctx=512, n_ubatch=512) as context:
        limit(40 * MIB)
        lt.extract(context, [5] * 500, [-2])
        with pytest.raises(lt.OutOfMemoryError, match="logits of 500 outputs"):
            lt.extract(context, [5] * 500, ["norm"])
        limit(GIB)
        lt.extract(context, [5] * 500, ["norm"])


def test_states_of_a_tap(tiny_model: lt.Model, limit: Limit) -> None:
    with tiny_model.context(n_ctx=512, **EXACT) as context, context.tap([0] * 400) as tap:
        limit(33 * MIB)
        with pytest.raises(lt.OutOfMemoryError, match=r"400 layers, float32\) take 49 MiB"):
            context.decode(lt.Batch.of([5] * 500))
        context.decode(lt.Batch.of([5] * 5))
        assert tap.states.array.shape == (5, 400, tiny_model.n_embd)


def test_weights_beyond_memory(smollm2_path: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(60 * MIB)
    with pytest.raises(lt.OutOfMemoryError, match=r"use_mmap=True") as caught:
        lt.Model(smollm2_path, use_mmap=False)
    needed, available = numbers(caught.value)
    assert needed == pytest.approx(smollm2_path.stat().st_size, rel=0.05)
    assert available == 60 * MIB
    # Pages of a mapped file can be dropped.
    with lt.Model(smollm2_path) as model:
        assert "are read from the file again" in caplog.text
        caplog.clear()
        # The vocabulary takes little.
        lt.Model(smollm2_path, use_mmap=False, vocab_only=True).close()
        limit(200 * MIB)
        lt.Model(smollm2_path, use_mmap=False).close()
        assert not caplog.text
        with pytest.raises(lt.OutOfMemoryError, match=r"the weights as f32 take") as caught:
            lt.Model(smollm2_path, weights="f32")
        assert numbers(caught.value)[0] == pytest.approx(4 * model.n_params, rel=0.01)


def test_weights_that_the_cpu_keeps_in_its_own_order_are_copies(
    smollm2_f32_path: Path, tmp_path: Path, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "q4_0.gguf"
    assert quantise(smollm2_f32_path, path, gguf.GGMLQuantizationType.Q4_0) > 0
    caplog.set_level(logging.DEBUG, "llamatap")
    lt.Model(path).close()
    copied = re.search(r"CPU_REPACK model buffer size = +([0-9.]+) MiB", caplog.text)
    if copied is None:
        pytest.skip("this CPU has no kernels of its own for Q4_0")
    size = float(copied[1]) * MIB
    limit(0.99 * size)
    with pytest.raises(lt.OutOfMemoryError) as caught:
        lt.Model(path)
    assert numbers(caught.value)[0] == pytest.approx(size, abs=2 * MIB)
    limit(1.01 * size)
    assert path.stat().st_size > 1.01 * size
    lt.Model(path).close()


def test_data_sets(tiny_model: lt.Model, tmp_path: Path, limit: Limit) -> None:
    rows = random_rows(3, 200, longest=60)
    options = dataset.Options(layers=[0] * 100, dtype="float32", batch_tokens=1024, queue=3, context=EXACT)
    job = dataset.Job(tiny_model, rows, tmp_path / "out", options)
    # About 3,000 tokens in batches of up to 1,024; the layout takes one layer more.
    limit(70 * MIB)
    with pytest.raises(lt.OutOfMemoryError, match=r"tokens, 3 at once \(queue\), take") as caught:
        job.run()
    assert numbers(caught.value)[0] == pytest.approx(3 * 1024 * 101 * tiny_model.n_embd * 4, rel=0.1)


def test_the_server_says_so(tiny_path: Path, limit: Limit) -> None:
    with running([tiny_options(tiny_path, n_ctx=2**17)]) as server:
        # Less is free now than at the start.
        limit(64 * MIB)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        message = server.error("/v1/completions", 503, "unavailable_error", **body)
        assert offered(message) > 0
        assert server.states(input="a")["shape"][-1] == 64


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_server_whose_texts_never_fit_does_not_start(tiny_path: Path, drafter: str | None) -> None:
    with pytest.raises(lt.OutOfMemoryError, match=f"{tiny_path.name} cannot be served: .*n_ctx=") as caught:
        create_app([tiny_options(tiny_path, n_ctx=2**28, drafter=drafter)])
    needed, available = numbers(caught.value)
    assert needed > available
    assert 0 < offered(caught.value) < 2**28


def test_a_server_whose_texts_fit_keeps_no_memory_for_them(
    tiny_path: Path, allocated: Callable[[], float]
) -> None:
    app = create_app([tiny_options(tiny_path, n_ctx=2**16)])
    assert allocated() > 2**16 * 4
    (worker,) = app.state.server.workers.values()
    assert worker.generator.session is None
    worker.close()


def test_an_encoder_needs_no_memory_for_texts(tmp_path: Path) -> None:
    with running([tiny_options(bert().write(tmp_path / "bert.gguf"), n_ctx=2**28)]) as server:
        assert server.states(input=[5, 6, 7])["shape"] == [3, 64]


@pytest.mark.slow
@pytest.mark.skipif(
    bool(_core.build_info()["sanitize"]), reason="AddressSanitizer keeps what was freed, and address space"
)
def test_a_limit_of_the_process_itself(tiny_path: Path) -> None:
    """A real limit: the process may take 1 GiB more of address space."""
    code = f"""
import json, re, resource
import llamatap as lt
{PEAK_MEMORY}
with lt.Model({str(tiny_path)!r}) as model:
    model.context(n_ctx=256, n_threads=1).close()
    limit = int(peak_memory("VmSize") + 1024) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        model.context(n_ctx=2**24, n_threads=1)
    except MemoryError as error:
        message = str(error)
    most = int(re.search(r"fits is (\\d+)", message)[1])
    # Holes between what was freed count, too.
    model.context(n_ctx=int(0.9 * most), n_threads=1).close()
    print(json.dumps([message, most]))
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    message, most = json.loads(done.stdout)
    assert 0.9 * GIB < numbers(message)[1] < 1.1 * GIB
    assert 2**16 < most < 2**24
