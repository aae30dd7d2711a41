"""Drafting is lossless: with any drafter the text is the one without it, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, nearly, ragged, seed_of
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.block_drafters import write_dflash

import llamatap as lt

LENGTHS = (9, 1, 40, 16, 70, 2)
MAX_TOKENS = 30
SEED = 77


@dataclass(frozen=True)
class KnownTexts:
    """Random float32 models, prompts (the last two repeat themselves), and what a loop by hand says."""

    model: lt.Model
    near: Path
    eagle3: Path
    mtp: Path
    chained: Path
    dflash: Path
    dspark: Path
    prompts: list[list[int]]
    expected: Mapping[str, list[list[int]]]

    def texts(self) -> list[list[int]]:
        return [
            [*prompt, *tokens]
            for texts in self.expected.values()
            for prompt, tokens in zip(self.prompts, texts, strict=True)
        ]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnownTexts]:
    folder = tmp_path_factory.mktemp("drafts")
    tiny = TinyLlama()
    rng = np.random.default_rng(3)
    with lt.Model(tiny.write(folder / "target.gguf")) as model:
        prompts = ragged(rng, model.n_vocab, LENGTHS)
        prompts += [prompt * 8 for prompt in ragged(rng, model.n_vocab, (4, 7))]
        expected = {
            name: [
                by_hand(model, prompt, MAX_TOKENS, seed=seed_of(SEED, i), **sampling)
                for i, prompt in enumerate(prompts)
            ]
            for name, sampling in SAMPLING.items()
        }
        yield KnownTexts(
            model,
            nearly(tiny, folder / "near.gguf"),
            drafters.write_eagle3(folder / "eagle3.gguf"),
            drafters.write_mtp_block(folder / "mtp.gguf", n_layer=tiny.n_layer),
            drafters.write_mtp_block(folder / "chained.gguf", n_layer=tiny.n_layer, n_nextn=3),
            write_dflash(folder / "dflash.gguf"),
            write_dflash(folder / "dspark.gguf", markov=8, n_draft_vocab=100),
            prompts,
            expected,
        )


def beside(context: lt.Context, path: Path, **options: Any) -> lt.SpeculativeContext:
    return lt.SpeculativeContext(context, path, **{"n_threads": 1, "n_ubatch": 32, **options})


def ngram(known: KnownTexts, context: lt.Context) -> lt.Drafter:
    return lt.NGramDrafter(3, 1, n_max=5)


def near_model(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.ModelDrafter(context, beside(context, known.near, as_model=True, **options), n_max=4)


def eagle3(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.Eagle3Drafter(beside(context, known.eagle3, **options), n_max=4)


def mtp(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.MtpDrafter(beside(context, known.mtp, **options), n_max=3)


def chained_mtp(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.MtpDrafter(beside(context, known.chained, **options), n_max=3)


def dflash(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.DFlashDrafter(beside(context, known.dflash, **options), n_max=4)


def dspark(known: KnownTexts, context: lt.Context, **options: Any) -> lt.Drafter:
    return lt.DFlashDrafter(beside(context, known.dspark, **options), n_max=4)


def nonsense(known: KnownTexts, context: lt.Context) -> lt.Drafter:
    return Guessing(known.model.n_vocab)


def half_right(known: KnownTexts, context: lt.Context) -> lt.Drafter:
    return Guessing(known.model.n_vocab, known.texts(), wrong=0.3)


def chain(known: KnownTexts, context: lt.Context) -> Any:
    return [lt.NGramDrafter(3, 2), half_right(known, context), eagle3(known, context)]


def function(known: KnownTexts, context: lt.Context) -> Callable[[NDArray[np.intc]], Sequence[int]]:
    return lambda tokens: [*tokens[-3:].tolist(), 0, 1, 2]


#: Drafters of which some drafts are known to be accepted.
SOME_STAND = (ngram, near_model, half_right, chain)
OF_FILES = (near_model, eagle3, mtp, chained_mtp, dflash, dspark)
KINDS = (ngram, *OF_FILES, nonsense, half_right, chain, function)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tokens_are_those_without_a_drafter(kind: Any, sampling: str, known: KnownTexts) -> None:
    """Eight prompts on three sequences, some longer than a batch; twice, for a drafter must forget."""
    options = {"n_ctx": 1024, "n_seq_max": 3, "n_ubatch": 16, "n_batch": 32, **EXACT}
    with known.model.context(**options) as context:
        drafter = kind(known, context)
        for _ in range(2):
            found = list(
                lt.generate(
                    context,
                    known.prompts,
                    drafter,
                    max_tokens=MAX_TOKENS,
                    seed=SEED,
                    ignore_eos=True,
                    **SAMPLING[sampling],
                )
            )
            assert [one.tokens.tolist() for one in found] == known.expected[sampling]
            assert is_empty(context)
    drafted = sum(one.stats.drafted for one in found)
    accepted = sum(one.stats.accepted for one in found)
    assert 0 < drafted > accepted
    if kind in SOME_STAND and sampling != "penalties":
        assert accepted > 0
    for one in found:
        stats = one.stats
        assert stats.tokens == MAX_TOKENS == 1 + stats.rounds + stats.accepted
        assert sum(stats.drafted_at) == stats.drafted
        assert sum(stats.accepted_at) == stats.accepted


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", OF_FILES, ids=lambda kind: kind.__name__)
def test_a_draft_context_of_another_size_changes_nothing(kind: Any, known: KnownTexts) -> None:
    """One draft context has more sequences than the target; one is so small that it fills up early."""
    prompts = [known.prompts[4] * 3, known.prompts[2]]
    expected = [by_hand(known.model, prompt, MAX_TOKENS) for prompt in prompts]
    with known.model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        for options in ({"n_seq_max": 5}, {"n_ctx": 256}, {"n_ubatch": 1}, {"flash_attn": True}):
            drafter = kind(known, context, **options)
            found = lt.generate(context, prompts, drafter, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert [one.tokens.tolist() for one in found] == expected


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_outputs_max", [0, 3])
def test_drafts_longer_than_a_batch_or_its_outputs(
    kv_unified: bool, n_outputs_max: int, known: KnownTexts
) -> None:
    """Forty tokens of a draft, a batch of eight, three outputs a call."""
    options: dict[str, Any] = {
        "n_batch": 8,
        "n_ubatch": 8,
        "n_outputs_max": n_outputs_max,
        "kv_unified": kv_unified,
    }
    with known.model.context(n_ctx=1024, n_seq_max=3, **options, **EXACT) as context:
        drafter = Guessing(known.model.n_vocab, known.texts(), wrong=0.05, longest=40)
        found = list(
            lt.generate(context, known.prompts, drafter, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True)
        )
    assert [one.tokens.tolist() for one in found] == known.expected["greedy"]
    assert max(len(one.stats.accepted_at) for one in found) > 20


def test_a_drafter_of_some_is_as_good_as_one_of_all(known: KnownTexts) -> None:
    """A drafter may leave sequences out or give them empty drafts."""

    class Some(Guessing):
        def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
            found = dict(super().draft(requests))
            return {seq: draft for seq, draft in found.items() if seq != 1}

    with known.model.context(n_ctx=1024, n_seq_max=3, **EXACT) as context:
        drafter = Some(known.model.n_vocab, known.texts(), wrong=0.5)
        found = list(
            lt.generate(context, known.prompts, drafter, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True)
        )
    assert [one.tokens.tolist() for one in found] == known.expected["greedy"]
    assert {one.stats.drafted > 0 for one in found} == {True, False}


def test_a_drafter_is_told_of_all_that_happens(known: KnownTexts) -> None:
    """`Guessing` checks positions and requests against accepted tokens; the last text is complete."""
    prompt, tokens = known.prompts[2], known.expected["greedy"][2]

    class Keeping(Guessing):
        forgotten: list[tuple[int, list[int]]]

        def reset(self, seq: int) -> None:
            # Also before it begins.
            if seq in self.texts:
                self.forgotten.append((seq, list(self.texts[seq])))
            super().reset(seq)

    with known.model.context(n_ctx=256, **EXACT) as context:
        drafter = Keeping(known.model.n_vocab, known.texts(), wrong=0.4)
        drafter.forgotten = []
        list(lt.generate(context, prompt, drafter, max_tokens=MAX_TOKENS, ignore_eos=True))
        assert drafter.forgotten == [(0, [*prompt, *tokens[:-1]])]
        drafter.forgotten = []
        stream = lt.generate(context, prompt, drafter, max_tokens=MAX_TOKENS, ignore_eos=True, stream=True)
        for _ in range(9):
            next(stream)
        stream.close()
        assert [seq for seq, _ in drafter.forgotten] == [0]
        assert is_empty(context)


@pytest.mark.fuzz
@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(data=st.data())
def test_any_arrangement_is_a_loop_by_hand(data: st.DataObject, known: KnownTexts) -> None:
    """Sizes, prompts, drafts and ends of all kinds, against the texts that are known."""
    sampling = data.draw(st.sampled_from(sorted(SAMPLING)))
    chosen = data.draw(st.lists(st.integers(0, len(known.prompts) - 1), min_size=1, max_size=5))
    max_tokens = data.draw(st.sampled_from((1, 2, 9, MAX_TOKENS)))
    # Seeds go with the place in the list: where that is another one, tokens are made by hand.
    whole = [
        by_hand(known.model, known.prompts[p], max_tokens, seed=seed_of(SEED, i), **SAMPLING[sampling])
        for i, p in enumerate(chosen)
    ]
    stops = data.draw(
        st.sets(st.sampled_from(sorted({token for text in whole for token in text})), max_size=2)
    )
    expected = [
        text[: next((i + 1 for i, token in enumerate(text) if token in stops), None)] for text in whole
    ]
    n_seq_max = data.draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "n_seq_max": n_seq_max,
        "kv_unified": data.draw(st.booleans()),
        "n_ubatch": data.draw(st.sampled_from((4, 16, 512))),
        "n_batch": data.draw(st.sampled_from((16, 64))),
        "n_outputs_max": data.draw(st.sampled_from((0, 4))),
    }
    drafter = Guessing(
        known.model.n_vocab,
        [[*known.prompts[p], *text] for p, text in zip(chosen, whole, strict=True)],
        wrong=data.draw(st.sampled_from((0.0, 0.2, 0.7))),
        longest=data.draw(st.integers(1, 12)),
        seed=data.draw(st.integers(0, 99)),
    )
    with known.model.context(n_ctx=256 * n_seq_max, **options, **EXACT) as context:
        found = list(
            lt.generate(
                context,
                [known.prompts[p] for p in chosen],
                drafter,
                max_tokens=max_tokens,
                seed=SEED,
                stop_tokens=stops,
                ignore_eos=True,
                **SAMPLING[sampling],
            )
        )
        assert is_empty(context)
    assert [one.tokens.tolist() for one in found] == expected
    reasons = ["stop" if text[-1] in stops else "length" for text in expected]
    assert [one.finish_reason for one in found] == reasons
