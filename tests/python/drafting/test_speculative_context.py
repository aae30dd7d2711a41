"""SpeculativeContext: encode and decode equal the formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.drafting import EXACT, random_text
from support.numerics import relative
from support.speculative_contexts import (
    EAGLE3,
    MTP,
    QWEN35,
    SPECS,
    N,
    SpecUnderTest,
    beside,
    eagle3_spec,
    mtp_spec,
    qwen35_spec,
)
from support.tiny import TinyGemma3, TinyLlama, TinyQwen3
from support.tiny_models import drafters

import llamatap as lt
from reference import eagle3


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_encodes_what_the_formulas_say(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Any number of features, also more than are computed at once; and its memory is not touched."""
    with eagle3_spec(tmp_path, name, n_ubatch=16) as tested:
        spec, weights = tested.spec, tested.eagle3
        assert weights is not None
        assert spec.kind == "eagle3"
        assert spec.target_layers == weights.target_layers
        assert (spec.n_features, spec.n_state) == (3 * 64, EAGLE3[name].get("n_embd", 64))
        assert spec.n_heads == 1
        spec.decode([5, 6], tested.states(rng, 2), [0, 1])
        for n in (1, 15, 16, 17, 100, 700):
            features = rng.standard_normal((n, spec.n_features)).astype(np.float32)
            found = spec.encode(features)
            assert found.dtype == np.float32
            assert found.shape == (n, spec.n_state)
            assert relative(found, eagle3.encode(features, weights)) < 1e-5
        assert spec.encode(np.zeros((0, spec.n_features), np.float32)).shape == (0, spec.n_state)
        assert [spec.memory.last(seq) for seq in range(4)] == [1, -1, -1, -1]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "block"])
def test_states_of_mtp_are_the_targets(whole: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    with mtp_spec(tmp_path, whole=whole) as tested:
        spec = tested.spec
        n_layer = spec.target.model.n_layer
        assert (spec.kind, spec.target_layers) == ("mtp", (n_layer,))
        assert (spec.n_features, spec.n_state, spec.n_heads) == (64, 64, 1)
        for n in (0, 1, 600):
            states = tested.states(rng, n)
            found = spec.encode(states)
            assert np.array_equal(found, states)
            assert not np.shares_memory(found, states)


def decode_in_parts(tested: SpecUnderTest, rng: np.random.Generator, head: int = 0) -> None:
    """Decode three sequences of different lengths in three calls, interleaved, some of them backwards.

    Only some pairs are outputs.
    """
    spec = tested.spec
    lengths = (N, 11, 17)
    tokens = [random_text(rng, n) for n in lengths]
    states = [tested.states(rng, n) for n in lengths]
    expected = [tested.formula(tokens[seq], states[seq], range(n), head) for seq, n in enumerate(lengths)]
    for part in range(3):
        pairs = [
            (at, seq) for seq, n in enumerate(lengths) for at in range(part * n // 3, (part + 1) * n // 3)
        ]
        order = rng.permutation(len(pairs)) if part else range(len(pairs))
        pairs = [pairs[i] for i in order]
        outputs = rng.random(len(pairs)) < 0.4
        outputs[-1] = True
        found = spec.decode(
            [tokens[seq][at] for at, seq in pairs],
            tested.given(np.stack([states[seq][at] for at, seq in pairs])),
            [at for at, _ in pairs],
            [seq for _, seq in pairs],
            outputs,
            top_k=5,
            logits=True,
            head=head,
        )
        wanted = [pair for pair, output in zip(pairs, outputs, strict=True) if output]
        logits, after = (np.stack([expected[seq][i][at] for at, seq in wanted]) for i in (0, 1))
        tested.check(found, logits, after)
    assert [spec.memory.last(seq) for seq in range(4)] == [N - 1, 10, 16, -1]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_decodes_what_the_formulas_say(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with eagle3_spec(tmp_path, name, n_ubatch=16) as tested:
        decode_in_parts(tested, rng)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "block"])
@pytest.mark.parametrize("name", MTP)
def test_mtp_decodes_what_the_formulas_say(
    name: str, whole: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    with mtp_spec(tmp_path, name, whole, n_ubatch=16) as tested:
        assert tested.spec.n_heads == MTP[name].get("n_nextn", 1)
        for head in range(tested.spec.n_heads):
            tested.spec.memory.clear()
            decode_in_parts(tested, rng, head)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "block"])
@pytest.mark.parametrize("name", QWEN35)
def test_the_block_of_qwen35_decodes_what_the_formulas_say(
    name: str, whole: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Its states are the target's after the last norm, and so are those that it gives."""
    with qwen35_spec(tmp_path, name, whole, n_ubatch=16) as tested:
        spec = tested.spec
        assert (spec.kind, spec.target_layers, spec.n_heads) == ("mtp", ("norm",), 1)
        decode_in_parts(tested, rng)


def test_tokens_without_states_decode_as_the_formulas_say(tmp_path: Path, rng: np.random.Generator) -> None:
    with SPECS["model"](tmp_path, n_ubatch=16) as tested:
        decode_in_parts(tested, rng)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SPECS)
