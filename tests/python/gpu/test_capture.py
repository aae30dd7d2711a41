"""Capture where layers run on a GPU, all of them or some: `pip install . -C cmake.define.GGML_CUDA=ON`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support.numerics import random_tokens, relative
from support.separate_caches import check_streams
from support.tiny import TinyLlama

import llamatap as lt
from llamatap._native import native_of
from reference import decoder

pytestmark = pytest.mark.skipif(
    not any(device["kind"] == "gpu" for device in lt.build_config()["devices"]),
    reason="needs a GPU and a build for it",
)

# Matrix products on a GPU round their inputs to TF32 or float16; the layers are 5e-2 apart.
BOUND = 5e-3


@pytest.fixture(scope="module", params=[-1, 5, 4, 2, 1], ids=lambda n: f"{n}-on-gpu")
def model(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[lt.Model]:
    with lt.Model(tiny_path, n_gpu_layers=request.param) as model:
        yield model


@pytest.mark.parametrize("layers", [[0, 1, 2, 3, 4, "norm"], [2], [0], [4], [3, "norm", 3, 1]], ids=str)
@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_states_are_what_the_formulas_say(
    model: lt.Model, tiny: TinyLlama, rng: np.random.Generator, layers: list[lt.LayerId], n_ubatch: int
) -> None:
    tokens = random_tokens(rng, model, 70)
    states, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    with lt.Extractor(model, n_ubatch=n_ubatch) as extractor:
        found = extractor(tokens, layers)
    for column, layer in enumerate(layers):
        expected = normed if layer == "norm" else states[int(layer)]
        assert relative(found.array[:, column], expected) < BOUND, layer
        assert max(map(relative, found.array[:, column], expected)) < 4 * BOUND, layer


def test_a_tap_changes_no_logits_and_an_early_end_leaves_no_trace(
    model: lt.Model, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, model, 40)
    batch = lt.Batch.of(tokens.tolist())
    with model.context(n_ctx=256) as context:
        context.decode(batch)
        plain = context.logits()
        context.memory.clear()
        lt.extract(context, tokens, [1])
        with context.tap([0, 2, 3], rows="all") as tap:
            context.decode(batch)
        assert np.array_equal(context.logits(), plain)
        assert tap.states.array.shape == (40, 3, model.n_embd)


def test_ragged_prompts_in_one_batch(model: lt.Model, rng: np.random.Generator) -> None:
    prompts = [random_tokens(rng, model, n) for n in (3, 40, 1, 17, 66)]
    with lt.Extractor(model) as extractor:
        together = extractor(prompts, [2, -1], dtype="float32")
        for prompt, states in zip(prompts, together, strict=True):
            assert relative(states.array, extractor(prompt, [2, -1]).array) < BOUND
        half = extractor(prompts[1], [2, -1], dtype="float16")
        assert relative(half.array, together[1].array) < 2 * BOUND
        pooled = extractor(prompts[1], [2, -1], pool="mean")
        assert relative(pooled.array, together[1].array.mean(axis=0)) < BOUND


def test_token_embeddings_come_from_wherever_they_are(model: lt.Model, tiny: TinyLlama) -> None:
    ids = [5, 0, 258]
    assert np.array_equal(model.token_embeddings(ids), tiny.weights["token_embd.weight"][ids])


def test_provenance_names_the_device(model: lt.Model) -> None:
    assert model.devices
    assert lt.extract(model, [3, 4], [1]).provenance["backend"] == ", ".join(model.devices)


def test_hooks_and_callback_give_the_same_bits(
    model: lt.Model, tiny: TinyLlama, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, model, 70)
    batch = lt.Batch.of(tokens.tolist())
    found = []
    with model.context(n_ctx=256, n_ubatch=16) as context:
        for way in ("callback", "hooks", "automatic"):
            context.memory.clear()
            array, _ = native_of(context).decode_tapped(
                model.layer_map, [0, 1, 2, 3], "float32", False, batch, way
            )
            found.append(array)
            plain = context.logits()
    states, _, logits = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    for layer in range(4):
        assert relative(found[1][:, layer], states[layer]) < BOUND
    assert relative(plain, logits[-1]) < BOUND


@pytest.mark.parametrize("way", ["hooks", "callback", "automatic"])
@pytest.mark.parametrize("in_turns", [False, True], ids=["one after the other", "in turns"])
def test_rows_of_sequences_in_streams_of_their_own(
    model: lt.Model, rng: np.random.Generator, way: Literal["hooks", "callback", "automatic"], in_turns: bool
) -> None:
    """The engine computes them in another order than they are given in."""
    texts = [random_tokens(rng, model, n).tolist() for n in (45, 14)]
    check_streams(model, texts, way, in_turns=in_turns, bound=BOUND)


def test_embeddings_in_place_of_tokens(model: lt.Model, tiny: TinyLlama, rng: np.random.Generator) -> None:
    values = rng.standard_normal((9, tiny.n_embd)).astype(np.float32)
    states, _, _ = decoder.forward(tiny.shape(), tiny.weights, values.astype(np.float64))
    batch = lt.Batch(n_embd=tiny.n_embd)
    for position, row in enumerate(values):
        batch.add_embedding(row, position, output=position == 8)
    with model.context(n_ctx=256) as context, context.tap(range(tiny.n_layer + 1)) as tap:
        context.decode(batch)
        for layer in range(tiny.n_layer + 1):
            assert relative(tap.states[layer], states[layer]) < BOUND, f"H_{layer}"


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_converted_weights(
    tiny_path: Path, tiny: TinyLlama, rng: np.random.Generator, weights: Literal["f32", "bf16"]
) -> None:
    """They go to the GPU from a file in memory, which is not kept."""
    with lt.Model(tiny_path, n_gpu_layers=-1, weights=weights) as model:
        tokens = random_tokens(rng, model, 70)
        found = lt.extract(model, tokens, [0, 2, 4])
        assert model.devices
        with open("/proc/self/maps") as file:
            assert "memfd:llamatap" not in file.read()
    states, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    for layer in (0, 2, 4):
        assert relative(found[layer], states[layer]) < BOUND
