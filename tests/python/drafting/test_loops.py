"""Drafters in hand-written loops: every draft equals the formulas' draft for the text so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.drafting import EACH, PAIRS, Entry, Loop, Pair, assert_drafted, opened, random_text

import llamatap as lt


def length_of(name: str) -> int:
    """The longest draft of a pair of models: three heads draft three tokens."""
    return 3 if "heads" in name else 4


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PAIRS)
def test_every_draft_of_a_loop_is_that_of_the_formulas(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """None, some or all tokens of the previous draft were accepted."""
    pair = PAIRS[name](tmp_path)
    with opened(pair) as loop:
        loop.start({0: random_text(rng, 9)})
        for _ in range(12):
            text = list(loop.texts[0])
            drafts = loop.draft()
            assert_drafted(drafts.get(0), pair.oracle, text, length_of(name))
            loop.verify(drafts, rng)


@pytest.mark.parametrize("name", EACH)
def test_after_a_draft_that_was_accepted_whole_the_next_is_that_of_a_fresh_context(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The state before the last accepted token must not be left out (llama.cpp#22728)."""
    pair = PAIRS[name](tmp_path)
    text = random_text(rng, 6)
    with opened(pair) as loop, opened(pair) as fresh:
        loop.start({0: text})
        for _ in range(5):
            draft = loop.draft()[0].tokens.tolist()
            loop.feed((token, at, 0) for at, token in enumerate([text[-1], *draft], len(text) - 1))
            loop.drafter.accept(0, len(draft))
            text += [*draft, *random_text(rng, 1)]
            loop.texts[0] = text
        fresh.start({0: text})
        found, expected = loop.draft()[0], fresh.draft()[0]
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.probs is not None
        assert expected.probs is not None
        assert np.abs(found.probs - expected.probs).max() < 1e-5


def turns(texts: dict[int, list[int]]) -> list[Entry]:
    """Sequences take turns, the shorter ones from the start on."""
    entries = [(text[at], at, seq) for seq, text in texts.items() for at in range(len(text) - 1)]
    return sorted(entries, key=lambda entry: entry[1])


ORDERS: dict[str, Callable[[list[Entry]], list[Entry]]] = {
    "in turn": lambda entries: entries,
    "one after the other": lambda entries: sorted(entries, key=lambda entry: entry[2]),
    "backwards": lambda entries: entries[::-1],
    "shuffled": lambda entries: [entries[i] for i in np.random.default_rng(5).permutation(len(entries))],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["eagle3 d2t", "mtp", "mtp block 3 heads", "model", "dflash", "dspark"])
