"""Targets that the engine's own drafting gets wrong, and a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35
from support.tiny_models import drafters

import llamatap as lt
from reference import decoder, eagle3, gated_delta


def states_of(tiny: TinyLlama, tokens: list[int]) -> NDArray[np.float64]:
    """H_0..H_n, (n + 1, tokens, width)."""
    entering = tiny.entering(np.array(tokens, np.int32))
    shape: Any = tiny.shape()
    formulas: Any = gated_delta if isinstance(tiny, TinyQwen35) else decoder
    found: NDArray[np.float64] = formulas.forward(shape, tiny.weights, entering)[0]
    return found


@pytest.mark.parametrize("tiny", [TinyGemma3(), TinyQwen35()], ids=["never written", "post-norm"])
def test_eagle3_on_the_last_layer_sees_it_before_the_norm(
    tiny: TinyLlama, tmp_path: Path, rng: np.random.Generator
) -> None:
    """For that id the engine's own hook gives nothing on gemma3 and norm(H_n) on qwen35."""
    target = tiny.write(tmp_path / "target.gguf")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf", target_layers=(1, 3, tiny.n_layer))
    weights = eagle3.Weights.read(draft)
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, draft, **EXACT)
        assert spec.target_layers == (1, 3, tiny.n_layer)
        drafter = lt.Eagle3Drafter(spec, n_max=3)
        for length in (2, 9, 30):
            text = rng.integers(3, tiny.n_vocab, length).tolist()
            context.memory.clear()
            drafter.reset(0)
            with context.tap(spec.target_layers) as tap:
                batch = lt.Batch.of(text[:-1])
                context.decode(batch)
                drafter.process(batch, tap.states)
            found = drafter.draft({0: lt.DraftRequest(text[-1], length - 1, 3)})[0]
            states = states_of(tiny, text[:-1])
            features = np.concatenate([states[layer] for layer in spec.target_layers], axis=1)
            tokens, probs = eagle3.draft(text, features, weights, 3)
            assert found.tokens.tolist() == tokens
            # GELU is a table of float16 in the engine.
            np.testing.assert_allclose(np.asarray(found.probs), np.asarray(probs), rtol=2e-2)


PROMPTS = [
    "The capital of France is",
    "Write the numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4,",
    "Once upon a time there was a",
]


def test_a_real_model_in_float32_writes_the_same_text_with_drafters(
    smollm2_path: Path, smollm2_f32_path: Path
) -> None:
    """The draft model is the same one, quantised: most of what it drafts stands."""
    with (
        lt.Model(smollm2_f32_path) as model,
        model.context(n_ctx=1024, n_seq_max=3, type_k="f32", type_v="f32", flash_attn=False) as context,
    ):
        options: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "top_p": 0.95, "seed": 4}
        plain = [one.tokens.tolist() for one in lt.generate(context, PROMPTS, **options)]
        chain = [lt.NGramDrafter(), lt.ModelDrafter(context, smollm2_path, n_max=3)]
        found = list(lt.generate(context, PROMPTS, chain, **options))
        assert [one.tokens.tolist() for one in found] == plain
        assert sum(one.stats.accepted for one in found) > 20


def test_a_quantised_model_differs_in_near_ties_alone(smollm2: lt.Model) -> None:
    """Quantised kernels round differently for another number of rows (llama.cpp#25618)."""
    with smollm2.context(n_ctx=1024, n_seq_max=3) as context:
        plain = list(lt.generate(context, PROMPTS, max_tokens=48))
        drafted = list(lt.generate(context, PROMPTS, lt.NGramDrafter(1, 1), max_tokens=48))
        assert sum(one.stats.drafted for one in drafted) > 50
        for one, other in zip(plain, drafted, strict=True):
            first = next(
                (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), None
            )
            if first is None:
                assert one.tokens.tolist() == other.tokens.tolist()
                continue
            context.memory.clear()
            context.decode(lt.Batch.of([*one.prompt.tolist(), *one.tokens[:first].tolist()]))
            logits = context.logits()
            # A fresh prefill rounds in a third way, so that it may find yet another one the likeliest.
            behind = logits.max() - logits[[int(one.tokens[first]), int(other.tokens[first])]]
            assert behind.max() < 0.3, f"token {first} of prompt {one.index}: {behind}"
            context.memory.clear()


def test_states_of_some_outputs_are_those_rows_where_the_graph_keeps_all(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The MTP graphs of most architectures crop logits to outputs, but not the states that the engine then
    reads from the start."""
    path = drafters.write_glm4moe(tmp_path / "glm4moe.gguf")
    tokens = rng.integers(3, 259, 8)
    states = rng.standard_normal((8, 64)).astype(np.float32)
    some = np.array([False, False, True, False, False, True, False, True])
    with lt.Model(path, load_mtp=True) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, model, **EXACT)
        assert spec.target_layers == ("norm",)
        found = spec.decode(tokens, states, range(8), outputs=some, logits=True)
        spec.memory.clear()
        every = spec.decode(tokens, states, range(8), logits=True)
        assert found.states is not None
        assert every.states is not None
        assert found.logits is not None
        assert every.logits is not None
        np.testing.assert_allclose(found.logits, every.logits[some], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.states, every.states[some], rtol=1e-4, atol=1e-4)
        # The state is what the head reads: normed, as the target's is.
        reader = gguf.GGUFReader(path)
        head = next(tensor.data for tensor in reader.tensors if tensor.name == "output.weight")
        np.testing.assert_allclose(every.logits, every.states @ head.T, rtol=1e-3, atol=1e-3)
