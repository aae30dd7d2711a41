"""Odd but valid calls, and objects used after their end or twice."""

from __future__ import annotations

import array
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE
from support.numerics import computes_with_nan, relative
from support.tiny import TinyLlama

import llamatap
from llamatap._native import _core, native_of
from llamatap.loaded_model import LoadedModel
from llamatap.tokenizer import Tokenizer

lt: Any = llamatap

EXACT = {**EXACT_ANYWHERE, "n_threads": 1}
NOISE = 1e-5


@pytest.fixture(scope="module")
def extractor(tiny_model: lt.Model) -> Any:
    return lt.Extractor(tiny_model, **EXACT)


def context_of(model: Any, tokens: Any = (5, 6, 7), **options: Any) -> Any:
    context = model.context(**{"n_ctx": 256, "n_seq_max": 3, **EXACT, **options})
    context.decode(lt.Batch.of(tokens))
    return context


SAME_PROMPTS: dict[str, Any] = {
    "range": range(5, 8),
    "array.array": array.array("h", [5, 6, 7]),
    "memoryview": memoryview(array.array("i", [5, 6, 7])),
    "big-endian": np.array([5, 6, 7], ">i4"),
    "unsigned": np.array([5, 6, 7], np.uint64),
    "strided": np.array([7, 0, 6, 0, 5, 0], np.int32)[-2::-2],
    "NumPy integers": [np.int64(5), np.uint8(6), np.int16(7)],
    "read-only": np.frombuffer(np.array([5, 6, 7], np.int32).tobytes(), np.int32),
}


@pytest.mark.parametrize("kind", SAME_PROMPTS)
def test_token_ids_of_any_integers(extractor: Any, kind: str) -> None:
    assert np.array_equal(extractor(SAME_PROMPTS[kind], [1]).array, extractor([5, 6, 7], [1]).array)


def test_nul_in_a_text_is_a_character(tiny_model: lt.Model) -> None:
    assert tiny_model.tokenize("a\0b").tolist() == [1, 100, 3, 101]
    assert tiny_model.detokenize([100, 3, 101]) == "a\0b"


def test_layers_and_windows_in_odd_clothes(extractor: Any) -> None:
    expected = extractor([5, 6, 7], [2])
    for layers in (np.array(2), np.array([2]), {2: "x"}, iter([2]), np.int8(2), -3):
        assert np.array_equal(extractor([5, 6, 7], layers).array, expected.array)
    for window in ((-(2**70), 2**70), (None, None), (np.int64(0), 99)):
        assert np.array_equal(extractor([5, 6, 7], [2], window=window).array, expected.array)


def test_outs_of_odd_kinds(extractor: Any, tmp_path: Path) -> None:
    """A memmap that copies on write, a matrix, a view into bytes, neighbours in one array."""
    expected = extractor([5, 6], [1]).array
    expected.tofile(tmp_path / "file")
    private = np.memmap(tmp_path / "file", np.float32, "c", shape=(2, 1, 64))
    private[:] = 0
    extractor([5, 6], [1], out=private)
    assert np.array_equal(private, expected)
    matrix = np.zeros((1, 64), np.float32).view(np.matrix)
    pooled = extractor([5, 6], [1], pool="last", out=matrix)
    assert type(pooled.array) is np.ndarray
    assert np.array_equal(pooled[1], np.asarray(matrix)[0])
    assert relative(pooled[1], expected[1, 0]) < NOISE
    raw = bytearray(2 * 64 * 2)
    extractor([5, 6], [1], out=np.frombuffer(raw, ml_dtypes.bfloat16).reshape(2, 1, 64))
    assert raw == expected.astype(ml_dtypes.bfloat16).tobytes()
    rows = np.zeros((4, 1, 64), np.float32)
    extractor([[5, 6], [7, 8]], [1], out=[rows[2:], rows[:2]])
    assert relative(rows[2:], expected) < NOISE