def test_more_pairs_than_are_computed_at_once(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """In ubatches of 16 and engine calls of 512."""
    with SPECS[name](tmp_path, n_ubatch=16) as tested:
        tokens, states = random_text(rng, 700), tested.states(rng, 700)
        logits, after = tested.formula(tokens, states, range(700), 0)
        some = np.arange(700) % 7 == 3
        for outputs, rows in ((True, slice(None)), (some, some)):
            tested.spec.memory.clear()
            given = tested.given(states)
            found = tested.spec.decode(tokens, given, range(700), 0, outputs, top_k=2, logits=True)
            tested.check(found, logits[rows], after[rows])


def test_heads_in_turn_see_their_own_keys(tmp_path: Path, rng: np.random.Generator) -> None:
    """All of a text with each head, one after the other, then the next pair with each."""
    with mtp_spec(tmp_path, "three heads") as tested:
        spec = tested.spec
        tokens, states = random_text(rng, N), tested.states(rng)
        # Another sequence: with the last one, a memory forgets what other heads have left in it.
        spec.decode([5], states[:1], [0], 1, False)
        for head in range(3):
            spec.memory.remove(0)
            spec.decode(tokens[:-1], states[:-1], range(N - 1), 0, False, head=head)
        for head in (2, 0, 1):
            spec.memory.remove(0, N - 1)
            found = spec.decode(tokens[-1:], states[-1:], [N - 1], head=head, logits=True)
            logits, after = tested.formula(tokens, states, range(N), head)
            tested.check(found, logits[-1:], after[-1:])


PLAIN: dict[str, Callable[[Path], Path]] = {
    "llama": TinyLlama(seed=5, n_layer=2).write,
    "qwen3": TinyQwen3(seed=6).write,
    "gemma3": TinyGemma3(seed=7).write,
    "mimo2": lambda path: drafters.write_mimo2(path, seed=8),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_decodes_as_it_does_alone(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The same with and without MTP blocks, where the file is used as a model."""
    path = PLAIN[name](tmp_path / "draft.gguf")
    tokens = random_text(rng, 40)
    batch = lt.Batch()
    for position, token in enumerate(tokens):
        batch.add(token, position, output=True)
    with lt.Model(path) as model, model.context(n_ctx=256, **EXACT) as context:
        context.decode(batch)
        expected = np.stack([context.logits(row) for row in range(40)]).astype(np.float64)
    with beside(TinyLlama().write(tmp_path / "target.gguf"), path, as_model=True, n_ubatch=16) as spec:
        assert (spec.kind, spec.target_layers, spec.n_features, spec.n_state) == ("model", (), 0, 0)
        tested = SpecUnderTest(spec, lambda *given: (expected, expected))
        rows = np.arange(40) % 3 == 0
        found = spec.decode(tokens[:25], None, range(25), 2, rows[:25], top_k=4, logits=True)
        tested.check(found, expected[:25][rows[:25]], None)
        found = spec.decode(tokens[25:], None, range(25, 40), 2, top_k=1, logits=True)
        tested.check(found, expected[25:], None)


def test_outputs_are_owned_and_come_as_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    with eagle3_spec(tmp_path, "d2t") as tested:
        states = tested.states(rng)
        out = tested.spec.decode([5, 6, 7], states[:3], [0, 1, 2], 0, [True, False, True])
        assert out.ids.dtype == np.int32
        assert out.probs.dtype == np.float32
        assert out.ids.shape == out.probs.shape == (2, 1)
        assert out.states is not None
        assert out.states.dtype == np.float32
        assert out.states.shape == (2, 64)
        assert out.logits is None
        before = [out.ids.copy(), out.probs.copy(), out.states.copy()]
        nothing = tested.spec.decode(np.array([8]), states[3:4], np.array([3], np.int64), outputs=False)
        assert nothing.ids.shape == (0, 1)
        assert nothing.states is not None
        assert nothing.states.shape == (0, 64)
        none = tested.spec.decode([], states[:0], [], logits=True)
        assert none.ids.shape == (0, 1)
        assert none.logits is not None
        assert none.logits.shape == (0, 259)
        every = tested.spec.decode([9], states[4:5], [4], top_k=259)
        assert sorted(every.ids[0].tolist()) == list(range(259))
        assert every.probs[0, :100].sum() == pytest.approx(1, abs=1e-5)
        assert (every.probs[0, 100:] == 0).all()
    assert all(map(np.array_equal, before, (out.ids, out.probs, out.states)))


def test_any_layout_of_states_is_taken(tmp_path: Path, rng: np.random.Generator) -> None:
    with mtp_spec(tmp_path) as tested:
        states = tested.states(rng, 6)
        wide = np.zeros((6, 128), np.float32)
        wide[:, ::2] = states
        expected = tested.formula([5, 6, 7, 8, 9, 10], states, range(6), 0)
        for layout in (states, np.asfortranarray(states), wide[:, ::2], states[::-1].copy()[::-1]):
            tested.spec.memory.clear()
            tested.check(tested.spec.decode([5, 6, 7, 8, 9, 10], layout, range(6), logits=True), *expected)
            assert np.array_equal(tested.spec.encode(layout), states)
