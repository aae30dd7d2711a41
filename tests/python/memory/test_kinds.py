"""Kinds of memory beyond a plain KV cache: recurrent, hybrid, sliding window; and LongRoPE."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, random_tokens, relative
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35

import llamatap as lt

RECURRENT = ["mamba-dense", "jamba-dense", "falcon-h1-dense", "lfm2-dense", "qwen35-dense"]


def next_logits(context: lt.Context, tokens: NDArray[np.int32], position: int) -> NDArray[np.float32]:
    context.decode(lt.Batch.of([int(tokens[position])], pos0=position))
    return context.logits()


def fresh_logits(model: lt.Model, tokens: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """Logits after `count` tokens, the last of which is decoded by itself."""
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(lt.Batch.of(tokens[: count - 1].tolist()))
        return next_logits(context, tokens, count - 1)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_memory_gives_up_no_part(arch_models: Path, name: str, rng: np.random.Generator) -> None:
    with lt.Model(arch_models / f"{name}.gguf") as model:
        tokens = random_tokens(rng, model, 12)
        with model.context(n_ctx=256, **EXACT) as context:
            context.decode(lt.Batch.of(tokens.tolist()))
            for p0, p1 in ((10, None), (None, 5), (3, 8), (0, 11)):
                with pytest.raises(lt.UnsupportedError, match="cannot remove this part"):
                    context.memory.remove(0, p0, p1)
            assert context.memory.last(0) == 11
            context.memory.remove(0, 12)  # where nothing is
            context.memory.remove(0, 0, 12)
            assert context.memory.last(0) == -1
        if model.arch != "qwen35":
            with pytest.raises(lt.UnsupportedError, match="n_rs_seq"):
                model.context(n_ctx=256, n_rs_seq=4)


@pytest.fixture
def qwen35_path(tmp_path: Path) -> Path:
    """A model whose logits depend on what its recurrent layers remember; those of the engine's hardly do."""
    return TinyQwen35().write(tmp_path / "qwen35.gguf")


def test_the_last_tokens_of_a_recurrent_memory_can_be_taken_back(
    qwen35_path: Path, rng: np.random.Generator
) -> None:
    with lt.Model(qwen35_path) as model:
        tokens = random_tokens(rng, model, 40)
        expected = fresh_logits(model, tokens, 21)
        # The bound tells a right state from one that has seen two tokens more.
        other = tokens.copy()
        other[18:20] = tokens[30:32]
        assert relative(fresh_logits(model, other, 21), expected) > 0.05
        options = {"n_ctx": 256, "n_rs_seq": 4, **EXACT}
        for parts in ((23,), (19, 4), (10, 10, 3)):
            with model.context(**options) as context:
                context.decode(lt.Batch.of(tokens[: parts[0]].tolist()))
                position = parts[0]
                for size in parts[1:]:
                    context.decode(lt.Batch.of(tokens[position : position + size].tolist(), pos0=position))
                    position += size
                if parts == (10, 10, 3):
                    # It would need the state before the last decode, which is not kept.
                    with pytest.raises(lt.UnsupportedError, match="at most 2 of its last tokens"):
                        context.memory.remove(0, 20)
                    continue
                context.memory.remove(0, 20)
                with pytest.raises(lt.UnsupportedError, match="at most 0 of its last tokens"):
                    context.memory.remove(0, 19)
                assert relative(next_logits(context, tokens, 20), expected) < 1e-5
        with pytest.raises(lt.InvalidInputError, match="n_ubatch and n_batch must be at least n_rs_seq"):
            model.context(n_ctx=256, n_rs_seq=600)


def test_a_failed_decode_drops_a_recurrent_sequence(qwen35_path: Path, rng: np.random.Generator) -> None:
    with lt.Model(qwen35_path) as model, model.context(n_ctx=256, n_batch=8, n_rs_seq=4) as context:
        tokens = random_tokens(rng, model, 300).tolist()
        context.decode(lt.Batch.of(tokens[:240]))
        with pytest.raises(lt.ContextFullError, match=r"256.*hold 240.*brings 20"):
            context.decode(lt.Batch.of(tokens[240:260], pos0=240))
        assert context.memory.last(0) == -1


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
        # The difference matters, which is why they are kept apart.
        with lt.Extractor(model, n_ctx=512, **EXACT) as extractor:
            assert relative(extractor(short, [1, -1]).array, alone) > 1e-4


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[lt.Model]:
    """A model whose blocks see the last 8 tokens."""
    with lt.Model(TinyGemma3().write(tmp_path / "gemma3.gguf")) as model:
        yield model


