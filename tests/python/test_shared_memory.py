"""Blocks that attend to the target's memory (gemma4-assistant): every draft is the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import EXACT
from tinies.assistant import write_assistant
from tiny import TinyGemma3, TinyLlama

import llamatap as lt
from reference import decoder
from reference.shared_memory import Assistant

TARGET = TinyGemma3(n_layer=6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGET.write(tmp_path_factory.mktemp("shared") / "target.gguf")


@pytest.mark.parametrize("options", [EXACT, {}, {"kv_unified": False}], ids=str)
@pytest.mark.parametrize("local", [(True, False), (True,), (True, True, False)], ids=str)
def test_drafts_of_several_sequences_are_the_formulas(
    local: tuple[bool, ...],
    options: dict[str, Any],
    target: Path,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    path = write_assistant(tmp_path / "assistant.gguf", local=local)
    oracle = Assistant(path, TARGET.shape(), TARGET.weights)
    pending = {seq: rng.integers(3, 250, 9 + 7 * seq).tolist() for seq in range(3)}
    texts: dict[int, list[int]] = {seq: [] for seq in pending}
    with lt.Model(target) as model, model.context(n_ctx=768, n_seq_max=3, **options) as context:
        spec = lt.SpeculativeContext(context, path)
        assert spec.target_layers == ("norm",)
        drafter = lt.MtpDrafter(spec, n_max=3)
        with context.tap(spec.target_layers):
            for round_ in range(6):
                batch = lt.Batch()
                for seq, tokens in pending.items():
                    for i, token in enumerate(tokens):
                        batch.add(token, len(texts[seq]) + i, seq)
                context.decode(batch)
                drafter.process(batch)
                last = {}
                for seq, tokens in pending.items():
                    kept = len(tokens) if round_ == 0 else int(rng.integers(1, len(tokens) + 1))
                    if round_ > 0:
                        drafter.accept(seq, kept - 1)
                    texts[seq] += tokens[:kept]
                    context.memory.remove(seq, len(texts[seq]))
                    last[seq] = int(rng.integers(3, 250))
                drafts = drafter.draft({seq: lt.DraftRequest(last[seq], len(texts[seq]), 3) for seq in texts})
                for seq, text in texts.items():
                    states, normed, _ = decoder.forward(
                        TARGET.shape(), TARGET.weights, TARGET.entering(np.array(text, np.int32))
                    )
                    tokens, probs = oracle.draft(last[seq], normed[-1], states, 3)
                    assert drafts[seq].tokens.tolist() == tokens
                    # The engine's GELU is a table of float16.
                    np.testing.assert_allclose(np.asarray(drafts[seq].probs), np.array(probs), rtol=1e-2)
                    assert context.memory.last(seq) == len(text) - 1
                pending = {seq: [last[seq], *drafts[seq].tokens.tolist()] for seq in texts}


def test_generation_is_the_same_with_it(target: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_assistant(tmp_path / "assistant.gguf")
    prompts = [rng.integers(3, 250, n).tolist() for n in (5, 40, 12)]
    with lt.Model(target) as model, model.context(n_ctx=768, n_seq_max=2, **EXACT) as context:
        drafter = lt.MtpDrafter(lt.SpeculativeContext(context, path), n_max=3)
        plain = [one.tokens.tolist() for one in lt.generate(context, prompts, max_tokens=30)]
        found = list(lt.generate(context, prompts, drafter, max_tokens=30))
        assert [one.tokens.tolist() for one in found] == plain
        assert all(one.stats.drafted > 30 for one in found)


def test_targets_without_such_a_memory_are_refused(target: Path, tmp_path: Path) -> None:
    assistant = write_assistant(tmp_path / "assistant.gguf")
    llama = TinyLlama().write(tmp_path / "llama.gguf")
    last_is_local = TinyGemma3(n_layer=7).write(tmp_path / "gemma7.gguf")
    for path in (llama, last_is_local):
        with (
            lt.Model(path) as model,
            model.context(n_ctx=256) as context,
            pytest.raises(lt.InvalidInputError, match="sliding window, and its last one none"),
        ):
            lt.SpeculativeContext(context, assistant)
    with lt.Model(target) as model, model.context(n_ctx=256) as context:
        other_heads = write_assistant(tmp_path / "heads.gguf", n_head_kv=4)
        with pytest.raises(lt.InvalidInputError, match=r"reads 4 heads of 24, layer 4 .* has 2 of 24"):
            lt.SpeculativeContext(context, other_heads)
        other_width = write_assistant(tmp_path / "width.gguf", n_embd_target=80)
        with pytest.raises(lt.InvalidInputError, match="states of width 80"):
            lt.SpeculativeContext(context, other_width)


def test_the_targets_memory_is_changed_through_the_target_alone(target: Path, tmp_path: Path) -> None:
    path = write_assistant(tmp_path / "assistant.gguf")
    text, after = [5, 6, 7, 8, 9], lt.Batch.of([10], pos0=5)
    with lt.Model(target) as model, model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        context.decode(lt.Batch.of(text))
        with pytest.raises(lt.InvalidInputError, match="must be empty when the speculative context is made"):
            lt.SpeculativeContext(context, path)
        context.decode(after)
        expected = context.logits()
        context.memory.clear()
        with lt.SpeculativeContext(context, path) as spec:
            context.decode(lt.Batch.of(text))
            for change in (
                spec.memory.clear,
                lambda: spec.memory.remove(0),
                lambda: spec.memory.keep(1),
                lambda: spec.memory.copy(0, 1),
                lambda: spec.memory.shift(0, None, None, 3),
                lambda: spec.save(0),
            ):
                with pytest.raises(lt.UnsupportedError, match="change the target's"):
                    change()
            assert spec.memory.last(0) == context.memory.last(0) == len(text) - 1
            context.decode(after)
            np.testing.assert_array_equal(context.logits(), expected)
