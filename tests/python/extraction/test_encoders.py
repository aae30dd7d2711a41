"""Encoders against NumPy: layers of post-norm blocks, and models without a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT, random_tokens, relative
from support.tiny_models import EPS, N_CTX, Tiny
from support.tiny_models.encoders import N_BUCKETS, N_HEAD, N_LAYER
from support.tiny_models.registry import FILES

import llamatap as lt
from reference import encoder

POST_NORM = {"bert", "nomic-bert", "jina-bert-v2", "jina-bert-v3"}

SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"post_norm": True, "positions": "learned", "activation": "gelu"},
    "nomic-bert": {"post_norm": True},
    "jina-bert-v2": {"post_norm": True, "positions": "alibi", "activation": "gelu"},
    "jina-bert-v3": {"post_norm": True, "activation": "gelu"},
    "modern-bert": {"activation": "gelu", "rope_base": 160000.0, "window": 8},
    "neo-bert": {"rms": True, "positions": "pairs"},
    "eurobert": {"rms": True, "n_head_kv": N_HEAD // 2},
    "t5encoder": {
        "rms": True,
        "positions": "buckets",
        "activation": "gelu",
        "prefix": "enc.",
        "n_buckets": N_BUCKETS,
    },
    "llama-embed": {"rms": True, "positions": "pairs", "n_head_kv": N_HEAD // 2},
}


def shape_of(name: str) -> encoder.Shape:
    return encoder.Shape(
        **{"n_layer": N_LAYER, "n_head": N_HEAD, "n_head_kv": N_HEAD, "eps": EPS, **SHAPES[name]}
    )


@pytest.fixture(scope="module", params=sorted(SHAPES))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return FILES[request.param]()


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    with lt.Model(tiny.write(tmp_path_factory.mktemp("encoder") / "tiny.gguf")) as model:
        yield model


def layers_of(tiny: Tiny) -> list[lt.LayerId]:
    layers: list[lt.LayerId] = [*range(N_LAYER + 1)]
    return layers if tiny.arch in POST_NORM else [*layers, "norm"]


def check(tiny: Tiny, states: lt.States, tokens: Any) -> None:
    """Within float32 of the formulas.

    GELU is read from a table of float16: what goes in and comes out is rounded by up to 2^-11, by which the
    engine differs from the formula. When the reference rounds likewise, what is left is a value here and
    there that falls to the other side of a rounding: little over many rows.
    """
    shape = shape_of(tiny.arch)
    weighed = [(shape, 1e-6)]
    if shape.activation == "gelu":
        weighed = [(shape, 2**-11)]
        if len(tokens) >= 20:
            weighed.append((replace(shape, half_gelu=True), 1e-4))
    for kind, bound in weighed:
        expected, normed = encoder.forward(kind, tiny.weights, np.asarray(tokens))
        for layer in range(N_LAYER + 1):
            assert relative(states[layer], expected[layer]) < bound, f"H_{layer}"
        if normed is not None:
            assert relative(states["norm"], normed) < bound
    # The layers are far apart: a neighbour would not have passed.
    for layer in range(N_LAYER):
        assert relative(expected[layer], expected[layer + 1]) > 0.05


def test_every_layer_is_what_the_formulas_say(tiny: Tiny, model: lt.Model, rng: np.random.Generator) -> None:
    prompts = [random_tokens(rng, model, count) for count in (33, 7, 1, 20)]
    with lt.Extractor(model, **EXACT) as extractor:
        for prompt, states in zip(prompts, extractor(prompts, layers_of(tiny)), strict=True):
            check(tiny, states, prompt)
        # Rows of a window attend to the tokens outside it.
        expected, _ = encoder.forward(shape_of(tiny.arch), tiny.weights, prompts[0])
        assert relative(extractor(prompts[0], [-1], window=(2, 5))[-1], expected[-1][2:5]) < 2**-11


def test_the_layers_that_a_model_does_not_have(tiny: Tiny, model: lt.Model) -> None:
    """Post-norm: there is no final norm. And no encoder has logits: the engine's buffer would be of zeros."""
    if tiny.arch in POST_NORM:
        assert not model.layer_map.has_norm
        with pytest.raises(lt.UnsupportedError, match=r"no final norm.*layer 3 \(-1\)"):
            lt.extract(model, [5, 6, 7], ["norm"])
        context = model.context(n_ctx=64)
        with context, context.tap(["norm"]), pytest.raises(lt.UnsupportedError, match="no final norm"):
            context.decode(lt.Batch.of([5, 6, 7]))
    with model.context(n_ctx=64, **EXACT) as context, context.tap([-1]) as tap:
        context.decode(lt.Batch.of([5, 6, 7]))
        check_last = lt.Extractor(model, **EXACT)([5, 6, 7], [-1])
        assert relative(tap.states[-1], check_last[-1]) < 1e-6
        with pytest.raises(lt.UnsupportedError, match="no output head"):
            context.logits()


def test_nothing_is_kept_between_batches(tiny: Tiny, model: lt.Model, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, model, 20)
    with model.context(n_ctx=64, **EXACT) as context, context.tap(layers_of(tiny)) as tap:
        for _ in range(2):
            context.decode(lt.Batch.of(tokens.tolist()))
            check(tiny, tap.states, tokens)
        with pytest.raises(lt.UnsupportedError, match="no memory"):
            context.memory.last(0)


@pytest.mark.slow
def test_a_prompt_that_is_too_long(tiny: Tiny, model: lt.Model, rng: np.random.Generator) -> None:
    """A learned position embedding ends; everything else goes on past what the model was trained for."""
    tokens = random_tokens(rng, model, 600)
    with pytest.raises(lt.ContextFullError, match=f"600.*{N_CTX}"):
        lt.extract(model, tokens, [-1])
    with lt.Extractor(model, n_ctx=1024, **EXACT) as extractor:
        if shape_of(tiny.arch).positions == "learned":
            with pytest.raises(lt.InvalidInputError, match=str(N_CTX)):
                extractor(tokens, [-1])
            tokens = tokens[:N_CTX]
        check(tiny, extractor(tokens, layers_of(tiny)), tokens)
