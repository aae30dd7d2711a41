"""DFlash and DSpark: every draft is the oracle's, whatever was accepted before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT
from support.tiny_models import drafters, rigged
from support.tiny_models.block_drafters import write_dflash, write_rigged_dspark
from support.tiny_models.rigged import by_token, cycle, simulate, wrong_at

import llamatap as lt
from reference import dflash

F = cycle()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"own_embedding": False, "own_head": False},
        {"n_draft_vocab": 100},
        {"causal": True},
        {"target_layers": (0, 4)},
        {"markov": 8},
        {"markov": 8, "anchor": False, "confidence": True},
        {"markov": 8, "n_draft_vocab": 90},
    ],
    ids=str,
)
def test_drafts_of_several_sequences_are_the_formulas(
    options: dict[str, Any], tiny_path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Prompts of different length, more tokens than a ubatch; then rounds with a part of each draft
    accepted."""
    path = write_dflash(tmp_path / "draft.gguf", **options)
    weights = dflash.Weights.read(path, tiny_path)
    texts = {seq: rng.integers(3, 250, 20 + 19 * seq).tolist() for seq in range(3)}
    with lt.Model(tiny_path) as model, model.context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        spec = lt.SpeculativeContext(context, path, n_ubatch=16, **EXACT)
        drafter = lt.DFlashDrafter(spec, n_max=5)
        features: dict[int, Any] = {}
        drafts: dict[int, lt.Draft] = {}
        with context.tap(spec.target_layers) as tap:
            pending = dict(texts)
            texts = {seq: [] for seq in texts}
            for _ in range(7):
                batch, rows = lt.Batch(), {}
                for seq, tokens in pending.items():
                    rows[seq] = len(batch)
                    for i, token in enumerate(tokens):
                        batch.add(token, len(texts[seq]) + i, seq)
                context.decode(batch)
                drafter.process(batch, tap.states)
                states = tap.states.array.reshape(len(batch), -1)
                last = {}
                for seq, tokens in pending.items():
                    kept = len(tokens)
                    if seq in drafts:
                        kept = int(rng.integers(1, len(tokens) + 1))
                        drafter.accept(seq, kept - 1)
                        context.memory.remove(seq, len(texts[seq]) + kept)
                    new = states[rows[seq] : rows[seq] + kept].copy()
                    features[seq] = np.concatenate([features[seq], new]) if seq in features else new
                    texts[seq] += tokens[:kept]
                    last[seq] = int(rng.integers(3, 250))
                drafts = drafter.draft(
                    {seq: lt.DraftRequest(last[seq], len(texts[seq]), 5 - seq) for seq in texts}
                )
                for seq, text in texts.items():
                    # The length of the block is that of the longest draft, which all places see.
                    tokens, probs = dflash.draft([*text, last[seq]], features[seq], weights, 5)
                    assert drafts[seq].tokens.tolist() == tokens[: 5 - seq]
                    found = np.asarray(drafts[seq].probs)
                    np.testing.assert_allclose(found, np.array(probs[: 5 - seq]), rtol=1e-3)
                pending = {seq: [last[seq], *drafts[seq].tokens.tolist()] for seq in texts}


def test_the_confidence_head_ends_a_draft(tiny_path: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_dflash(tmp_path / "draft.gguf", markov=8, confidence=True, block_size=6)
    weights = dflash.Weights.read(path, tiny_path)
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, path, **EXACT)
        lengths = set()
        for _ in range(12):
            tokens = rng.integers(3, 250, 10).tolist()
            drafter = lt.DFlashDrafter(spec, n_max=6, p_min=0.4)
            batch = lt.Batch.of(tokens[:-1])
            with context.tap(spec.target_layers) as tap:
                context.decode(batch)
                drafter.process(batch, tap.states)
            found = drafter.draft({0: lt.DraftRequest(tokens[-1], 9, 6)}).get(0)
            features = tap.states.array.reshape(9, -1)
            sure = dflash.block_logits([tokens[-1], *[weights.mask] * 5], features, weights)[2]
            assert sure is not None
            expected = next((i for i, value in enumerate(sure) if value < 0.4), 6)
            assert (0 if found is None else len(found.tokens)) == expected
            lengths.add(expected)
            context.memory.clear()
            drafter.reset(0)
        assert len(lengths) > 2