@pytest.mark.parametrize("unified", [True, False])
def test_a_window_that_others_wrote_into_can_be_taken_back_into(
    windowed: lt.Model, unified: bool, rng: np.random.Generator
) -> None:
    """Two sequences of which each takes tokens back, as in drafting: what a sequence's last token does not
    see any more is seen again by the one that comes in its place."""
    first, second = (random_tokens(rng, windowed, n) for n in (37, 20))
    with windowed.context(n_ctx=512, n_seq_max=2, kv_unified=unified, **EXACT) as context:
        context.decode(lt.Batch.of(first[:20].tolist(), seq=0))
        context.decode(lt.Batch.of(second.tolist(), seq=1))
        context.memory.remove(0, 16)
        context.decode(lt.Batch.of(first[16:].tolist(), seq=0, pos0=16))
        assert relative(context.logits(), fresh_logits(windowed, first, 37)) < 1e-5
        if unified:
            # Tokens of the first sequence took over cells of the second one.
            with pytest.raises(lt.UnsupportedError, match="kv_unified=False"):
                context.memory.remove(1, 16)
            return
        context.memory.remove(1, 16)
        context.decode(lt.Batch.of([int(second[16])], seq=1, pos0=16))
        assert relative(context.logits(), fresh_logits(windowed, second, 17)) < 1e-5


def test_a_window_that_was_restored_takes_back_what_it_holds(
    windowed: lt.Model, rng: np.random.Generator
) -> None:
    """It rolls back correctly or refuses."""
    tokens = random_tokens(rng, windowed, 21)
    with windowed.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        context.decode(lt.Batch.of(tokens[:20].tolist()))
        context.restore(1, context.save(0))
        try:
            context.memory.remove(1, 16)
        except lt.UnsupportedError:
            assert context.memory.last(1) == 19
            context.decode(lt.Batch.of(tokens[20:].tolist(), seq=1, pos0=20))
            assert relative(context.logits(), fresh_logits(windowed, tokens, 21)) < 1e-5
            return
        context.decode(lt.Batch.of([int(tokens[16])], seq=1, pos0=16))
        assert relative(context.logits(), fresh_logits(windowed, tokens, 17)) < 1e-5


@pytest.mark.parametrize(
    "tiny", [TinyLlama(), TinyGemma3(), TinyQwen35()], ids=lambda tiny: type(tiny).__name__
)
def test_the_state_of_an_empty_sequence_takes_the_place_of_what_is_there(
    tiny: TinyLlama, tmp_path: Path
) -> None:
    with (
        lt.Model(tiny.write(tmp_path / "tiny.gguf")) as model,
        model.context(n_ctx=256, n_seq_max=2) as context,
    ):
        empty = context.save(0)
        context.decode(lt.Batch.of([5, 6, 7]))
        context.decode(lt.Batch.of([8, 9], seq=1))
        context.restore(0, empty)
        assert (context.memory.last(0), context.memory.last(1)) == (-1, 1)
        context.decode(lt.Batch.of([5, 6, 7]))


@pytest.mark.parametrize(("n_batch", "n_rs_seq"), [(2, 1), (4, 4), (5, 4), (1, 8)])
def test_a_batch_too_small_for_the_way_back(n_batch: int, n_rs_seq: int, tmp_path: Path) -> None:
    with (
        lt.Model(TinyQwen35().write(tmp_path / "tiny.gguf")) as model,
        pytest.raises(
            lt.InvalidInputError, match=rf"n_ubatch and n_batch must be at least .* {n_rs_seq + 2}"
        ),
    ):
        model.context(n_ctx=256, n_batch=n_batch, n_rs_seq=n_rs_seq)