def test_memory_operations_on_nothing(tiny_model: lt.Model) -> None:
    with context_of(tiny_model) as context:
        memory = context.memory
        calls: list[Callable[[], object]] = [
            lambda: memory.remove(0, 1, 1),
            lambda: memory.remove(0, 3),
            lambda: memory.remove(0, 2**31 - 1, None),
            lambda: memory.remove(2),
            lambda: memory.copy(0, 0),
            lambda: memory.copy(0, 1, 2, 2),
            lambda: memory.copy(2, 1),
            lambda: memory.shift(0, 1, 1, 5),
            lambda: memory.shift(2, None, None, 5),
            lambda: memory.shift(0, None, None, 0),
        ]
        for call in calls:
            call()
            assert [memory.last(seq) for seq in range(3)] == [2, -1, -1]
        before = context.logits()
        memory.remove(0, 2)
        context.decode(lt.Batch.of([7], pos0=2))
        assert relative(context.logits(), before) < NOISE


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_copy_takes_the_place_of_what_is_there(tiny_model: lt.Model, kv_unified: bool) -> None:
    """Otherwise a position would be attended to twice."""
    with context_of(tiny_model, n_ctx=768, kv_unified=kv_unified) as context:
        context.decode(lt.Batch.of([5, 6, 7, 9], seq=2))
        expected = context.logits()
        context.decode(lt.Batch.of([20, 21, 22, 23, 24], seq=1))
        context.memory.copy(0, 1)
        context.memory.copy(0, 1)
        assert context.memory.last(1) == 2
        context.decode(lt.Batch.of([9], seq=1, pos0=3))
        assert relative(context.logits(), expected) < NOISE
        context.memory.copy(1, 0)
        context.memory.remove(1)
        assert [context.memory.last(0), context.memory.last(1)] == [3, -1]
        if kv_unified:
            # A part of it: 5, 31, 32, 33 becomes 5, 6, 7, 33.
            context.decode(lt.Batch.of([5, 31, 32, 33], seq=1))
            context.memory.copy(0, 1, 1, 3)
            assert context.memory.last(1) == 3
            context.memory.remove(1, 3)
            context.decode(lt.Batch.of([9], seq=1, pos0=3))
            assert relative(context.logits(), expected) < NOISE


def test_a_token_of_several_sequences_needs_one_cache(tiny_model: lt.Model, arch_models: Path) -> None:
    batch = lt.Batch()
    for position in range(3):
        batch.add(5 + position, position, [0, 1])
    with tiny_model.context(n_ctx=512, n_seq_max=2, kv_unified=False) as context:
        with pytest.raises(llamatap.InvalidInputError, match="kv_unified"):
            context.decode(batch)
        assert context.memory.last(0) == -1
    with (
        lt.Model(arch_models / "mamba-dense.gguf") as model,
        model.context(n_ctx=256, n_seq_max=2) as context,
    ):
        with pytest.raises(llamatap.InvalidInputError, match="several sequences"):
            context.decode(batch)
        assert context.memory.last(0) == -1


def test_positions_are_not_moved_in_a_cache_without_layers(arch_models: Path) -> None:
    """The model uses one of its two caches (sliding and full attention): the engine would abort."""
    with lt.Model(arch_models / "lfm2-dense.gguf") as model, context_of(model) as context:
        with pytest.raises(llamatap.UnsupportedError, match="cannot move"):
            context.memory.shift(0, None, None, 2)
        context.decode(lt.Batch.of([8], pos0=3))


def test_learned_positions_are_not_moved(arch_models: Path) -> None:
    with lt.Model(arch_models / "gpt2-dense.gguf") as model, context_of(model) as context:
        with pytest.raises(llamatap.UnsupportedError, match="cannot move"):
            context.memory.shift(0, None, None, 2)
        context.decode(lt.Batch.of([8], pos0=3))


def test_a_sequence_that_is_not_there_is_saved_as_such(tiny_model: lt.Model) -> None:
    with context_of(tiny_model) as context:
        nothing, something = context.save(1), context.save(0)
        context.restore(2, nothing)
        assert context.memory.last(2) == -1
        for data in (bytearray(something), memoryview(something)):
            context.restore(1, data)
            context.decode(lt.Batch.of([8], seq=1, pos0=3))
        with context_of(tiny_model, [5, 6, 7, 8]) as other:
            assert relative(context.logits(), other.logits()) < NOISE


