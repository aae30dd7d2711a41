"""Wrong or hostile calls raise the documented error and change nothing.

More of them are next to what they misuse: options and batches in test_context.py, extract's arguments in
test_extract.py, files and paths in test_model.py. What is odd and right is in test_edges.py, what needs
threads or processes in test_hostile.py.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE

import llamatap
from llamatap._native import _core, native_of

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap

EXACT = {**EXACT_ANYWHERE, "n_threads": 1}
TOKENS = [5, 6, 7]


@dataclass
class CheckedContext:
    """A model, a context with three tokens in sequence 0, and the expected results of both."""

    model: Any
    extractor: Any
    context: Any
    states: NDArray[Any]
    logits: NDArray[Any]

    @property
    def memory(self) -> Any:
        return self.context.memory

    def check(self) -> None:
        """Check that results are bit for bit as before: the same kernels compute the same shapes."""
        assert np.array_equal(self.extractor(TOKENS, [0, 2, -1, "norm"]).array, self.states)
        assert [self.memory.last(seq) for seq in range(3)] == [2, -1, -1]
        self.context.decode(lt.Batch.of([8], pos0=3))
        assert np.array_equal(self.context.logits(), self.logits)
        self.memory.remove(0, 3)


@pytest.fixture(scope="module")
def checked_of_module(tiny_path: Path) -> Iterator[CheckedContext]:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, n_seq_max=3, **EXACT) as context:
        extractor = lt.Extractor(model, **EXACT)
        states = extractor(TOKENS, [0, 2, -1, "norm"]).array.copy()
        context.decode(lt.Batch.of(TOKENS))
        context.decode(lt.Batch.of([8], pos0=3))
        logits = context.logits()
        context.memory.remove(0, 3)
        yield CheckedContext(model, extractor, context, states, logits)


@pytest.fixture
def checked(checked_of_module: CheckedContext) -> Iterator[CheckedContext]:
    yield checked_of_module
    checked_of_module.check()


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def extract(inputs: Any = (5, 6), layers: Any = (1,), **options: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.extract(c.model, inputs, layers, **options)


def embedding(values: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.Batch(n_embd=64).add_embedding(values, 0)


def decode(*entries: Any) -> Callable[[CheckedContext], Any]:
    def call(c: CheckedContext) -> None:
        batch = lt.Batch()
        for entry in entries:
            batch.add(*entry)
        c.context.decode(batch)

    return call


def context(**options: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: c.model.context(**options)


def sampler(**options: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.Sampler(c.model, **options)


def sampled(logits: Any, **options: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.Sampler(c.model, seed=1, **options).sample_logits(logits)


def chat(template: Any, messages: Any = (), **variables: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: c.model.apply_chat_template(messages, template=template, **variables)


def restore(header: bytes) -> Callable[[CheckedContext], Any]:
    """A state whose lengths and checksum are right."""
    data = b"llamatap-state-1" + struct.pack("<IQI", len(header), 0, zlib.crc32(header)) + header
    return lambda c: c.context.restore(0, data)


def recursive() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def rows_in_common(c: CheckedContext) -> None:
    rows = zeros(3, 1, 64)
    lt.extract(c.model, [[5, 6], [7, 8]], [1], out=[rows[1:], rows[:2]])


INF, NAN = float("inf"), float("nan")

INVALID: dict[str, Callable[[CheckedContext], Any]] = {
    "prompt: bytes": extract(b"abc"),
    "prompt: bytearray": extract(bytearray(b"abc")),
    "prompt: bytes in a list": extract([b"abc"]),
    "prompt: a surrogate in a list": extract(["a", "\udcff"]),
    "prompt: no dimensions": extract(np.array("abc")),
    "prompt: no dimensions in a list": extract([np.array(3), np.array(4)]),
    "prompt: itself": extract(recursive()),
    "prompt: of prompts of prompts": extract([[[5, 6]]]),
    "prompt: bools": extract([True, False]),
    "prompt: an array of bools": extract(np.array([True, False])),
    "prompt: objects": extract(np.array([5, 6], object)),
    "prompt: texts": extract(np.array(["abc"])),
    "prompt: durations": extract(np.array([5, 6], "m8[s]")),
    "prompt: beyond 64 bits": extract([2**70]),
    "prompt: unsigned, beyond 32 bits": extract(np.array([2**63], np.uint64)),
    "prompt: a dict": extract({5: 1}),
    "prompt: a generator": lambda c: lt.extract(c.model, (x for x in [5]), [1]),
    "prompt: text and a number": extract(["a", 5]),
    "prompt: text and None": extract(["a", None]),
    "layers: None": extract(layers=None),
    "layers: bytes": extract(layers=b"\1"),
    "layers: a float": extract(layers=2.0),
    "layers: floats": extract(layers=np.array([1.0])),
    "layers: a NumPy bool": extract(layers=[np.True_]),
    "layers: beyond 64 bits": extract(layers=[2**70]),
    "layers: nested": extract(layers=[[1]]),
    "layers: another word": extract(layers="Norm"),
    "layers: an object": extract(layers=object()),
    "layers: no dimensions, out of range": extract(layers=np.array(9)),
    "window: reversed": extract(window=(1, 0)),
    "window: beyond": extract(window=(2, 9)),
    "window: far beyond": extract(window=(2**70, None)),
    "window: a slice": extract(window=slice(0, 1)),
    "window: a range for two": extract([[5, 6], [7]], window=range(2)),
    "window: empty": extract(window=()),
    "window: floats": extract(window=(0.0, 1.0)),
    "window: a text": extract(window="ab"),
    "pool: an array": extract(pool=np.array([1, 2])),
    "pool: a list": extract(pool=["mean"]),
    "max_length: a text": extract(max_length="3"),
    "max_length: a fraction": extract(max_length=1.5),
    "max_length: NaN": extract(max_length=NAN),
    "max_length: a bool": extract(max_length=True),
    "max_length: negative": extract(max_length=-3),
    "dtype: bytes": extract(dtype=b"\xff"),
    "dtype: a surrogate": extract(dtype="\ud800"),
    "dtype: another byte order": extract(dtype=">f4"),
    "dtype: a dict": extract(dtype={"a": 1}),
    "out: no dimensions": extract(out=np.array(3, np.float32)),
    "out: a scalar": extract(out=np.float32(3)),
    "out: bytes": extract(out=bytearray(512)),
    "out: lists": extract(out=[[0.0] * 64] * 2),
    "out: objects": extract(out=zeros(2, 1, 64, dtype=object)),
    "out: complex": extract(out=zeros(2, 1, 64, dtype=np.complex64)),
    "out: a record": extract(out=zeros(2, 1, 64, dtype=[("x", np.float32)])),
    "out: one row twice": extract(out=np.lib.stride_tricks.as_strided(zeros(64), (2, 1, 64), (0, 0, 4))),
    "out: with a mask": extract(out=np.ma.masked_array(zeros(2, 1, 64), mask=True)),
    "out: an empty list": extract(out=[]),
    "out: one array twice": lambda c: lt.extract(c.model, [[5], [6]], [1], out=[zeros(1, 1, 64)] * 2),
    "out: rows in common": rows_in_common,
    "context: of None": lambda c: lt.Context(None),
    "context: of a path": lambda c: lt.Context(str(c.model.path)),
    "context: type_k a number": context(type_k=5),
    "context: type_v None": context(type_v=None),
    "context: type_k with NUL": context(type_k="f16\0"),
    "context: flash_attn a text": context(flash_attn="off"),
    "context: kv_unified a text": context(kv_unified="no"),
    "context: swa_full None": context(swa_full=None),
    "context: n_ctx None": context(n_ctx=None),
    "context: n_ctx NaN": context(n_ctx=NAN),
    "context: n_ctx a bool": context(n_ctx=True),
    "context: n_ctx beyond 64 bits": context(n_ctx=2**70),
    "context: n_threads a text": context(n_threads="2"),
    "context: n_batch negative": context(n_batch=-1),
    "context: n_seq_max huge": context(n_seq_max=2**31 - 1),
    "context: n_rs_seq negative": context(n_rs_seq=-1),
    "extractor: of None": lambda c: lt.Extractor(None),
    "extractor: n_ctx a text": lambda c: lt.Extractor(c.model, n_ctx="x"),
    "extractor: n_ctx negative": lambda c: lt.Extractor(c.model, n_ctx=-5)([5], [1]),
    "extractor: n_ubatch 0": lambda c: lt.Extractor(c.model, n_ubatch=0)([5], [1]),
    "extract: of None": lambda c: lt.extract(None, [5]),
    "extract: of the core's model": lambda c: lt.extract(native_of(c.model), [5]),
    "batch: a token beyond 64 bits": lambda c: lt.Batch().add(2**70, 0),
    "batch: a position beyond 64 bits": lambda c: lt.Batch().add(5, -(2**70)),
    "batch: a sequence beyond 64 bits": lambda c: lt.Batch().add(5, 0, [2**70]),
    "batch: of text": lambda c: lt.Batch.of("abc"),
    "batch: of bytes": lambda c: lt.Batch.of(b"abc"),
    "batch: of lists": lambda c: lt.Batch.of([[5]]),
    "batch: of fractions": lambda c: lt.Batch.of(np.array([5.0])),
    "batch: of one number": lambda c: lt.Batch.of(5),
    "batch: tokens beyond 64 bits": lambda c: lt.Batch.of([2**70]),
    "batch: the last position beyond 32 bits": lambda c: lt.Batch.of([5, 6], pos0=2**31 - 1),
    "batch: the first position at the end of 64": lambda c: lt.Batch.of([5, 6], pos0=2**63 - 1),
    "batch: a width beyond 32 bits": lambda c: lt.Batch(n_embd=2**40),
    "batch: a negative width": lambda c: lt.Batch(n_embd=-1),
    "embedding: NaN": embedding(np.full(64, NAN, np.float32)),
    "embedding: infinity at the end": embedding(np.array([0.0] * 63 + [INF], np.float32)),
    "embedding: two dimensions": embedding(zeros(1, 64)),
    "decode: a list": lambda c: c.context.decode([5]),
    "decode: None": lambda c: c.context.decode(None),
    "decode: the last position of 32 bits": decode((5, 2**31 - 1, 1)),
    "decode: sequences that parted": decode((5, 3, [0, 1])),
    "decode: one sequence of two out of range": decode((5, 0, [1, 3])),
    "decode: a position that is taken": decode((5, 2, 0)),
    "decode: a gap behind the memory": decode((5, 4, 0)),
    "logits: beyond 64 bits": lambda c: c.context.logits(2**70),
    "logits: a text": lambda c: c.context.logits("x"),
    "logits: before the first": lambda c: c.context.logits(-9),
    "memory: a sequence beyond 32 bits": lambda c: c.memory.remove(2**40),
    "memory: a sequence None": lambda c: c.memory.remove(None),
    "memory: a sequence a bool": lambda c: c.memory.keep(False),
    "memory: a fraction": lambda c: c.memory.remove(0, 1.5),
    "memory: a position beyond 32 bits": lambda c: c.memory.copy(0, 1, 2**40),
    "memory: shift by a fraction": lambda c: c.memory.shift(0, None, None, 1.5),
    "memory: shift beyond 32 bits": lambda c: c.memory.shift(0, None, None, 2**40),
    "memory: shift a reversed range": lambda c: c.memory.shift(0, 2, 1, 1),
    "memory: copy to a negative one": lambda c: c.memory.copy(0, -1),
    "save: a text": lambda c: c.context.save("0"),
    "save: beyond 32 bits": lambda c: c.context.save(2**40),
    "restore: None": lambda c: c.context.restore(1, None),
    "restore: text": lambda c: c.context.restore(1, "llamatap-state-1" + "x" * 40),
    "restore: into a negative one": lambda c: c.context.restore(-1, c.context.save(0)),
    "restore: a header that is a list": restore(b"[]"),
    "restore: a header too deep": restore(b"[" * 200_000),
    "restore: a header that is no text": restore(b"\xff\xfe"),
    "restore: a header of another type": restore(json.dumps({"arch": 1}).encode()),
    "sampler: of None": lambda c: lt.Sampler(None),
    "sampler: of a context": lambda c: lt.Sampler(c.context),
    "sampler: temperature a text": sampler(temperature="1"),
    "sampler: temperature beyond float32": sampler(temperature=1e39),
    "sampler: top_k a fraction": sampler(top_k=1.5),
    "sampler: top_k beyond 32 bits": sampler(top_k=2**40),
    "sampler: top_p NaN": sampler(top_p=NAN),
    "sampler: min_p above 1": sampler(min_p=1.1),
    "sampler: repeat_penalty NaN": sampler(repeat_penalty=NAN),
    "sampler: presence_penalty None": sampler(presence_penalty=None),
    "sampler: penalty_last_n huge": sampler(penalty_last_n=2**31 - 1),
    "sampler: seed a fraction": sampler(seed=1.5),
    "sampler: seed a text": sampler(seed="x"),
    "sample: of None": lambda c: lt.Sampler(c.model).sample(None),
    "sample: a list": sampled([0.0] * 259),
    "sample: another byte order": sampled(zeros(259, dtype=">f4")),
    "sample: two dimensions": sampled(zeros(259, 1)),
    "sample: strides": sampled(zeros(518)[::2]),
    "sample: infinity": sampled(np.full(259, INF, np.float32)),
    "sample: nothing possible": sampled(np.full(259, -INF, np.float32), temperature=1.0),
    "sample: an overflow": sampled(np.full(259, 3e38, np.float32), temperature=1e-3),
    "accept: a text": lambda c: lt.Sampler(c.model).accept("x"),
    "accept: beyond 32 bits": lambda c: lt.Sampler(c.model).accept(2**40),
    "model: of a number": lambda c: lt.Model(5),
    "model: of bytes": lambda c: lt.Model(bytes(c.model.path)),
    "model: n_gpu_layers a text": lambda c: lt.Model(c.model.path, n_gpu_layers="1"),
    "model: n_gpu_layers beyond 32 bits": lambda c: lt.Model(c.model.path, n_gpu_layers=2**40),
    "model: use_mmap None": lambda c: lt.Model(c.model.path, use_mmap=None),
    "model: vocab_only a text": lambda c: lt.Model(c.model.path, vocab_only="no"),
    "model: progress not callable": lambda c: lt.Model(c.model.path, progress=5),
    "tokenize: None": lambda c: c.model.tokenize(None),
    "tokenize: add_special a text": lambda c: c.model.tokenize("x", add_special="no"),
    "detokenize: a text": lambda c: c.model.detokenize("abc"),
    "detokenize: None": lambda c: c.model.detokenize(None),
    "detokenize: fractions": lambda c: c.model.detokenize([1.5]),
    "token_bytes: beyond 32 bits": lambda c: c.model.token_bytes(2**40),
    "token_bytes: a fraction": lambda c: c.model.token_bytes(1.0),
    "token_bytes: negative": lambda c: c.model.token_bytes(-1),
    "is_end_of_generation: None": lambda c: c.model.is_end_of_generation(None),
    "token_embeddings: negative": lambda c: c.model.token_embeddings([-1]),
    "token_embeddings: beyond": lambda c: c.model.token_embeddings(np.array([259], np.int32)),
    "chat: no messages": chat("x", None),
    "chat: no mappings": chat("x", [5]),
    "chat: no template": chat(5),
    "chat: endless": chat("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "chat: a terabyte": chat("{{ 'a' * 10**12 }}"),
    "chat: a long range": chat("{{ range(10**12) | list }}"),
    "chat: a callback that fails": chat("{{ x(5) }}", x=lambda value: value.missing),
    "tap: rows an array": lambda c: c.context.tap([1], rows=np.array([1, 2])),
    "tap: layers bytes": lambda c: c.context.tap(b"\1"),
    "tap: dtype an object": lambda c: c.context.tap([1], dtype=object()),
    "states: a fraction": lambda c: lt.extract(c.model, [5], [1])[1.5],
    "states: None": lambda c: lt.extract(c.model, [5], [1])[None],
    "states: a slice": lambda c: lt.extract(c.model, [5], [1])[0:1],
}


@pytest.mark.parametrize("name", INVALID)
def test_wrong_arguments_raise_errors_of_ours(checked: CheckedContext, name: str) -> None:
    with pytest.raises(llamatap.InvalidInputError) as caught:
        INVALID[name](checked)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value)


#: Python's own errors: calls that do not fit a signature, objects without __init__.
TYPE_ERRORS: dict[str, Callable[[CheckedContext], Any]] = {
    "batch: a fraction": lambda c: lt.Batch().add(5.0, 0),
    "batch: NumPy's fraction": lambda c: lt.Batch().add(np.float32(5.7), 0),
    "batch: a bool": lambda c: lt.Batch().add(True, 0),
    "batch: a text": lambda c: lt.Batch().add("5", 0),
    "batch: a sequence None": lambda c: lt.Batch().add(5, 0, None),
    "batch: output a text": lambda c: lt.Batch().add(5, 0, output="no"),
    "embedding: a list": embedding([0.0] * 64),
    "embedding: None": embedding(None),
    "embedding: another byte order": embedding(zeros(64, dtype=">f4")),
    "embedding: strides": embedding(zeros(128)[::2]),
    "context: an unknown option": context(nonsense=1),
    "extractor: an unknown option": lambda c: lt.Extractor(c.model, nonsense=1),
    "batch: never made": lambda c: len(lt.Batch.__new__(lt.Batch)),
    "batch: never made, filled": lambda c: lt.Batch.__new__(lt.Batch).add(5, 0),
    "batch: never made, decoded": lambda c: c.context.decode(lt.Batch.__new__(lt.Batch)),
    "core: a model never made": lambda c: _core.Model.__new__(_core.Model).arch,
    "core: a context never made": lambda c: _core.Context.__new__(_core.Context).n_ctx,
    "core: a map never made": lambda c: _core.LayerMap.__new__(_core.LayerMap).nodes,
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_calls_that_do_not_fit_are_type_errors(checked: CheckedContext, name: str) -> None:
    with pytest.raises(TypeError):
        TYPE_ERRORS[name](checked)


def test_classes_that_forget_to_call_their_base(checked: CheckedContext) -> None:
    def nothing(self: object) -> None:
        pass

    with pytest.raises(TypeError, match="__init__"):
        type("Mine", (lt.Batch,), {"__init__": nothing})()
    uses: list[tuple[type, Callable[[Any], object]]] = [
        (lt.Model, lambda x: lt.extract(x, [5])),
        (lt.Context, lambda x: x.decode(lt.Batch.of([5]))),
        (lt.Extractor, lambda x: x([5])),
        (lt.Sampler, lambda x: x.accept(5)),
    ]
    for base, use in uses:
        for made in (type("Mine", (base,), {"__init__": nothing})(), object.__new__(base)):
            with pytest.raises((AttributeError, llamatap.Error)):
                use(made)
    mine = type("Mine", (lt.Batch,), {})()
    mine.add(8, 0, 1)
    checked.context.decode(mine)
    checked.memory.remove(1)


@pytest.mark.parametrize(
    "what", ["Model", "Context", "Memory", "Extractor", "Sampler", "Tap", "Batch", "LayerMap"]
)
def test_what_holds_the_engines_objects_is_not_copied(checked: CheckedContext, what: str) -> None:
    made = {
        "Model": checked.model,
        "Context": checked.context,
        "Memory": checked.memory,
        "Extractor": lt.Extractor(checked.model),
        "Sampler": lt.Sampler(checked.model),
        "Tap": checked.context.tap([1]),
        "Batch": lt.Batch.of([5]),
        "LayerMap": checked.model.layer_map,
    }[what]
    message = f"{what} objects cannot be copied or pickled"
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=message):
            duplicate(made)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=message):
            pickle.dumps(made, protocol)


def test_states_are_copied_and_stay_read_only(checked: CheckedContext) -> None:
    states = lt.extract(checked.model, TOKENS, [1, "norm"])
    for again in (copy.copy(states), copy.deepcopy(states), pickle.loads(pickle.dumps(states))):
        assert np.array_equal(again["norm"], states["norm"])
        assert again.tokens.tolist() == TOKENS
        assert again.provenance == states.provenance
        assert not again.array.flags.writeable
        assert not again.tokens.flags.writeable


#: Mistakes of a first hour, and what their errors must name: what to do.
FIRST_HOUR: dict[str, tuple[Callable[[CheckedContext], Any], str]] = {
    "a tap without with": (lambda c: c.context.tap([1]).states, "with context.tap"),
    "text where ids belong": (lambda c: lt.Batch.of("hello"), "model.tokenize"),
    "a message for messages": (
        lambda c: c.model.apply_chat_template({"role": "user"}, template="x"),
        "a list of",
    ),
    "a number for a window": (lambda c: lt.extract(c.model, [5], [1], window=-1), r"\(start, stop\)"),
    "all layers by name": (lambda c: lt.extract(c.model, [5], "all"), r"range\("),
    "no layers": (lambda c: lt.extract(c.model, [5], None), '"norm"'),
    "ids and text mixed": (lambda c: lt.extract(c.model, [1, "a"], [1]), "token ids and str"),
    "an out of float64": (lambda c: lt.extract(c.model, [5], [1], out=np.zeros((1, 1, 64))), "dtype of out"),
    "one id to translate": (lambda c: lt.layers.translate(-2, n_layer=3), "a list"),
}


@pytest.mark.parametrize("name", FIRST_HOUR)
def test_errors_say_what_to_do(checked: CheckedContext, name: str) -> None:
    call, advice = FIRST_HOUR[name]
    with pytest.raises(lt.InvalidInputError, match=advice):
        call(checked)


NO_DEPTHS: list[Any] = ["30", None, [], 1j, float("inf"), True, 0]
TRANSLATIONS: dict[str, dict[str, Any]] = {
    **{f"n_layer={value!r}": {"n_layer": value} for value in NO_DEPTHS},
    "n_layer of NumPy's floats": {"n_layer": np.float32(3)},
    "source a list": {"source": []},
    "source a dict": {"source": {}},
    "source an array": {"source": np.array([1, 2])},
    "target an array": {"target": np.array(["llamatap", "vllm"])},
    "final_norm a text": {"final_norm": "no"},
    "ids of arrays": {"ids": np.ones((2, 2), int), "final_norm": False},
    "ids of no dimensions": {"ids": np.array(1)},
}


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_arguments_of_translate(name: str) -> None:
    options = {"ids": [1], "n_layer": 3} | TRANSLATIONS[name]
    with pytest.raises(lt.InvalidInputError):
        lt.layers.translate(options.pop("ids"), **options)


def test_translate_for_takes_a_model() -> None:
    with pytest.raises(lt.InvalidInputError, match="model must be a Model, not str"):
        lt.layers.translate_for("x", [1])


@pytest.mark.parametrize("path", [5, None, b"x", 1.5, ["x"]])
def test_paths_are_strings_or_paths(path: Any) -> None:
    for call in (lt.Model, lt.probe, lt.States.load):
        with pytest.raises(lt.InvalidInputError, match="path must be a str or a path"):
            call(path)


@pytest.mark.parametrize(
    "huge",
    [10**5000, -(10**5000), [10**5000], "9" * 10_000],
    ids=["positive", "negative", "in a list", "text"],
)
def test_messages_of_errors_are_bounded(huge: Any, tiny_model: Any) -> None:
    """Python writes no integer of more than 4300 digits: a message with one would fail itself."""
    calls: dict[str, Callable[[], Any]] = {
        "max_length": lambda: lt.extract(tiny_model, "ab", max_length=huge),
        "layers": lambda: lt.extract(tiny_model, "ab", layers=huge),
        "pool": lambda: lt.extract(tiny_model, "ab", pool=huge),
        "window": lambda: lt.extract(tiny_model, "ab", window=(huge, huge)),
        "dtype": lambda: lt.extract(tiny_model, "ab", dtype=huge),
        "prompt": lambda: lt.extract(tiny_model, [huge]),
        "n_ctx": lambda: tiny_model.context(n_ctx=huge),
        "weights": lambda: lt.Model(tiny_model.path, weights=huge),
        "seed": lambda: lt.Sampler(tiny_model, seed=huge),
        "temperature": lambda: lt.Sampler(tiny_model, temperature=huge),
        "logit_bias": lambda: lt.Sampler(tiny_model, logit_bias={5: huge}),
        "no logit_bias": lambda: lt.Sampler(tiny_model, logit_bias=huge),
        "max_tokens": lambda: lt.generate(tiny_model, "ab", max_tokens=huge),
        "states": lambda: lt.generate(tiny_model, "ab", states=huge),
        "stop_tokens": lambda: lt.generate(tiny_model, "ab", stop_tokens=[huge]),
        "timeout": lambda: lt.probe(tiny_model.path, timeout=huge),
        "translate": lambda: lt.layers.translate([huge], n_layer=3),
        "n_layer": lambda: lt.layers.translate([1], n_layer=huge),
        "messages": lambda: tiny_model.apply_chat_template([huge], template="{{ messages }}"),
    }
    for name, call in calls.items():
        with pytest.raises(lt.Error) as caught:
            call()
        assert len(str(caught.value)) < 600, name
        assert isinstance(caught.value, (lt.InvalidInputError, lt.ContextFullError)), name
