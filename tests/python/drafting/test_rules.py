"""Settings of model drafters: where drafts end, and how their tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import EXACT, PAIRS, Loop, Pair, assert_drafted, opened, random_text
from support.tiny import TinyLlama
from support.tiny_models import drafters, rigged
from support.tiny_models.rigged import N_VOCAB, by_token, cycle, wrong_at

import llamatap as lt

KINDS = ["eagle3 d2t", "mtp", "mtp 3 heads", "model", "dflash causal"]
F = cycle()
G = wrong_at(F, range(64))
H = cycle(5)
SOME = range(5, 64, 2)
Draws: TypeAlias = "Callable[[int, int], NDArray[np.float64]]"


@pytest.mark.parametrize("name", KINDS)
def test_drafts_have_no_more_tokens_than_are_allowed(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The limit is the drafter's, the request's, or the number of heads."""
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_max=2) as loop:
        loop.start({0: random_text(rng, 9)})
        for n, expected in ((1, 1), (2, 2), (9, 2)):
            assert_drafted(loop.draft(n=n).get(0), pair.oracle, loop.texts[0], expected)
        for n in (0, -1, -(2**31)):
            assert loop.draft(n=n) == {}
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], 2)
        loop.verify(loop.draft(), rng)
        assert_drafted(loop.draft().get(0), pair.oracle, loop.texts[0], 2)
    with opened(pair, n_max="auto") as loop:
        assert loop.drafter.n_max == "auto"
        loop.start({0: random_text(rng, 9)})
        length = 3 if "heads" in name else 6
        assert_drafted(loop.draft(n=6).get(0), pair.oracle, loop.texts[0], length)


@pytest.mark.parametrize("name", KINDS)
def test_sequences_want_drafts_of_their_own_lengths(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[name](tmp_path)
    with opened(pair, n_seq_max=4) as loop:
        loop.start({seq: random_text(rng, 5 + seq) for seq in range(4)})
        for _ in range(3):
            requests = {
                seq: lt.DraftRequest(text[-1], len(text) - 1, (3, 0, 1, 2)[seq])
                for seq, text in loop.texts.items()
            }
            drafts = dict(loop.drafter.draft(requests))
            assert sorted(drafts) == [0, 2, 3]
            for seq, draft in drafts.items():
                assert_drafted(draft, pair.oracle, loop.texts[seq], (3, 0, 1, 2)[seq])
            loop.verify({1: lt.Draft(np.zeros(0, np.int32)), **drafts}, rng)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KINDS)
def test_a_draft_ends_before_a_token_that_is_not_likely_enough(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[name](tmp_path)
    longest = 3 if "heads" in name else 4
    texts = {seq: random_text(rng, 9) for seq in range(8)}
    p_min = float(
        np.quantile(np.concatenate([pair.oracle(text, longest)[1] for text in texts.values()]), 0.3)
    )

    def length_of(text: list[int]) -> int:
        likely = pair.oracle(text, longest)[1] >= p_min
        return int(np.argmin([*likely, False]))

    for n_min in (0, 2, longest):
        lengths = []
        with opened(pair, n_seq_max=8, p_min=p_min, n_min=n_min) as loop:
            loop.start(texts)
            for _ in range(3):
                drafts = loop.draft()
                for seq, text in loop.texts.items():
                    lengths.append(length_of(text))
                    if lengths[-1] < max(n_min, 1):
                        assert seq not in drafts
                    else:
                        assert_drafted(drafts.get(seq), pair.oracle, text, lengths[-1])
                nothing = lt.Draft(np.zeros(0, np.int32))
                loop.verify({seq: drafts.get(seq, nothing) for seq in texts}, rng)
        assert len(set(lengths)) > 2


@contextmanager
def rigged_loop(
    folder: Path, kind: str, tables: list[list[int]], margin: float, n_seq_max: int = 1, **options: Any
) -> Iterator[Loop]:
    """A drafter that reads tokens, and whose heads follow tables."""
    target = rigged.write_rigged_model(folder / "target.gguf", F)
    path = folder / "draft.gguf"
    if kind == "model":
        rigged.write_rigged_model(path, tables[0], margin=margin)
    elif kind == "mtp":
        rigged.write_rigged_mtp(path, F, tables, trunk=False, margin=margin)
    else:
        some = SOME if kind == "eagle3 d2t" else None
        rigged.write_rigged_eagle3(path, F, tables[0], half="token", draft_vocab=some, margin=margin)
    with opened(
        Pair(target, path, kind.split()[0], by_table), n_seq_max=n_seq_max, n_ctx=2048, **options
    ) as loop:
        yield loop


def by_table(text: Any, n: int) -> Any:
    """A pair without an oracle: :mod:`support.tiny_models.rigged` predicts its drafts."""
    raise NotImplementedError


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "model"])
def test_a_draft_ends_with_the_end_of_the_text(kind: str, tmp_path: Path) -> None:
    table = list(F)
    table[12] = 2  # </s>
    with rigged_loop(tmp_path, kind, [table], 8.0, n_seq_max=2, n_max=6) as loop:
        loop.start({0: [5, 10], 1: [5, 20]})
        drafts = loop.draft(n=6)
        assert drafts[0].tokens.tolist() == [11, 12, 2]
        assert drafts[1].tokens.tolist() == by_token(table)([20], 6)


