from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, PEAK_MEMORY, random_tokens, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap._native import native_of
from reference import decoder


@pytest.fixture(scope="module")
def extractor(tiny_model: lt.Model) -> lt.Extractor:
    return lt.Extractor(tiny_model, **EXACT)


@pytest.fixture
def prompt(rng: np.random.Generator, tiny_model: lt.Model) -> NDArray[np.int32]:
    return random_tokens(rng, tiny_model, 50)


ALL: list[lt.LayerId] = [0, 1, 2, 3, 4, "norm"]


def test_layers_come_in_the_order_asked_for_repeats_kept(
    extractor: lt.Extractor, prompt: NDArray[np.int32]
) -> None:
    every = extractor(prompt, ALL)
    asked: list[lt.LayerId] = ["norm", -1, 0, 2, 2, -2]
    some = extractor(prompt, asked)
    for column, layer in enumerate(some.layers):
        assert np.array_equal(some.array[:, column], every[layer])
    assert some.layers == ("norm", 4, 0, 2, 2, 3)
    assert some.array.shape == (50, 6, 64)
    assert np.array_equal(some[-5], every[0])
    assert extractor(prompt, 2).layers == (2,)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_numpys_own_rounding(
    extractor: lt.Extractor, prompt: NDArray[np.int32], dtype: str
) -> None:
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    exact = extractor(prompt, ALL)
    found = extractor(prompt, ALL, dtype=dtype)
    assert found.array.dtype == target
    assert np.array_equal(found.array, exact.array.astype(target))
    assert found.provenance["dtype"] == dtype


def test_out_is_written_and_viewed(
    extractor: lt.Extractor, prompt: NDArray[np.int32], tmp_path: Path
) -> None:
    expected = extractor(prompt, [1, -1])
    out = np.full((50, 2, 64), np.nan, np.float32)
    found = extractor(prompt, [1, -1], out=out)
    assert np.array_equal(out, expected.array)
    assert np.shares_memory(found.array, out)
    assert not found.array.flags.writeable
    assert out.flags.writeable

    part = np.zeros((100, 2, 64), np.float16)
    extractor(prompt, [1, -1], out=part[20:70])
    assert np.array_equal(part[20:70], expected.array.astype(np.float16))
    assert not part[:20].any()
    assert not part[70:].any()

    mapped = np.memmap(tmp_path / "states.bin", ml_dtypes.bfloat16, "w+", shape=(50, 2, 64))
    extractor(prompt, [1, -1], out=mapped)
    mapped.flush()
    again = np.fromfile(tmp_path / "states.bin", ml_dtypes.bfloat16).reshape(50, 2, 64)
    assert np.array_equal(again, expected.array.astype(ml_dtypes.bfloat16))


def test_outs_of_a_list(extractor: lt.Extractor, prompt: NDArray[np.int32]) -> None:
    outs = [np.zeros((50, 1, 64), np.float32), np.zeros((10, 1, 64), np.float32)]
    found = extractor([prompt, prompt[:10]], [2], out=outs)
    assert [np.shares_memory(s.array, o) for s, o in zip(found, outs, strict=True)] == [True, True]
    assert relative(outs[1], outs[0][:10]) < 1e-6


def bad_outs() -> dict[str, NDArray[Any]]:
    locked = np.zeros((50, 1, 64), np.float32)
    locked.flags.writeable = False
    raw = np.zeros(50 * 64 * 4 + 1, np.uint8)
    return {
        "shape": np.zeros((49, 1, 64), np.float32),
        "dimensions": np.zeros((50, 64), np.float32),
        "dtype": np.zeros((50, 1, 64), np.float64),
        "integers": np.zeros((50, 1, 64), np.int32),
        "byte order": np.zeros((50, 1, 64), ">f4"),
        "strides": np.zeros((50, 1, 128), np.float32)[:, :, ::2],
        "fortran": np.zeros((50, 1, 64), np.float32, order="F"),
        "read-only": locked,
        "alignment": raw[1:].view(np.float32).reshape(50, 1, 64),
    }


@pytest.mark.parametrize("kind", list(bad_outs()))
def test_a_wrong_out_raises_and_is_left_alone(
    extractor: lt.Extractor, prompt: NDArray[np.int32], kind: str
) -> None:
    out = bad_outs()[kind]
    with pytest.raises(lt.InvalidInputError):
        extractor(prompt, [1], out=out)
    assert not out.any()


