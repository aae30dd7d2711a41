"""Blocks that attend to the target's memory (gemma4-assistant): every draft is the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import rewritten
from support.generation import EXACT as ONE_THREAD
from support.generation import SAMPLING, by_hand, seed_of
from support.numerics import EXACT
from support.tiny import TinyGemma3, TinyLlama
from support.tiny_models.gemma4_assistant import write_assistant
from support.tiny_models.rigged import by_token, simulate

import llamatap as lt
from reference import decoder
from reference.shared_memory import Assistant

TARGET = TinyGemma3(n_layer=6)
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGET.write(tmp_path_factory.mktemp("shared") / "target.gguf")


@pytest.mark.sampled(6)
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
        with context.tap(spec.target_layers) as tap:
            for round_ in range(6):
                batch = lt.Batch()
                for seq, tokens in pending.items():
                    for i, token in enumerate(tokens):
                        batch.add(token, len(texts[seq]) + i, seq)
                context.decode(batch)
                drafter.process(batch, tap.states)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_generation_is_the_same_with_it(
    sampling: str, kv_unified: bool, target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_assistant(tmp_path / "assistant.gguf")
    prompts = [rng.integers(3, 250, n).tolist() for n in (5, 40, 12)]
    options: dict[str, Any] = {"max_tokens": 30, "seed": 7, "ignore_eos": True, **SAMPLING[sampling]}
    with lt.Model(target) as model:
        expected = [
            by_hand(model, prompt, 30, seed=seed_of(7, i), **SAMPLING[sampling])
            for i, prompt in enumerate(prompts)
        ]
        with model.context(n_ctx=768, n_seq_max=2, kv_unified=kv_unified, **ONE_THREAD) as context:
            drafter = lt.MtpDrafter(lt.SpeculativeContext(context, path), n_max=3)
            for _ in range(2):
                found = list(lt.generate(context, prompts, drafter, **options))
                assert [one.tokens.tolist() for one in found] == expected
    assert all(one.stats.drafted > 30 for one in found)


SCRIPT = list(range(10, 50))


def follow(table: dict[int, int], width: int, size: float) -> Array:
    """A head for unit vectors: row table[t] has this size in the column of t's place in the script."""
    head = np.zeros((259, width), np.float32)
    for i, token in enumerate(SCRIPT):
        head[table[token], i] += size
    return head


def write_rigged(folder: Path, right: dict[int, int], drafted: dict[int, int]) -> tuple[Path, Path]:
    """A target that goes on after t with right[t], and blocks that draft drafted[t]."""
    gemma = TinyGemma3(n_layer=6)
    for name, values in gemma.weights.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight", "token_embd.weight")):
            values[:] = 0
        elif name.endswith("norm.weight"):
            values[:] = 1
    gemma.weights["token_embd.weight"][SCRIPT, range(len(SCRIPT))] = 1
    gemma.weights["output.weight"][:] = follow(right, 64, 1.0)

    def rig(tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                values[:] = 0
            elif name.endswith(("norm.weight", "scale.weight")):
                values[:] = 1
        width = len(tensors["output_norm.weight"])
        tensors["token_embd.weight"] = follow(drafted, width, 1.0)
        # The token's embedding comes first, then the state.
        tensors["nextn.pre_projection.weight"][:] = 0
        tensors["nextn.pre_projection.weight"][range(width), range(width)] = 1

    random = write_assistant(folder / "random.gguf")
    return gemma.write(folder / "rigged.gguf"), rewritten(random, folder / "draft.gguf", rig)


@pytest.mark.parametrize("wrong", [[], [12, 16, 20, 24, 40], SCRIPT], ids=len)
def test_rigged_drafts_are_accepted_as_simulated(wrong: list[int], tmp_path: Path) -> None:
    right = {token: SCRIPT[(i + 1) % len(SCRIPT)] for i, token in enumerate(SCRIPT)}
    drafted = {t: SCRIPT[(SCRIPT.index(to) + 7) % 40] if t in wrong else to for t, to in right.items()}
    f, g = ([table.get(token, 0) for token in range(259)] for table in (right, drafted))
    prompts = [[10, 30, 12, 13], [20, 21], [45]]
    path, draft = write_rigged(tmp_path, right, drafted)
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **ONE_THREAD) as context:
        drafter = lt.MtpDrafter(lt.SpeculativeContext(context, draft), n_max=3)
        found = lt.generate(context, prompts, drafter, max_tokens=30, ignore_eos=True)
        for prompt, one in zip(prompts, found, strict=True):
            expected = simulate(f, by_token(g), prompt, 3, 30)
            assert one.tokens.tolist() == expected.tokens
            assert one.stats.rounds == len(expected.rounds)
            assert (one.stats.drafted, one.stats.accepted) == (expected.n_drafted, expected.n_accepted)


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