def test_the_probabilities_of_a_draft_are_those_of_its_tokens(tmp_path: Path) -> None:
    for kind, n_vocab in (
        ("eagle3", N_VOCAB),
        ("eagle3 d2t", len(SOME)),
        ("mtp", N_VOCAB),
        ("model", N_VOCAB),
    ):
        with rigged_loop(tmp_path, kind, [F], 3.0) as loop:
            loop.start({0: [5, 10]})
            draft = loop.draft()[0]
            assert draft.probs is not None
            assert draft.distributions is None
            assert draft.probs[0] == pytest.approx(rigged.probability(3.0, n_vocab), abs=1e-5)


#: By kind: the heads' tables and the vocabulary that it draws from.
DRAWN: dict[str, tuple[list[list[int]], Any]] = {
    "eagle3": ([G], range(N_VOCAB)),
    "eagle3 d2t": ([G], SOME),
    "mtp": ([G, F, H], range(N_VOCAB)),
    "model": ([G], range(N_VOCAB)),
}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("kind", DRAWN)
def test_distributions_are_the_softmax_of_logits_over_the_temperature(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    tables, vocabulary = DRAWN[kind]
    with rigged_loop(tmp_path, kind, tables, 2.0, n_seq_max=2, temperature=temperature) as loop:
        loop.start({0: [5, 10], 1: [7, 8, 9]})
        for seq, draft in loop.draft().items():
            last = loop.texts[seq][-1]
            assert draft.distributions is not None
            assert draft.distributions.shape == (len(draft.tokens), N_VOCAB)
            assert draft.distributions.dtype == np.float32
            for step, (token, row) in enumerate(zip(draft.tokens.tolist(), draft.distributions, strict=True)):
                table = rigged.restricted(tables[step % len(tables)], list(vocabulary))
                logits = np.full(N_VOCAB, -np.inf)
                logits[list(vocabulary)] = 0
                logits[table[last]] = 2.0
                expected = np.exp(logits / temperature)
                assert np.abs(row - expected / expected.sum()).max() < 1e-5
                assert row.sum() == pytest.approx(1, abs=1e-5)
                last = token
            assert draft.probs is not None
            assert np.array_equal(draft.probs, draft.distributions[range(len(draft.tokens)), draft.tokens])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 3.0])
@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_tokens_are_drawn_from_their_distributions(kind: str, temperature: float, tmp_path: Path) -> None:
    """Chi-square over the 64 places of a token relative to the most likely one, on 3000 draws and more that
    four sequences make in a row; and each draw knows nothing of the one before."""
    margin = 2.0
    offsets: list[list[int]] = []
    for seed in range(4):
        options = {"n_max": 8, "temperature": temperature, "seed": seed}
        with rigged_loop(tmp_path, kind, [G], margin, n_seq_max=4, **options) as loop:
            loop.start({seq: [5, 10 + seq] for seq in range(4)})
            for _ in range(35):
                drafts = loop.draft(n=8)
                entries = []
                for seq, draft in drafts.items():
                    text, tokens = loop.texts[seq], draft.tokens.tolist()
                    before = [text[-1], *tokens[:-1]]
                    offsets.append([(b - G[a]) % N_VOCAB for a, b in zip(before, tokens, strict=True)])
                    entries += [
                        (token, at, seq) for at, token in enumerate([text[-1], *tokens], len(text) - 1)
                    ]
                    text += [*tokens, 3 + len(text) % 60]
                loop.feed(entries)
    assert sum(map(len, offsets)) > 3000
    counts = np.bincount(np.concatenate(offsets), minlength=N_VOCAB)
    weights = np.ones(N_VOCAB)
    weights[0] = np.exp(margin / temperature)
    expected = weights / weights.sum() * counts.sum()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: a mean of 63, a deviation of 11.
    assert 25 < chi_square < 120
    hits = [np.array(row) == 0 for row in offsets if len(row) > 1]
    pairs = np.array([pair for row in hits for pair in pairwise(row)], float)
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 4 / np.sqrt(len(pairs))
    ends = np.array([row[0] == row[-1] for row in hits])
    share = counts[0] / counts.sum()
    assert abs(ends.mean() - (share**2 + (1 - share) ** 2)) < 4 * 0.5 / np.sqrt(len(ends))


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "model"])
def test_one_seed_draws_the_same_whatever_the_company(kind: str, tmp_path: Path) -> None:
    tables = DRAWN[kind][0]
    texts = {seq: [5, 10] for seq in range(3)}

    def drawn(seed: int, seqs: list[int]) -> dict[int, list[int]]:
        options = {"temperature": 2.0, "n_max": 6, "seed": seed}
        with rigged_loop(tmp_path, kind, tables, 2.0, n_seq_max=3, **options) as loop:
            loop.start({seq: texts[seq] for seq in seqs})
            return {seq: draft.tokens.tolist() for seq, draft in loop.draft(n=6).items()}

    first = drawn(3, [0, 1, 2])
    assert drawn(3, [0, 1, 2]) == first
    assert drawn(3, [1]) == {1: first[1]}
    assert drawn(4, [0, 1, 2]) != first
    assert len({tuple(tokens) for tokens in first.values()}) == 3