def test_every_flipped_bit_of_a_saved_sequence_is_noticed(tiny_model: lt.Model) -> None:
    with context_of(tiny_model) as context:
        state = context.save(0)
        rng = np.random.default_rng(0)
        header = range(16 + 16 + 300)
        body = rng.integers(len(header), len(state), 200).tolist()
        for place in [*header, *body, len(state) - 1]:
            damaged = bytearray(state)
            damaged[place] ^= 1 << int(rng.integers(8))
            with pytest.raises(llamatap.InvalidInputError):
                context.restore(0, bytes(damaged))
        assert context.memory.last(0) == 2


def poisoned(folder: Path) -> lt.Model:
    """A model whose embedding of token 7 is NaN."""
    tiny = TinyLlama(n_layer=2)
    tiny.weights["token_embd.weight"][7, 3] = np.nan
    return lt.Model(tiny.write(folder / "poisoned.gguf"))


@computes_with_nan
@pytest.mark.parametrize("options", [EXACT, {"n_threads": 1}], ids=["exact", "defaults"])
def test_nan_of_one_prompt_comes_to_no_other(tmp_path: Path, options: dict[str, Any]) -> None:
    """It reaches neither prompts of its batch nor later ones, though masked values may be multiplied by 0."""
    with poisoned(tmp_path) as model, lt.Extractor(model, **options) as extractor:
        prompts = [[5] * 20, [6, 7, 8] * 20, [9] * 3, [10] * 70]
        clean = extractor([prompts[0], prompts[2], prompts[3]], [1, -1])
        mixed = extractor(prompts, [1, -1])
        assert np.isnan(mixed[1].array).any()
        for before, after in zip(clean, [mixed[0], mixed[2], mixed[3]], strict=True):
            # Alone rather than in a batch: other kernels, and a cache of float16 by default.
            assert relative(after.array, before.array) < (NOISE if options is EXACT else 2e-3)
        again = extractor([prompts[0], prompts[2], prompts[3]], [1, -1])
        for before, after in zip(clean, again, strict=True):
            assert np.array_equal(after.array, before.array)


@computes_with_nan
@pytest.mark.parametrize("options", [EXACT, {"n_threads": 1}], ids=["exact", "defaults"])
@pytest.mark.parametrize("clear", [lambda memory: memory.clear(), lambda memory: memory.remove(0)])
def test_a_cleared_memory_holds_no_nan(
    tmp_path: Path, options: dict[str, Any], clear: Callable[[lt.Memory], None]
) -> None:
    with poisoned(tmp_path) as model, model.context(n_ctx=256, **options) as context:
        logits = []
        for tokens in ([5] * 20, [7] * 40, [5] * 20):
            clear(context.memory)
            context.decode(lt.Batch.of(tokens))
            logits.append(context.logits())
        assert np.isnan(logits[1]).any()
        assert np.array_equal(logits[0], logits[2])


def test_taps_open_again_and_one_at_a_time(tiny_model: lt.Model) -> None:
    with context_of(tiny_model) as context, context_of(tiny_model) as other:
        tap = context.tap([1])
        with tap:
            with pytest.raises(llamatap.InvalidInputError, match="open"), tap:
                pass
            context.decode(lt.Batch.of([8], pos0=3))
            first = tap.states
        context.decode(lt.Batch.of([9], pos0=4))
        assert tap.states is first
        context.memory.remove(0, 3)
        with tap, other.tap([1, 2]) as second:
            with pytest.raises(llamatap.InvalidInputError, match="nothing was decoded"):
                tap.states  # noqa: B018
            context.decode(lt.Batch.of([8], pos0=3))
            other.decode(lt.Batch.of([8], pos0=3))
            assert np.array_equal(tap.states[1], first[1])
            assert np.array_equal(second.states[1], first[1])
        opened = context.tap([1]).__enter__()
        gc.collect()
        context.memory.remove(0, 3)
        context.decode(lt.Batch.of([8], pos0=3))
        assert np.array_equal(opened.states[1], first[1])
        opened.__exit__(None, None, None)
        tap.__exit__(None, None, None)


