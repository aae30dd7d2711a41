"""Copies in the engine's graphs, against the graph callback: the same bits, and the same logits later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, random_tokens
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35

import llamatap as lt
from llamatap._native import native_of

LENGTHS = (37, 5, 1, 20)


def extracted(
    context: lt.Context, prompts: list[NDArray[np.int32]], slots: list[int], way: str, **wanted: Any
) -> list[NDArray[np.uint8]]:
    """The states of prompts in one batch, as bytes."""
    dtype, pool = wanted.get("dtype", "float32"), wanted.get("pool", "none")
    jobs = []
    for prompt in prompts:
        begin, end = wanted.get("window", lambda n: (0, n))(len(prompt))
        rows = end - begin if pool == "none" else 1
        n_bytes = rows * len(slots) * context.model.n_embd * (4 if dtype == "float32" else 2)
        jobs.append((prompt, begin, end, pool, np.full(n_bytes, 170, np.uint8)))
    assert native_of(context).extract(context.model.layer_map, slots, dtype, jobs, None, way)
    return [job[-1] for job in jobs]


WANTED: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "mean": {"pool": "mean"},
    "max, bfloat16": {"pool": "max", "dtype": "bfloat16"},
    "last": {"pool": "last"},
    "window": {"window": lambda n: (n // 3, n - n // 4)},
}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("kind", [TinyLlama, TinyGemma3, TinyQwen35])
def test_extraction_gives_the_same_bits(
    kind: type[TinyLlama], wanted: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with lt.Model(kind().write(tmp_path / "tiny.gguf")) as model:
        n = model.n_layer
        prompts, others = ([random_tokens(rng, model, length) for length in LENGTHS] for _ in range(2))
        with model.context(n_ctx=1024, n_seq_max=4, n_ubatch=16, n_outputs_max=1024, **EXACT) as context:
            # One after the other in one context: the engine uses graphs again where it may.
            for slots in ([n - 1], [n], [n + 1], [0], [1, 0], [n, 1, 1, n - 1], list(range(n + 2)), [0, 1]):
                found = []
                for way in ("copies", "callback"):
                    found.append(extracted(context, prompts, slots, way, **WANTED[wanted]))
                    # What the memory still holds must not help the next one.
                    extracted(context, others, [n], "callback")
                by_copies, by_callback = found
                for ours, theirs in zip(by_copies, by_callback, strict=True):
                    assert np.array_equal(ours, theirs), f"slots {slots}"


@pytest.mark.parametrize("outputs_only", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_taps_give_the_same_bits_and_logits(
    dtype: str, outputs_only: bool, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """Plain decodes, taps of other layers and extractions lie between, with graphs of the same shape."""
    n = tiny_model.n_layer
    tokens = random_tokens(rng, tiny_model, 30).tolist()

    def text(way: str) -> list[Any]:
        found: list[Any] = []
        with tiny_model.context(n_ctx=256, n_ubatch=16, n_outputs_max=256, **EXACT) as context:
            native = native_of(context)
            extracted(context, [np.array(tokens[:1], np.int32)], [1], way)
            context.decode(lt.Batch.of(tokens[:20]))
            for position, token in enumerate(tokens[20:], 20):
                batch = lt.Batch.of([token], pos0=position)
                if position % 3 == 0:
                    context.decode(batch)
                else:
                    slots = [1, n] if position % 3 == 1 else [0, n + 1]
                    states, _ = native.decode_tapped(
                        tiny_model.layer_map, slots, dtype, outputs_only, batch, way
                    )
                    found.append(states)
                found.append(context.logits().copy())
            return found

    for ours, theirs in zip(text("copies"), text("callback"), strict=True):
        assert np.array_equal(ours, theirs)


def test_an_extraction_stops_behind_the_last_layer(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, tiny_model, 12)
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        nodes = []
        for slot in (1, tiny_model.n_layer - 1):
            extracted(context, [prompt], [slot], "copies")
            nodes.append(native_of(context).nodes_seen)
        assert nodes[0] < 0.5 * nodes[1]


def test_values_that_are_not_finite_are_seen(tmp_path: Path, rng: np.random.Generator) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][7] = np.inf
    with lt.Model(tiny.write(tmp_path / "tiny.gguf")) as model, model.context(n_ctx=256) as context:
        for dtype in ("float32", "float16", "bfloat16"):
            for tokens, finite in (([5, 6], True), ([5, 7], False)):
                out = np.zeros(2 * model.n_embd * (4 if dtype == "float32" else 2), np.uint8)
                job = (np.array(tokens, np.int32), 0, 2, "none", out)
                native = native_of(context)
                assert native.extract(model.layer_map, [1], dtype, [job], None, "copies") == finite


def test_embeddings_in_place_of_tokens(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    batch = lt.Batch(n_embd=tiny_model.n_embd)
    for position in range(9):
        batch.add_embedding(rng.standard_normal(tiny_model.n_embd).astype(np.float32), position, output=True)
    slots = list(range(tiny_model.n_layer + 2))
    found = []
    for way in ("copies", "callback"):
        with tiny_model.context(n_ctx=256, **EXACT) as context:
            native = native_of(context)
            states, _ = native.decode_tapped(tiny_model.layer_map, slots, "float32", False, batch, way)
            found.append(states)
    by_copies, by_callback = found
    assert np.array_equal(by_copies, by_callback)