@pytest.mark.slow
def test_likelihood_and_temperature_together(tmp_path: Path) -> None:
    """The most likely token decides whether a draft goes on, not the drawn one.

    Otherwise drafted tokens would not follow the distribution that comes with them.
    """
    unlikely = 0
    for seed in range(20):
        for p_min, length in ((0.4, 8), (0.5, 0)):
            options: dict[str, Any] = {"temperature": 1.0, "p_min": p_min, "n_max": 8, "seed": seed}
            # The most likely one has 0.464.
            with rigged_loop(tmp_path, "model", [G], 4.0, **options) as loop:
                loop.start({0: [5, 10]})
                draft = loop.draft(n=8).get(0)
            if draft is None or draft.tokens[-1] != 2:  # </s>
                assert (0 if draft is None else len(draft.tokens)) == length
            if draft is not None and draft.probs is not None:
                unlikely += int((draft.probs < p_min).sum())
    assert 50 < unlikely < 120


@pytest.mark.parametrize("n_vocab", [250, 259, 262])
def test_distributions_are_over_the_targets_vocabulary(n_vocab: int, tmp_path: Path) -> None:
    """Models of one family have a few tokens more or less at the end: what a target verifies is its own."""
    vocabulary = drafters.Vocabulary((*drafters.BYTES.tokens, "<pad0>", "<pad1>", "<pad2>")[:n_vocab])
    tensors: drafters.Tensors = {**TinyLlama(seed=3).weights}
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = np.concatenate([tensors[name]] * 2)[:n_vocab].astype(np.float32)
    keys = drafters.decoder_keys(4, 64, 96, 2, 1e4)
    path = drafters.write_file(tmp_path / "draft.gguf", "llama", keys, tensors, vocabulary)
    with (
        lt.Model(TinyLlama().write(tmp_path / "target.gguf")) as model,
        model.context(n_ctx=256, **EXACT) as context,
    ):
        drafter = lt.ModelDrafter(context, path, temperature=1.0)
        drafter.process(lt.Batch.of([5, 6, 7]))
        draft = drafter.draft({0: lt.DraftRequest(8, 3, 4)})[0]
        assert draft.distributions is not None
        assert draft.distributions.shape == (len(draft.tokens), model.n_vocab)
        assert np.abs(draft.distributions.sum(axis=1) - 1).max() < 1e-5
        assert draft.tokens.max() < model.n_vocab


WRONG: list[dict[str, Any]] = [
    {"n_max": 0},
    {"n_max": -1},
    {"n_max": 1025},
    {"n_max": 1.5},
    {"n_max": "all"},
    {"n_max": None},
    {"n_min": -1},
    {"n_min": 0.5},
    {"n_min": 5},
    {"n_max": 2, "n_min": 3},
    {"n_max": "auto", "n_min": 9},
    {"p_min": -0.1},
    {"p_min": 1.1},
    {"p_min": float("nan")},
    {"p_min": "0.5"},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": None},
    {"seed": -1},
    {"seed": 2**32},
    {"seed": 1.5},
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_settings_raise(options: dict[str, Any], tmp_path: Path) -> None:
    for name in ("eagle3", "mtp", "model"):
        with pytest.raises(lt.InvalidInputError), opened(PAIRS[name](tmp_path), **options):
            pass


def test_the_shortest_draft_is_no_longer_than_what_the_file_gives(tmp_path: Path) -> None:
    with opened(PAIRS["mtp 3 heads"](tmp_path), n_max=6, n_min=3) as loop:
        drafter = loop.drafter
        assert isinstance(drafter, lt.MtpDrafter)
        assert drafter.n_max == 3
        with pytest.raises(lt.InvalidInputError, match=r"n_min must be at most n_max, 3 with .*gguf, not 4"):
            lt.MtpDrafter(drafter.spec, n_max=6, n_min=4)