def test_a_tap_of_a_closed_context(tiny_model: lt.Model) -> None:
    context = context_of(tiny_model)
    with context.tap([1]) as tap:
        context.decode(lt.Batch.of([8], pos0=3))
        context.close()
        with pytest.raises(llamatap.ClosedError):
            context.decode(lt.Batch.of([9], pos0=4))
    assert np.isfinite(tap.states[1]).all()
    with pytest.raises(llamatap.ClosedError), tap:
        pass


def test_extraction_in_a_tapped_context(tiny_model: lt.Model, extractor: Any) -> None:
    with tiny_model.context(n_ctx=256, **EXACT) as context, context.tap([1]) as tap:
        assert np.array_equal(lt.extract(context, [5, 6], [2]).array, extractor([5, 6], [2]).array)
        context.decode(lt.Batch.of([5, 6]))
        assert relative(tap.states[1], extractor([5, 6], [1])[1]) < NOISE


CLOSED_CONTEXT: dict[str, Callable[[Any], object]] = {
    name: (lambda c, name=name: getattr(c, name)) for name in ("n_ctx", "n_batch", "n_ubatch", "flash_attn")
} | {
    "decode": lambda c: c.decode(lt.Batch.of([5])),
    "logits": lambda c: c.logits(),
    "tap": lambda c: c.tap([1]),
    "save": lambda c: c.save(0),
    "restore": lambda c: c.restore(0, b"x"),
    "clear": lambda c: c.memory.clear(),
    "remove": lambda c: c.memory.remove(0),
    "copy": lambda c: c.memory.copy(0, 1),
    "keep": lambda c: c.memory.keep(0),
    "shift": lambda c: c.memory.shift(0, None, None, 1),
    "first": lambda c: c.memory.first(0),
    "last": lambda c: c.memory.last(0),
    "extract": lambda c: lt.extract(c, [5]),
    "sample": lambda c: lt.Sampler(c.model).sample(c),
}
MODEL_PROPERTIES = [
    name
    for name, kind in [*vars(Tokenizer).items(), *vars(LoadedModel).items()]
    if not name.startswith("_") and not callable(kind) and name != "closed"
]
CLOSED_MODEL: dict[str, Callable[[Any], object]] = {
    name: (lambda m, name=name: getattr(m, name)) for name in MODEL_PROPERTIES
} | {
    "tokenize": lambda m: m.tokenize("x"),
    "detokenize": lambda m: m.detokenize([5]),
    "token_bytes": lambda m: m.token_bytes(5),
    "is_end_of_generation": lambda m: m.is_end_of_generation(5),
    "token_embeddings": lambda m: m.token_embeddings([5]),
    "apply_chat_template": lambda m: m.apply_chat_template([], template="x"),
    "context": lambda m: m.context(),
    "extract": lambda m: lt.extract(m, [5]),
    "Context": lambda m: lt.Context(m),
    "Sampler": lambda m: lt.Sampler(m),
    "Extractor": lambda m: lt.Extractor(m)([5]),
}


@pytest.mark.parametrize("name", CLOSED_CONTEXT)
def test_all_of_a_closed_context_says_so(tiny_model: lt.Model, name: str) -> None:
    context = context_of(tiny_model)
    context.close()
    with pytest.raises(llamatap.ClosedError):
        CLOSED_CONTEXT[name](context)
    assert context.closed


@pytest.mark.parametrize("name", CLOSED_MODEL)
def test_all_of_a_closed_model_says_so(tiny_path: Path, name: str) -> None:
    assert {"arch", "n_layer", "metadata", "chat_template", "layer_map"} <= set(MODEL_PROPERTIES)
    model = lt.Model(tiny_path)
    model.close()
    with pytest.raises(llamatap.ClosedError):
        CLOSED_MODEL[name](model)


