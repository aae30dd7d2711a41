"""A drafter that cannot go on with one sequence stops drafting for it and goes on with the others.

Reasons: no room left, states that are NaN, or a KV cache changed by somebody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.drafting import EXACT, PAIRS, Loop, assert_drafted, opened, random_text
from support.numerics import computes_with_nan
from support.tiny import TinyLlama
from support.tiny_models import drafters, linear, norm
from support.tiny_models.block_drafters import write_dflash

import llamatap as lt

KINDS = ["eagle3", "mtp", "mtp 3 heads", "model"]


def drafted(drafter: lt.Drafter, request: lt.DraftRequest) -> list[int]:
    found = drafter.draft({0: request}).get(0)
    return [] if found is None else found.tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_sequence_makes_room_for_the_others(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[kind](tmp_path)
    with opened(pair, n_seq_max=3, draft_ctx=256) as loop:
        loop.start({seq: random_text(rng, n) for seq, n in enumerate((130, 60, 62))})
        assert set(loop.draft(n=3)) == {0, 1, 2}
        for _ in range(12):
            loop.verify(loop.draft(n=3), rng)
        drafts = loop.draft(n=3)
        assert drafts.get(0) is None or not len(drafts[0].tokens)
        for seq in (1, 2):
            assert_drafted(drafts[seq], pair.oracle, loop.texts[seq], 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_found_no_room_leaves_nothing_behind(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[kind](tmp_path)
    with opened(pair, n_seq_max=2, draft_ctx=256) as loop:
        loop.start({0: random_text(rng, 100), 1: random_text(rng, 153)})
        loop.draft([0])
        loop.draft([0, 1])
        text = loop.texts[0]
        loop.feed([(text[-1], len(text) - 1, 0)])
        text.append(9)
        drafts = loop.draft([0])
        assert_drafted(drafts[0], pair.oracle, text, len(drafts[0].tokens))


def test_positions_beyond_what_a_draft_has_learned(tmp_path: Path, rng: np.random.Generator) -> None:
    width, places = drafters.N_EMBD, 32
    shapes = {
        "token_embd.weight": (drafters.N_VOCAB, width),
        "position_embd.weight": (places, width),
        **norm("output_norm", width, bias=True),
    }
    for block in ("blk.0.", "blk.1."):
        shapes |= norm(block + "attn_norm", width, bias=True) | norm(block + "ffn_norm", width, bias=True)
        shapes |= linear(block + "attn_qkv", 3 * width, width, bias=True)
        shapes |= linear(block + "attn_output", width, width, bias=True)
        shapes |= linear(block + "ffn_up", 96, width, bias=True)
        shapes |= linear(block + "ffn_down", width, 96, bias=True)
    keys = {
        "context_length": places,
        "embedding_length": width,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-5,
    }
    tensors: drafters.Tensors = {
        name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()
    }
    path = drafters.write_file(tmp_path / "gpt2.gguf", "gpt2", keys, tensors)
    target = TinyLlama().write(tmp_path / "target.gguf")
    with lt.Model(target) as model, model.context(n_ctx=512, **EXACT) as context:
        spec = lt.SpeculativeContext(context, path, **EXACT)
        drafter = lt.ModelDrafter(context, spec)
        plain = next(lt.generate(context, [1, 5, 6], max_tokens=60, ignore_eos=True))
        found = next(lt.generate(context, [1, 5, 6], drafter, max_tokens=60, ignore_eos=True))
        assert found.tokens.tolist() == plain.tokens.tolist()
        assert found.stats.drafted > 20
        assert spec.memory.last(0) < places


@computes_with_nan
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp 3 heads", "dflash"])
def test_states_that_are_no_numbers_stay_out_of_the_memory(kind: str, tmp_path: Path) -> None:
    """A sequence beside one whose states are NaN drafts as it does alone."""

    def nans(path: Path) -> Path:
        tiny = TinyLlama()
        tiny.weights["token_embd.weight"][77] = np.nan
        return tiny.write(path)

    if kind == "dflash":
        target, draft = nans(tmp_path / "target.gguf"), write_dflash(tmp_path / "draft.gguf")
    elif kind == "eagle3":
        target, draft = nans(tmp_path / "target.gguf"), drafters.write_eagle3(tmp_path / "draft.gguf")
    else:
        blocks = 3 if "3" in kind else 1
        draft = drafters.write_mtp_block(tmp_path / "draft.gguf", n_layer=TinyLlama().n_layer, n_nextn=blocks)
        target = nans(tmp_path / "target.gguf")
    with (
        lt.Model(target) as model,
        model.context(n_ctx=512, n_seq_max=2, kv_unified=False, n_threads=1) as context,
        lt.SpeculativeContext(context, draft, kv_unified=True, flash_attn=False, n_threads=1) as spec,
    ):
        drafter = lt.load_drafter(context, spec, n_max=3)
        loop = Loop(context, drafter)
        loop.start({0: [5, 6, 7, 8]})
        alone = loop.draft([0])[0].tokens.tolist()
        loop.start({1: [9, 77, 10, 11]})
        assert 1 not in loop.draft([1]) or not len(loop.draft([1])[1].tokens)
        assert loop.draft([0])[0].tokens.tolist() == alone
        loop.reset(1)
        loop.start({1: [9, 12, 10, 11]})
        assert len(loop.draft([1])[1].tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_that_somebody_else_has_cleared(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pair = PAIRS[kind](tmp_path)
    with opened(pair) as loop:
        text = random_text(rng, 20)
        loop.start({0: text})
        loop.draft()
        spec = loop.drafter.spec  # type: ignore[attr-defined]
        spec.memory.clear()
        loop.verify({0: lt.Draft(np.array([], np.int32))}, rng)
        assert not loop.draft()
        loop.reset(0)
        loop.start({0: text})
        assert_drafted(loop.draft()[0], pair.oracle, text, len(loop.draft()[0].tokens))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [*KINDS, "eagle3 d2t"])
def test_a_text_can_be_processed_again_from_its_beginning(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[kind](tmp_path)
    with opened(pair) as loop:
        loop.start({0: random_text(rng, 9)})
        loop.context.memory.clear()
        text = random_text(rng, 12)
        loop.start({0: text})
        drafts = loop.draft()
        assert_drafted(drafts[0], pair.oracle, text, len(drafts[0].tokens))


def test_accept_comes_before_the_next_draft(tmp_path: Path) -> None:
    target = TinyLlama().write(tmp_path / "target.gguf")
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        for draft in (write_dflash(tmp_path / "block.gguf"), drafters.write_eagle3(tmp_path / "e.gguf")):
            context.memory.clear()
            drafter = lt.load_drafter(context, lt.SpeculativeContext(context, draft, **EXACT))
            loop = Loop(context, drafter)
            loop.start({0: [5, 6, 7, 8]})
            loop.draft()
            with pytest.raises(lt.InvalidInputError, match="in the last batch"):
                drafter.accept(0, 1)
            assert len(loop.draft()[0].tokens)
