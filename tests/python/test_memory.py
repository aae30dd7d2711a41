"""Memories that are more than one row a token: recurrent, hybrid, sliding windows; and LongRoPE."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import EXACT, random_tokens, relative
from numpy.typing import NDArray
from tiny import TinyGemma3

import llamatap as lt

RECURRENT = ["mamba-dense", "jamba-dense", "falcon-h1-dense", "lfm2-dense", "qwen35-dense"]


def next_logits(context: lt.Context, tokens: NDArray[np.int32], position: int) -> NDArray[np.float32]:
    context.decode(lt.Batch.of([int(tokens[position])], pos0=position))
    return context.logits()


def fresh_logits(model: lt.Model, tokens: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """After `count` tokens, the last of them by a decode of its own."""
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(lt.Batch.of(tokens[: count - 1].tolist()))
        return next_logits(context, tokens, count - 1)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_memory_gives_up_no_suffix_or_does_so_rightly(
    arch_models: Path, name: str, rng: np.random.Generator
) -> None:
    with lt.Model(arch_models / f"{name}.gguf") as model:
        tokens = random_tokens(rng, model, 12)
        with model.context(n_ctx=256, **EXACT) as context:
            context.decode(lt.Batch.of(tokens.tolist()))
            with pytest.raises(lt.UnsupportedError, match="n_rs_seq"):
                context.memory.remove(0, 10)
            assert context.memory.last(0) == 11
        if model.arch != "qwen35":
            with pytest.raises(lt.UnsupportedError, match="n_rs_seq"):
                model.context(n_ctx=256, n_rs_seq=4)
            return
        with model.context(n_ctx=256, n_rs_seq=4, **EXACT) as context:
            context.decode(lt.Batch.of(tokens[:10].tolist()))
            context.decode(lt.Batch.of(tokens[10:12].tolist(), pos0=10))
            context.memory.remove(0, 10)
            found = next_logits(context, tokens, 10)
        assert relative(found, fresh_logits(model, tokens, 11)) < 1e-5


@pytest.mark.parametrize("name", RECURRENT)
def test_a_saved_sequence_goes_on_where_it_was(
    arch_models: Path, name: str, rng: np.random.Generator
) -> None:
    with lt.Model(arch_models / f"{name}.gguf") as model, model.context(n_ctx=256, **EXACT) as context:
        tokens = random_tokens(rng, model, 12)
        context.decode(lt.Batch.of(tokens[:10].tolist()))
        saved = context.save(0)
        context.decode(lt.Batch.of(tokens[10:12].tolist(), pos0=10))
        context.memory.clear()
        context.restore(0, saved)
        assert relative(next_logits(context, tokens, 10), fresh_logits(model, tokens, 11)) < 1e-5
        with model.context(n_ctx=256, **EXACT) as other:
            other.restore(0, saved)
            assert relative(next_logits(other, tokens, 10), fresh_logits(model, tokens, 11)) < 1e-5


def test_what_a_sliding_window_has_dropped_is_not_taken_for_there(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with lt.Model(TinyGemma3(window=8).write(tmp_path / "gemma3.gguf")) as model:
        tokens = random_tokens(rng, model, 600)
        expected = fresh_logits(model, tokens, 101)
        with model.context(n_ctx=1024, **EXACT) as context:
            context.decode(lt.Batch.of(tokens.tolist()))
            context.memory.remove(0, 100)
            assert relative(next_logits(context, tokens, 100), expected) < 1e-5
        with model.context(n_ctx=1024, n_ubatch=64, swa_full=False, **EXACT) as context:
            for start in range(0, 600, 50):
                context.decode(lt.Batch.of(tokens[start : start + 50].tolist(), pos0=start))
            with pytest.raises(lt.UnsupportedError, match="swa_full"):
                context.memory.remove(0, 100)
            context.memory.remove(0)
            context.decode(lt.Batch.of(tokens[:100].tolist()))
            assert relative(next_logits(context, tokens, 100), expected) < 1e-5


def test_short_prompts_do_not_feel_long_ones_under_longrope(
    arch_models: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "phi3.gguf"
    shutil.copy(arch_models / "phi3-dense.gguf", path)
    reader = gguf.GGUFReader(path, "r+")
    assert reader.fields["phi3.rope.scaling.original_context_length"].contents() == 256
    reader.fields["phi3.context_length"].parts[-1][0] = 2048
    reader.data.flush()
    with lt.Model(path) as model:
        short, long = random_tokens(rng, model, 30), random_tokens(rng, model, 300)
        with lt.Extractor(model, **EXACT) as extractor:
            alone = extractor(short, [1, -1]).array
        with lt.Extractor(model, **EXACT) as extractor:
            together = extractor([short, long, short], [1, -1])
            assert relative(together[0].array, alone) < 1e-6
            assert relative(together[2].array, alone) < 1e-6
            assert relative(extractor(short, [1, -1]).array, alone) < 1e-6
        # It does make a difference, which is why they are kept apart.
        with lt.Extractor(model, n_ctx=512, **EXACT) as extractor:
            assert relative(extractor(short, [1, -1]).array, alone) > 1e-4