@pytest.mark.parametrize("options", [{}, {"markov": 8}], ids=["dflash", "dspark"])
def test_sequences_of_a_target_with_a_memory_for_each(
    options: dict[str, Any], tiny_path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The target has a KV cache for each sequence; the engine computes their blocks in a shared one."""
    path = write_dflash(tmp_path / "draft.gguf", **options)
    prompts = [rng.integers(3, 250, n).tolist() for n in (5, 40, 12)]
    with (
        lt.Model(tiny_path) as model,
        model.context(n_ctx=768, n_seq_max=3, kv_unified=False, **EXACT) as context,
    ):
        plain = [one.tokens.tolist() for one in lt.generate(context, prompts, max_tokens=20)]
        drafter = lt.DFlashDrafter(lt.SpeculativeContext(context, path, **EXACT))
        found = list(lt.generate(context, prompts, drafter, max_tokens=20))
        assert [one.tokens.tolist() for one in found] == plain
        assert all(one.stats.drafted > 20 for one in found)


@pytest.mark.slow
def test_features_are_encoded_or_refused(tiny_path: Path, tmp_path: Path) -> None:
    """Runs in its own process: an overrun of an array may show only at exit."""
    code = f"""
import numpy as np, llamatap as lt
with lt.Model({str(tiny_path)!r}) as model, model.context(n_ctx=256, n_threads=1) as context:
    spec = lt.SpeculativeContext(context, {str(write_dflash(tmp_path / "draft.gguf"))!r}, n_threads=1)
    for _ in range(9):
        features = np.ones((2000, spec.n_features), np.float32)
        try:
            found = spec.encode(features)
            assert found.shape == (2000, spec.n_state), found.shape
        except (lt.InvalidInputError, lt.UnsupportedError):
            pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("n_max", [1, 3, 6])
@pytest.mark.parametrize("wrong", [[], [12, 16, 20, 24, 28, 32, 36, 40], range(64)], ids=len)
def test_rigged_drafts_are_accepted_as_simulated(wrong: list[int], n_max: int, tmp_path: Path) -> None:
    table = wrong_at(F, wrong)
    path = rigged.write_rigged_model(tmp_path / "target.gguf", F)
    draft = write_rigged_dspark(tmp_path / "draft.gguf", table)
    prompts = [[1, 9, 30, 12, 13], [1, 20, 21], [1, 5, 6, 7, 8, 9, 10, 40]]
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        drafter = lt.DFlashDrafter(lt.SpeculativeContext(context, draft), n_max=n_max)
        for prompt, found in zip(
            prompts, lt.generate(context, prompts, drafter, max_tokens=30, ignore_eos=True), strict=True
        ):
            expected = simulate(F, by_token(table), prompt, n_max, 30)
            assert found.tokens.tolist() == expected.tokens
            assert found.stats.rounds == len(expected.rounds)
            assert found.stats.drafted == expected.n_drafted
            assert found.stats.accepted == expected.n_accepted


def test_files_that_do_not_fit_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256) as context:
        no_mask = write_dflash(tmp_path / "no-mask.gguf", mask=None)
        with pytest.raises(lt.InvalidInputError, match="mask"):
            lt.SpeculativeContext(context, no_mask)
        beyond = write_dflash(tmp_path / "beyond.gguf", target_layers=(1, 9))
        with pytest.raises(lt.InvalidInputError, match=r"layer 9 .*0\.\.4"):
            lt.SpeculativeContext(context, beyond)
        short = write_dflash(tmp_path / "short.gguf", block_size=1)
        with pytest.raises(lt.InvalidInputError, match="block_size"):
            lt.SpeculativeContext(context, short)
        unsure = lt.SpeculativeContext(context, write_dflash(tmp_path / "unsure.gguf", markov=8))
        with pytest.raises(lt.InvalidInputError, match="confidence"):
            lt.DFlashDrafter(unsure, p_min=0.1)
        eagle3 = drafters.write_eagle3(tmp_path / "eagle3.gguf")
        with pytest.raises(lt.InvalidInputError, match="of kind eagle3"):
            lt.DFlashDrafter(lt.SpeculativeContext(context, eagle3))