def test_the_order_of_a_batch_changes_no_draft(
    name: str, order: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[name](tmp_path)
    texts = {seq: random_text(rng, length) for seq, length in enumerate((5, 20, 11))}
    with opened(pair, n_seq_max=3, n_ubatch=16) as loop:
        loop.texts = texts
        loop.feed(ORDERS[order](turns(texts)))
        for _ in range(2):
            drafts = loop.draft()
            for seq, text in texts.items():
                assert_drafted(drafts.get(seq), pair.oracle, text, length_of(name))
            loop.verify(drafts, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_prompt_in_chunks_is_the_prompt(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The prompt is longer than what a drafter holds back for its first draft; ubatches cut the chunks."""
    pair = PAIRS[name](tmp_path)
    text = random_text(rng, 601)
    for chunk in (1, 7, 64, 600):
        with opened(pair, n_ubatch=16) as loop:
            loop.texts[0] = list(text)
            for start in range(0, 600, chunk):
                loop.feed((text[at], at, 0) for at in range(start, min(start + chunk, 600)))
            for _ in range(2):
                drafts = loop.draft()
                assert_drafted(drafts.get(0), pair.oracle, loop.texts[0], length_of(name))
                loop.verify(drafts, np.random.default_rng(8))


@pytest.mark.parametrize("name", EACH)
def test_chunks_and_drafts_in_turn(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """One sequence drafts while another one's prompt is prefilled, a chunk with each round."""
    pair = PAIRS[name](tmp_path)
    text = random_text(rng, 40)
    with opened(pair, n_seq_max=2, n_ubatch=16) as loop:
        loop.start({0: random_text(rng, 6)})
        for start in range(0, 39, 13):
            drafts = loop.draft([0])
            assert_drafted(drafts.get(0), pair.oracle, loop.texts[0], length_of(name))
            loop.verify(drafts, rng)
            loop.feed((text[at], at, 1) for at in range(start, start + 13))
        loop.texts[1] = text
        drafts = loop.draft()
        for seq in (0, 1):
            assert_drafted(drafts.get(seq), pair.oracle, loop.texts[seq], length_of(name))


def script(loop: Loop, pair: Pair, name: str, rng: np.random.Generator) -> None:
    """Ten rounds of four sequences: 2 is absent from some, 1 ends and another begins in its place."""
    texts = {seq: random_text(rng, length) for seq, length in enumerate((12, 4, 25, 2))}
    loop.start(texts)
    for number in range(10):
        if number == 5:
            loop.reset(1)
            loop.start({1: random_text(rng, 17)})
        seqs = [seq for seq in (3, 0, 1, 2) if seq != 2 or number % 3 == 0]
        before = {seq: list(loop.texts[seq]) for seq in seqs}
        drafts = loop.draft(seqs)
        for seq in seqs:
            assert_drafted(drafts.get(seq), pair.oracle, before[seq], length_of(name))
        loop.verify(drafts, rng)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PAIRS)
def test_sequences_drafted_together_are_each_alone(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """With two sequences nothing was accepted any more (llama.cpp#27572)."""
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_seq_max=4) as loop:
        script(loop, pair, name, rng)
        together = loop.draft()
        for seq, text in loop.texts.items():
            with opened(pair) as alone:
                alone.start({0: text})
                draft = alone.draft()[0]
                assert draft.tokens.tolist() == together[seq].tokens.tolist()
                others = together[seq].probs
                assert draft.probs is not None
                assert others is not None
                assert np.abs(draft.probs - others).max() < 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EACH)
def test_sequences_of_few_and_of_many_new_tokens_draft_together(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A few waiting tokens are decoded with the draft's first step, many of them before it."""
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_seq_max=3, n_ubatch=16) as loop:
        loop.start({0: random_text(rng, 5)})
        loop.verify(loop.draft(), rng)
        loop.start({1: random_text(rng, 90), 2: random_text(rng, 3)})
        for _ in range(2):
            drafts = loop.draft()
            for seq, text in loop.texts.items():
                assert_drafted(drafts.get(seq), pair.oracle, text, length_of(name))
            loop.verify(drafts, rng)


@pytest.mark.parametrize("name", EACH)
def test_a_prompt_that_sequences_share(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pair = PAIRS[name](tmp_path)
    prompt = random_text(rng, 12)
    with opened(pair, n_seq_max=2) as loop:
        batch = lt.Batch()
        for position, token in enumerate(prompt):
            batch.add(token, position, [0, 1])
        loop.show(batch)
        loop.texts = {seq: [*prompt, *random_text(rng, 1)] for seq in (0, 1)}
        for _ in range(3):
            drafts = loop.draft()
            for seq, text in loop.texts.items():
                assert_drafted(drafts.get(seq), pair.oracle, text, length_of(name))
            loop.verify(drafts, rng)


@pytest.mark.parametrize("name", EACH)
def test_what_a_caller_may_do_between_drafts(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    pair = PAIRS[name](tmp_path)

    def check() -> lt.Draft:
        drafts = loop.draft()
        assert_drafted(drafts.get(0), pair.oracle, loop.texts[0], length_of(name))
        return drafts[0]

    with opened(pair) as loop:
        loop.start({0: random_text(rng, 9)})
        text = loop.texts[0]
        check()
        # Ask again, with other last tokens.
        for _ in range(3):
            text[-1] = random_text(rng, 1)[0]
            check()
        # Decode another token than the one asked with, and no draft.
        loop.feed([(77, 8, 0)])
        text[-1:] = [77, 78]
        check()
        # Decode some tokens without drafts.
        for _ in range(3):
            loop.feed([(text[-1], len(text) - 1, 0)])
            text.append(random_text(rng, 1)[0])
        draft = check()
        # Roll a whole draft back, told by the next batch instead of by accept().
        loop.feed(
            (token, at, 0) for at, token in enumerate([text[-1], *draft.tokens.tolist()], len(text) - 1)
        )
        loop.context.memory.remove(0, len(text))
        text.append(50)
        loop.feed([(50, len(text) - 1, 0)])
        text.append(51)
        draft = check()
        # Accept one token, then roll it back.
        loop.feed(
            (token, at, 0) for at, token in enumerate([text[-1], *draft.tokens.tolist()], len(text) - 1)
        )
        loop.drafter.accept(0, 1)
        loop.drafter.accept(0, 0)
        loop.context.memory.remove(0, len(text))
        text.append(52)
        check()
        # Start over.
        loop.reset(0)
        loop.start({0: random_text(rng, 3)})
        text = loop.texts[0]
        check()


@pytest.mark.parametrize("name", EACH)
def test_a_text_of_one_token_has_a_draft(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The text is one decoded token and the one that follows."""
    pair = PAIRS[name](tmp_path)
    with opened(pair) as loop:
        loop.start({0: random_text(rng, 2)})
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], length_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_drafts_end_where_the_drafts_context_does(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Near its end drafts are shorter, beyond it there are none; the target goes on, and nothing raises."""
    pair = PAIRS[name](tmp_path)
    with opened(pair, draft_ctx=256) as loop:
        loop.start({0: random_text(rng, 251)})
        text = loop.texts[0]
        lengths = []
        for _ in range(9):
            draft = loop.draft().get(0)
            if draft is not None:
                assert_drafted(draft, pair.oracle, text, len(draft.tokens))
            lengths.append(0 if draft is None else len(draft.tokens))
            loop.feed([(text[-1], len(text) - 1, 0)])
            text.append(random_text(rng, 1)[0])
        assert lengths[0] == length_of(name)
        assert lengths == sorted(lengths, reverse=True)
        assert set(lengths) == set(range(length_of(name) + 1))
        for start in range(len(text) - 1, 900, 60):
            tokens = [text[-1], *random_text(rng, 59)]
            loop.feed((token, at, 0) for at, token in enumerate(tokens, start))
            text += [*tokens[1:], *random_text(rng, 1)]
            assert loop.draft() == {}
        # A short text in the same sequence gets drafts again.
        loop.reset(0)
        loop.start({0: random_text(rng, 9)})
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], length_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_sequences_that_do_not_fit_into_the_drafts_context_have_no_drafts(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[name](tmp_path)
    with opened(pair, draft_ctx=256, n_seq_max=2) as loop:
        loop.start({seq: random_text(rng, 200) for seq in (0, 1)})
        for _ in range(2):
            for seq, draft in loop.draft().items():
                assert_drafted(draft, pair.oracle, loop.texts[seq], len(draft.tokens))
            loop.verify({seq: lt.Draft(np.array([9, 9], np.int32)) for seq in (0, 1)}, rng)
        loop.reset(1)
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], length_of(name))


def test_drafts_are_owned(tmp_path: Path, rng: np.random.Generator) -> None:
    """Later drafts and the end of the context do not change earlier drafts."""
    pair = PAIRS["eagle3"](tmp_path)
    with opened(pair, temperature=1.0) as loop:
        loop.start({0: random_text(rng, 9)})
        first = loop.draft()[0]
        assert first.probs is not None
        assert first.distributions is not None
        arrays: Sequence[np.ndarray] = (first.tokens, first.probs, first.distributions)
        copies = [array.copy() for array in arrays]
        loop.verify({0: first}, rng)
        loop.draft()
    assert all(np.array_equal(*both) for both in zip(arrays, copies, strict=True))