def test_out_and_dtype_must_agree(extractor: lt.Extractor, prompt: NDArray[np.int32]) -> None:
    with pytest.raises(lt.InvalidInputError, match=r"float16.*float32"):
        extractor(prompt, [1], out=np.zeros((50, 1, 64), np.float16), dtype="float32")


@pytest.mark.parametrize(
    "window", [(0, 50), (10, 20), (None, 5), (45, None), (-3, None), (49, 50), (0, 1), (20, -20)]
)
@pytest.mark.parametrize("layers", [[1, 2], [-1], ["norm", 0]])
def test_a_window_is_the_slice_of_the_whole(
    extractor: lt.Extractor,
    prompt: NDArray[np.int32],
    window: tuple[int | None, int | None],
    layers: list[lt.LayerId],
) -> None:
    whole = extractor(prompt, layers)
    part = extractor(prompt, layers, window=window)
    assert part.array.shape == whole.array[slice(*window)].shape
    assert relative(part.array, whole.array[slice(*window)]) < 1e-6
    assert part.tokens.tolist() == prompt[slice(*window)].tolist()
    assert len(part) == len(part.tokens)


@pytest.mark.slow
def test_a_window_takes_no_memory_for_the_rest(tmp_path: Path) -> None:
    """The largest resident memory of a process of its own: 25 layers of 3,000 tokens are 154 MB."""
    path = TinyLlama(n_layer=24, n_embd=512).write(tmp_path / "wide.gguf")
    code = f"""{PEAK_MEMORY}
import llamatap as lt
extractor = lt.Extractor(lt.Model({str(path)!r}), n_threads=2)
prompt = [3 + i % 256 for i in range(3000)]
every = list(range(25))
def peak(layers, **options):
    extractor(prompt, layers, **options)
    return peak_memory()
steps = [peak([-1], window=(-1, None)), peak(every, window=(-2, None)), peak(every, pool="mean"), peak(every)]
print(*(after - before for before, after in zip(steps, steps[1:])))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    windowed, pooled, whole = map(float, done.stdout.split())
    assert windowed < 16
    assert pooled < 16
    assert whole > 100


def test_the_shape_is_that_of_the_request(extractor: lt.Extractor) -> None:
    wanted: list[list[lt.LayerId]] = [[2], [2, "norm"], [0, 0, 0]]
    for count in (1, 2, 70):
        for layers in wanted:
            assert extractor([5] * count, layers).array.shape == (count, len(layers), 64)
            assert extractor([[5] * count], layers)[0].array.shape == (count, len(layers), 64)
            assert extractor([5] * count, layers, pool="last").array.shape == (len(layers), 64)


def test_windows_one_for_each_input(extractor: lt.Extractor, prompt: NDArray[np.int32]) -> None:
    parts = extractor([prompt, prompt[:20], prompt], [2], window=[(3, 4), None, (-2, None)])
    assert [len(part) for part in parts] == [1, 20, 2]


@pytest.mark.parametrize("layers", [[1, 2], [-1, "norm", 0]])
@pytest.mark.parametrize("window", [None, (5, 30)])
def test_pooling_is_numpys_over_the_rows(
    extractor: lt.Extractor,
    prompt: NDArray[np.int32],
    layers: list[lt.LayerId],
    window: tuple[int, int] | None,
) -> None:
    rows = extractor(prompt, layers, window=window)
    mean = extractor(prompt, layers, window=window, pool="mean")
    assert mean.array.shape == (len(layers), 64)
    assert relative(mean.array, rows.array.astype(np.float64).mean(axis=0)) < 1e-6
    largest = extractor(prompt, layers, window=window, pool="max")
    assert relative(largest.array, rows.array.max(axis=0)) < 1e-6
    last = extractor(prompt, layers, window=window, pool="last")
    assert relative(last.array, rows.array[-1]) < 1e-6
    assert relative(last[layers[0]], rows[layers[0]][-1]) < 1e-6
    assert mean.provenance["pooling"] == "mean"


def test_the_maximum_of_nan_is_nan(tiny_path: Path) -> None:
    from support.tiny import TinyLlama

    poisoned = TinyLlama()
    poisoned.weights["token_embd.weight"][7, 3] = np.nan
    with lt.Model(poisoned.write(tiny_path.parent / "nan.gguf")) as model:
        rows = lt.extract(model, [5, 7, 6], [0])
        assert np.isnan(rows.array[1, 0, 3])
        pooled = lt.extract(model, [5, 7, 6], [0], pool="max")
        assert np.array_equal(pooled.array, rows.array.max(axis=0), equal_nan=True)


def test_pooled_out_and_dtype(extractor: lt.Extractor, prompt: NDArray[np.int32]) -> None:
    out = np.zeros((2, 64), np.float16)
    extractor(prompt, [1, -1], pool="mean", out=out)
    exact = extractor(prompt, [1, -1], pool="mean")
    assert np.array_equal(out, exact.array.astype(np.float16))


@pytest.mark.parametrize("sizes", [{"n_ubatch": 16}, {"n_ubatch": 7, "n_batch": 20}, {"n_batch": 1}])
@pytest.mark.parametrize("layers", [[1], [0, -1, "norm"]])
def test_chunked_equals_whole(
    extractor: lt.Extractor,
    tiny_model: lt.Model,
    prompt: NDArray[np.int32],
    sizes: dict[str, Any],
    layers: list[lt.LayerId],
) -> None:
    whole = extractor(prompt, layers)
    with lt.Extractor(tiny_model, **EXACT, **sizes) as small:
        assert relative(small(prompt, layers).array, whole.array) < 1e-6


@pytest.mark.slow
def test_a_prompt_longer_than_batches_of_the_usual_size(
    tiny: TinyLlama, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """Longer than the usual n_ubatch (512) and n_batch (2,048), against the formulas."""
    tokens = random_tokens(rng, tiny_model, 2500)
    states, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    expected = np.stack([*states, normed], axis=1)
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        assert relative(extractor(tokens, ALL).array, expected) < 1e-5
    with tiny_model.context(n_ctx=2560, **EXACT) as context, context.tap(ALL) as tap:
        context.decode(lt.Batch.of(tokens.tolist()))
        assert relative(tap.states.array, expected) < 1e-5


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("layers", [[0, 2], [-1, "norm"]])
@pytest.mark.parametrize("n_seq_max", [1, 2, 4, 16, 64])
def test_a_ragged_batch_equals_its_prompts_alone(
    tiny_model: lt.Model,
    rng: np.random.Generator,
    kv_unified: bool,
    layers: list[lt.LayerId],
    n_seq_max: int,
) -> None:
    """Up to 64 together, in batches shorter than some of them."""
    lengths = (5, 33, 1, 20, 64, 2, 2, 17) * (8 if n_seq_max == 64 else 2)
    prompts = [random_tokens(rng, tiny_model, length) for length in lengths]
    sizes: dict[str, Any] = {"n_seq_max": n_seq_max, "n_ctx": 64 * max(n_seq_max, 4), "n_ubatch": 48}
    with lt.Extractor(tiny_model, **EXACT, **sizes, n_batch=48, kv_unified=kv_unified) as together:
        found = together(prompts, layers)
    with lt.Extractor(tiny_model, **EXACT) as alone:
        for prompt, states in zip(prompts, found, strict=True):
            assert states.tokens.tolist() == prompt.tolist()
            assert relative(states.array, alone(prompt, layers).array) < 1e-6


def test_contexts_that_extract_sizes_itself(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    prompts = [random_tokens(rng, tiny_model, 300) for _ in range(8)]
    expected = lt.Extractor(tiny_model, **EXACT)(prompts[3], [-1])
    for options in ({"kv_unified": False}, {"n_batch": 4}, {"n_ubatch": 1}, {"n_seq_max": 3}):
        with lt.Extractor(tiny_model, **EXACT, **options) as extractor:
            assert relative(extractor(prompts, [-1])[3].array, expected.array) < 1e-6


def test_states_keep_their_tokens(tiny_model: lt.Model) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    states = lt.extract(tiny_model, tokens, [1])
    tokens[0] = 99
    assert states.tokens.tolist() == [5, 6, 7]
    assert not states.tokens.flags.writeable


def test_order_and_company_do_not_matter(extractor: lt.Extractor, tiny_model: lt.Model) -> None:
    rng = np.random.default_rng(5)
    prompts = [random_tokens(rng, tiny_model, length) for length in (12, 3, 40, 9)]
    straight = extractor(prompts, ALL)
    backwards = extractor(prompts[::-1], ALL)[::-1]
    for a, b in zip(straight, backwards, strict=True):
        assert relative(a.array, b.array) < 1e-6
    first = extractor(prompts[0], ALL)
    for _ in range(9):
        assert np.array_equal(extractor(prompts[0], ALL).array, first.array)


def test_a_prompt_longer_than_the_first_one_grows_the_context(tiny_model: lt.Model) -> None:
    rng = np.random.default_rng(6)
    long = random_tokens(rng, tiny_model, 1500)
    short = lt.extract(tiny_model, long[:5], [1])
    found = lt.extract(tiny_model, long, [1])
    assert len(found) == 1500
    assert relative(found.array[:5], short.array) < 1e-2
    assert relative(lt.extract(tiny_model, long[:5], [-1]).array, found.array[:5]) > 0.1


def test_text_token_ids_and_lists(tiny_model: lt.Model) -> None:
    text = "héllo"
    by_text = lt.extract(tiny_model, text, [1])
    assert by_text.tokens.tolist() == [1, *(byte + 3 for byte in text.encode())]
    for ids in (by_text.tokens, by_text.tokens.tolist(), by_text.tokens.astype(np.int64)):
        assert np.array_equal(lt.extract(tiny_model, ids, [1]).array, by_text.array)
    both = lt.extract(tiny_model, [text, by_text.tokens.tolist()], [1])
    assert isinstance(both, list)
    assert relative(both[0].array, both[1].array) < 1e-6
    assert isinstance(lt.extract(tiny_model, [text], [1]), list)
    assert len(lt.extract(tiny_model, text, [1], max_length=3)) == 3


def test_a_decode_of_the_same_shape_has_its_logits(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    """The engine uses the graph of the extraction again, which stopped before its logits."""
    first, second = (random_tokens(rng, tiny_model, 20).tolist() for _ in range(2))

    def every_row(tokens: list[int]) -> lt.Batch:
        batch = lt.Batch()
        for position, token in enumerate(tokens):
            batch.add(token, position, 0, True)
        return batch

    with tiny_model.context(n_ctx=512, **EXACT) as context, tiny_model.context(n_ctx=512, **EXACT) as fresh:
        fresh.decode(every_row(second))
        wanted: list[lt.LayerId] = [-1, "norm", 1]
        for layer in wanted:
            for _ in range(2):
                lt.extract(context, first, layer)
            context.decode(every_row(second))
            for row in range(20):
                assert np.array_equal(context.logits(row), fresh.logits(row))
            context.memory.clear()


def test_a_given_context_is_empty_again_and_works_on(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, tiny_model, 40).tolist()
    with (
        tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context,
        tiny_model.context(n_ctx=512, **EXACT) as fresh,
    ):
        for layers in ([1], [-1], [0]):
            states = lt.extract(context, [tokens, tokens[:7]], layers)
            assert [len(s) for s in states] == [40, 7]
        assert context.memory.last(0) == -1
        context.decode(lt.Batch.of(tokens))
        fresh.decode(lt.Batch.of(tokens))
        assert np.array_equal(context.logits(), fresh.logits())
        with pytest.raises(lt.InvalidInputError, match="empty"):
            lt.extract(context, tokens, [1])
        assert context.memory.last(0) == 39


def test_too_long_says_both_numbers(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256) as context:
        assert len(lt.extract(context, [5] * 256, [1])) == 256
        with pytest.raises(lt.ContextFullError, match=r"257.*256") as caught:
            lt.extract(context, [5] * 257, [1])
        assert isinstance(caught.value, MemoryError)
    with pytest.raises(
        lt.ContextFullError, match=r"4097.*4096.*trained for; .*Extractor\(model, n_ctx=4097\)"
    ):
        lt.extract(tiny_model, [5] * 4097, [1])
    with (
        lt.Extractor(tiny_model, n_ctx=256) as extractor,
        pytest.raises(lt.ContextFullError, match=r"257 tokens is longer than n_ctx=256; .*n_ctx=257"),
    ):
        extractor([5] * 257, [1])


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ("", {}),
        ([], {}),
        ([[]], {}),
        (np.zeros(0, np.int32), {}),
        ([1, -1], {}),
        ([1, 259], {}),
        ([2**31], {}),
        ([1.5, 2.5], {}),
        ([[1, [2]]], {}),
        ([1, 2], {"layers": np.array([[1, 2]])}),
        ([1, 2], {"dtype": "f4,,"}),
        ([1, 2], {"dtype": np.zeros(3)}),
        (np.array([1.0, 2.0]), {}),
        (np.zeros((2, 2), np.int32), {}),
        (7, {}),
        (None, {}),
        ([1, 2], {"layers": []}),
        ([1, 2], {"layers": [5]}),
        ([1, 2], {"layers": [-6]}),
        ([1, 2], {"layers": ["pre"]}),
        ([1, 2], {"layers": [1.0]}),
        ([1, 2], {"layers": [True]}),
        ([1, 2], {"dtype": "float64"}),
        ([1, 2], {"dtype": "nonsense"}),
        ([1, 2], {"window": (2, 2)}),
        ([1, 2], {"window": (1, 2, 3)}),
        ([1, 2], {"window": ("a", "b")}),
        ([1, 2], {"window": [(0, 1)]}),
        ([1, 2], {"pool": "sum"}),
        ([1, 2], {"max_length": 0}),
        ([1, 2], {"out": [np.zeros((2, 1, 64), np.float32)]}),
        ([[1], [2]], {"out": np.zeros((2, 1, 64), np.float32)}),
        ([[1], [2]], {"out": [np.zeros((1, 1, 64), np.float32)]}),
        ([[1], [2]], {"window": [(0, 1)]}),
        ("\ud800", {}),
    ],
)
def test_wrong_arguments_raise(tiny_model: lt.Model, inputs: Any, options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError) as caught:
        lt.extract(tiny_model, inputs, **{"layers": [1], **options})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, lt.Error)


def test_a_list_says_which_input_is_wrong(tiny_model: lt.Model) -> None:
    with pytest.raises(lt.InvalidInputError, match="input 1"):
        lt.extract(tiny_model, [[1, 2], [1, 999]], [1])


@pytest.mark.usefixtures("without_gc")
def test_extraction_leaves_the_gil_free(smollm2: lt.Model) -> None:
    thread = threading.Thread(target=lambda: lt.extract(smollm2, [5] * 1024, [-2]))
    thread.start()
    beats = []
    while thread.is_alive():
        beats.append(time.perf_counter())
        time.sleep(0.002)
    assert len(beats) > 10
    assert max(np.diff(beats)) < 0.5


def test_not_a_model() -> None:
    with pytest.raises(lt.InvalidInputError, match="Model or a Context"):
        lt.extract("model.gguf", [1], [1])  # type: ignore[call-overload]


def test_early_exit_computes_no_layer_beyond(tiny_path: Path) -> None:
    """Other weights in the last block do not reach earlier states."""
    changed = TinyLlama()
    for name in changed.weights:
        if name.startswith("blk.3.") or name == "output.weight":
            changed.weights[name] *= 2
    path = changed.write(tiny_path.parent / "changed.gguf")
    with lt.Model(path) as other, lt.Model(tiny_path) as model:
        tokens = list(range(3, 40))
        context = other.context(n_ctx=256)
        seen = []
        for layers in ([0], [2], [4]):
            lt.extract(context, tokens, layers)
            seen.append(native_of(context).nodes_seen)
        # The nodes that were come by: hardly any, half, all but the output head.
        assert seen[0] < 0.1 * seen[2]
        assert 0.4 * seen[2] < seen[1] < 0.6 * seen[2]
        context.decode(lt.Batch.of(tokens))
        assert native_of(context).nodes_seen > seen[2]
        context.close()
        found = lt.extract(other, tokens, [0, 3])
        assert np.array_equal(found.array, lt.extract(model, tokens, [0, 3]).array)
        assert relative(lt.extract(other, tokens, [4]).array, lt.extract(model, tokens, [4]).array) > 0.05


def test_a_weak_reference_to_a_model_is_a_model(tiny_path: Path) -> None:
    with lt.Model(tiny_path) as model:
        expected = lt.extract(model, [5, 6, 7], [1]).array
        assert np.array_equal(lt.extract(weakref.proxy(model), [5, 6, 7], [1]).array, expected)