def test_extractors_after_their_end(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    extractor = lt.Extractor(model, **EXACT)
    first = extractor([5, 6], [1]).array
    extractor.close()
    assert np.array_equal(extractor([5, 6], [1]).array, first)
    lt.extract(model, [5, 6], [1])
    model.close()
    for gone in (extractor, partial(lt.extract, model)):
        with pytest.raises(llamatap.ClosedError):
            gone([5, 6], [1])


def test_arrays_outlive_everything(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    context = context_of(model)
    with context.tap([1, "norm"]) as tap:
        context.decode(lt.Batch.of([8], pos0=3))
    kept: list[NDArray[Any]] = [tap.states.array, tap.states["norm"], context.logits()]
    kept += [lt.extract(model, [5, 6], [2], pool="mean").array, model.token_embeddings([5])]
    copies = [values.copy() for values in kept]
    context.close()
    model.close()
    del context, model, tap
    gc.collect()
    junk = [np.full(5000, np.nan) for _ in range(500)]
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))
    del junk


def test_a_model_without_weights(tiny_path: Path) -> None:
    with lt.Model(tiny_path, vocab_only=True) as model:
        assert model.tokenize("a").tolist() == [1, 100]
        calls: list[Callable[[], object]] = [
            lambda: lt.extract(model, [5], [1]),
            lambda: model.context(),
            lambda: model.layer_map,
            lambda: model.token_embeddings([5]),
        ]
        for call in calls:
            with pytest.raises(llamatap.UnsupportedError):
                call()


@pytest.mark.slow
@pytest.mark.skipif(
    bool(_core.build_info()["sanitize"]), reason="AddressSanitizer ends the process where memory runs out"
)
def test_sizes_that_no_machine_has(tiny_model: lt.Model) -> None:
    with pytest.raises(MemoryError, match=r"GiB.* the largest n_ctx that fits is \d+"):
        tiny_model.context(n_ctx=2**31 - 1)
    with pytest.raises(MemoryError):
        lt.extract(tiny_model, [5] * 4000, [1] * 10**6)
    with pytest.raises(llamatap.OutOfMemoryError):
        _core.allocate((2**62, 2**62), "float32", native_of(tiny_model))
    huge = {"n_batch": 2**31 - 1, "n_ubatch": 2**31 - 1, "n_outputs_max": 2**31 - 1}
    with tiny_model.context(n_ctx=256, n_threads=1, **huge) as context:
        assert (context.n_batch, context.n_ubatch) == (256, 256)
        context.decode(lt.Batch.of([5] * 256))
        with pytest.raises(llamatap.ContextFullError, match=r"256.*256.*1"):
            context.decode(lt.Batch.of([5], pos0=256))
        assert context.memory.last(0) == 255


def test_metadata_of_any_kind(tiny: TinyLlama, tmp_path: Path) -> None:
    class Odd(TinyLlama):
        def add_keys(self, writer: gguf.GGUFWriter) -> None:
            writer.add_key_value("odd.empty", "", gguf.GGUFValueType.STRING)
            writer.add_string("odd.text", "ü\n🦙")
            writer.add_float32("odd.nan", float("nan"))
            writer.add_uint64("odd.large", 2**64 - 1)
            writer.add_int64("odd.small", -(2**63))
            writer.add_bool("odd.no", False)
            writer.add_array("odd.words", ["a", "", "c"])
            writer.add_array("odd.long", list(range(1025)))
            writer.add_array("odd.limit", list(range(1024)))

    with lt.Model(Odd().write(tmp_path / "odd.gguf"), vocab_only=True) as model:
        found = model.metadata
        assert (found["odd.empty"], found["odd.text"]) == ("", "ü\n🦙")
        assert np.isnan(found["odd.nan"])
        assert (found["odd.large"], found["odd.small"], found["odd.no"]) == (2**64 - 1, -(2**63), False)
        assert found["odd.words"] == ["a", "", "c"]
        assert "odd.long" not in found
        assert found["odd.limit"] == list(range(1024))
        found.clear()
        assert "odd.empty" in model.metadata
