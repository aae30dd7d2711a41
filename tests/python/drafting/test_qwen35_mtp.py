"""qwen35's own block of multi-token prediction beside its trunk, whose memory is a hybrid one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import EXACT, Loop, assert_drafted, random_text
from support.generation import SAMPLING, by_hand, is_empty, ragged, seed_of
from support.tiny_models.qwen35 import Qwen35WithMtp

import llamatap as lt
from reference import gated_delta, mtp_qwen35

TINY = Qwen35WithMtp()
N_MAX = 4
SEED = 21


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    path = TINY.write(tmp_path_factory.mktemp("qwen35") / "qwen35.gguf")
    with lt.Model(path, load_mtp=True) as model:
        yield model


def oracle(text: Any, n: int) -> tuple[list[int], NDArray[np.float64]]:
    entering = TINY.entering(np.array(text[:-1], np.int32))
    normed = gated_delta.forward(TINY.shape(), TINY.weights, entering)[1]
    return mtp_qwen35.draft(text, normed, TINY.weights, TINY.shape(), n)


def test_the_trunk_is_what_it_is_without_the_block(model: lt.Model, rng: np.random.Generator) -> None:
    tokens = np.array(random_text(rng, 20), np.int32)
    assert (model.arch, model.n_layer) == ("qwen35", TINY.n_layer)
    states = gated_delta.forward(TINY.shape(), TINY.weights, TINY.entering(tokens))[0]
    with lt.Extractor(model, n_ctx=256, **EXACT) as extractor:
        found = extractor(tokens, range(model.n_layer + 1))
    for layer in range(model.n_layer + 1):
        np.testing.assert_allclose(found[layer], states[layer], atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_every_draft_of_a_loop_is_that_of_the_formulas(model: lt.Model, rng: np.random.Generator) -> None:
    """Any part of the previous draft was accepted; the prompt comes in chunks longer than a ubatch."""
    with model.context(n_ctx=512, n_ubatch=16, n_rs_seq=N_MAX, **EXACT) as context:
        spec = lt.SpeculativeContext(context, model, n_ubatch=16, **EXACT)
        loop = Loop(context, lt.MtpDrafter(spec, n_max=N_MAX))
        text = random_text(rng, 41)
        for start in (0, 20, 27):
            stop = {0: 20, 20: 27, 27: 40}[start]
            loop.feed((text[at], at, 0) for at in range(start, stop))
        loop.texts[0] = text
        for _ in range(10):
            drafts = loop.draft(n=N_MAX)
            assert_drafted(drafts.get(0), oracle, loop.texts[0], N_MAX)
            loop.verify(drafts, rng)


def test_sequences_drafted_together_are_each_alone(model: lt.Model, rng: np.random.Generator) -> None:
    texts = {seq: random_text(rng, length) for seq, length in enumerate((12, 3, 25))}
    with model.context(n_ctx=768, n_seq_max=3, n_rs_seq=N_MAX, **EXACT) as context:
        loop = Loop(context, lt.MtpDrafter(lt.SpeculativeContext(context, model, **EXACT), n_max=N_MAX))
        loop.start(texts)
        for _ in range(5):
            drafts = loop.draft(n=N_MAX)
            for seq, text in loop.texts.items():
                assert_drafted(drafts.get(seq), oracle, text, N_MAX)
            loop.verify(drafts, rng)


#: Options of contexts: tokens back by the engine, fewer of them than a draft has, and saved states.
WAYS: dict[str, dict[str, Any]] = {
    "back": {"n_rs_seq": N_MAX},
    "two back": {"n_rs_seq": 2, "kv_unified": False},
    "back, small ubatches": {"n_rs_seq": N_MAX, "n_ubatch": 18, "n_batch": 32},
    "saved": {},
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_without_a_drafter(
    way: str, sampling: str, model: lt.Model, rng: np.random.Generator
) -> None:
    prompts = ragged(rng, model.n_vocab, (9, 1, 40, 2))
    options = SAMPLING[sampling]
    expected = [by_hand(model, text, 24, seed=seed_of(SEED, i), **options) for i, text in enumerate(prompts)]
    with model.context(**{"n_ctx": 1024, "n_seq_max": 3, **EXACT, **WAYS[way]}) as context:
        drafter = lt.MtpDrafter(lt.SpeculativeContext(context, model, **EXACT), n_max=N_MAX)
        for _ in range(2):
            found = list(
                lt.generate(context, prompts, drafter, max_tokens=24, seed=SEED, ignore_eos=True, **options)
            )
            assert [one.tokens.tolist() for one in found] == expected
            assert is_empty(context)
    assert all(one.stats.drafted > 20 for one in found)
