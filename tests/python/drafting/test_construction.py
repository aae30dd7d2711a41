"""Constructing drafters: arguments that are taken or refused, and the attributes of the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.block_drafters import write_dflash

import llamatap as lt


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    return drafters.write_eagle3(tmp_path / "eagle3.gguf")


def test_a_draft_context_of_another_target_is_refused(tiny_path: Path, eagle3: Path) -> None:
    with (
        lt.Model(tiny_path) as model,
        model.context(n_ctx=256, **EXACT) as context,
        model.context(n_ctx=256, **EXACT) as other,
    ):
        block = lt.SpeculativeContext(other, eagle3)
        plain = lt.SpeculativeContext(other, tiny_path)
        makers: list[Callable[[lt.Context], lt.Drafter]] = [
            lambda one: lt.load_drafter(one, block),
            lambda one: lt.load_drafter(one, plain),
            lambda one: lt.ModelDrafter(one, plain),
        ]
        for make in makers:
            with pytest.raises(lt.InvalidInputError, match="made for another context"):
                make(context)
            make(other)


def test_a_model_in_place_of_its_context_is_refused(tiny_model: lt.Model, eagle3: Path) -> None:
    with pytest.raises(lt.InvalidInputError, match=r"found its model: make one by model\.context\(\)"):
        lt.load_drafter(tiny_model, eagle3)  # type: ignore[arg-type]


def test_a_model_drafter_takes_a_draft_context_as_the_others_do(tiny_path: Path, eagle3: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, tiny_path)
        for drafter in (
            lt.ModelDrafter(spec, n_max=3),
            lt.ModelDrafter(context, spec, n_max=3),
            lt.ModelDrafter(context, tiny_path, n_max=3),
            lt.ModelDrafter(context, model, n_max=3),
        ):
            assert (drafter.kind, drafter.n_max, drafter.spec.kind) == ("model", 3, "model")
            assert drafter.spec.target is context
        wrong: list[Callable[[], Any]] = [
            lambda: lt.ModelDrafter(context),
            lambda: lt.ModelDrafter(model),  # type: ignore[arg-type]
            lambda: lt.ModelDrafter(spec, spec),
            lambda: lt.ModelDrafter(tiny_path, spec),  # type: ignore[arg-type]
            lambda: lt.load_drafter(spec, spec),  # type: ignore[arg-type]
        ]
        for make in wrong:
            with pytest.raises(lt.InvalidInputError, match=r"[Cc]ontext"):
                make()
        with pytest.raises(TypeError, match="n_mix"):
            lt.load_drafter(context, eagle3, n_mix=3)  # type: ignore[call-arg]


def test_a_target_whose_blocks_were_not_loaded_is_not_its_own_drafter(tmp_path: Path) -> None:
    path = drafters.write_mimo2(tmp_path / "mtp.gguf")
    with lt.Model(path) as model, model.context(n_ctx=256, **EXACT) as context:
        with pytest.raises(lt.InvalidInputError, match=r"mtp.gguf has MTP blocks \(1\).*load_mtp=True"):
            lt.load_drafter(context, model)
        assert isinstance(lt.ModelDrafter(context, model), lt.ModelDrafter)
        spec = lt.SpeculativeContext(context, model, as_model=True)
        assert isinstance(lt.load_drafter(context, spec), lt.ModelDrafter)
    with lt.Model(path, load_mtp=True) as model, model.context(n_ctx=256, **EXACT) as context:
        assert isinstance(lt.load_drafter(context, model), lt.MtpDrafter)
        assert isinstance(lt.load_drafter(context, path), lt.MtpDrafter)


def test_n_max_is_fixed_when_a_drafter_is_made(tiny_path: Path, eagle3: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, eagle3)
        for drafter in (lt.NGramDrafter(n_max=3), lt.Eagle3Drafter(spec, n_max=3)):
            with pytest.raises(AttributeError):
                drafter.n_max = 8  # type: ignore[misc]
            assert drafter.n_max == 3


def test_a_drafter_says_whether_it_draws(tiny_path: Path, eagle3: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, eagle3)
        greedy, drawing = lt.Eagle3Drafter(spec), lt.Eagle3Drafter(spec, temperature=0.5)
        assert not greedy.draws
        assert drawing.draws
        assert not lt.NGramDrafter().draws
        assert not lt.DrafterChain(lt.NGramDrafter(), drawing).draws
        assert lt.DrafterChain(drawing, drawing).draws


def test_a_draft_has_the_targets_threads(
    tiny_path: Path, eagle3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamatap._threads.default_threads", lambda: 600)
    with (
        lt.Model(tiny_path) as model,
        model.context(n_ctx=256, n_threads=1) as context,
        lt.SpeculativeContext(context, eagle3) as spec,
    ):
        assert spec.n_threads == 1
    monkeypatch.setattr("llamatap._threads.default_threads", lambda: 1)
    with (
        lt.Model(tiny_path) as model,
        model.context(n_ctx=256) as context,
        lt.SpeculativeContext(context, eagle3) as spec,
    ):
        assert (context.n_threads, spec.n_threads) == (1, 1)


def test_a_block_file_decodes_no_pairs_and_says_so(tiny_path: Path, tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "block.gguf", block_size=6)
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, path)
        features = np.zeros((2, spec.n_features), np.float32)
        for states in (features, None):
            with pytest.raises(lt.UnsupportedError, match=r"decode\(\).*DFlashDrafter"):
                spec.decode([5, 6], states, [0, 1])
        with pytest.raises(lt.UnsupportedError, match=r"encode\(\).*DFlashDrafter"):
            spec.encode(features)
        assert spec.block_size == 6
        assert lt.DFlashDrafter(spec, n_max=9).n_max == 5
        assert lt.SpeculativeContext(context, tiny_path).block_size is None


def test_logits_are_of_the_drafts_vocabulary(tiny_path: Path, tmp_path: Path) -> None:
    """Logits of a smaller EAGLE-3 vocabulary come by the target's ids; those of a model keep its padding."""
    small = drafters.write_eagle3(tmp_path / "small.gguf", n_draft_vocab=100)
    vocabulary = drafters.Vocabulary((*drafters.BYTES.tokens, "<pad0>", "<pad1>"))
    tensors: drafters.Tensors = {**TinyLlama().weights}
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:2]])
    keys = drafters.decoder_keys(4, 64, 96, 2, 1e4)
    padded = drafters.write_file(tmp_path / "padded.gguf", "llama", keys, tensors, vocabulary)
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        for path, n_vocab in ((small, 259), (padded, 261)):
            spec = lt.SpeculativeContext(context, path)
            states = np.ones((1, spec.n_state), np.float32) if spec.n_state else None
            found = spec.decode([5], states, [0], logits=True)
            assert found.logits is not None
            assert found.logits.shape == (1, spec.model.n_vocab) == (1, n_vocab)
            assert np.isfinite(found.logits).sum() == (100 if path == small else 261)


def test_blocks_draft_for_several_sequences_of_a_target_whose_memory_is_split(
    tiny_path: Path, tmp_path: Path
) -> None:
    path = write_dflash(tmp_path / "block.gguf")
    prompts = [[1, 5, 6, 7], [1, 8, 9], [1, 3, 4, 5, 6]]
    options: dict[str, Any] = {"n_ctx": 768, "n_seq_max": 3, "kv_unified": False, **EXACT}
    with lt.Model(tiny_path) as model, model.context(**options) as context:
        plain = [one.tokens.tolist() for one in lt.generate(context, prompts, max_tokens=20)]
        drafter = lt.load_drafter(context, path)
        found = list(lt.generate(context, prompts, drafter, max_tokens=20))
        assert [one.tokens.tolist() for one in found] == plain
        assert sum(one.stats.drafted for one in found) > 0


def test_a_draft_model_from_a_file_makes_contexts(tiny_path: Path, eagle3: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=256, **EXACT) as context:
        assert isinstance(lt.SpeculativeContext(context, eagle3).model, lt.Model)
