"""The KV cache of a speculative context, and the target's states that it is fed with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import EXACT, random_text
from support.speculative_contexts import SPECS, N, SpecUnderTest, beside, eagle3_spec, mtp_spec
from support.tiny import TinyLlama
from support.tiny_models import drafters

import llamatap as lt


class Pairs:
    """N pairs of a sequence, and what the formulas say of them."""

    def __init__(self, tested: SpecUnderTest, rng: np.random.Generator, n: int = N) -> None:
        self.tested = tested
        self.tokens = random_text(rng, n)
        self.states = tested.states(rng, n)
        self.logits, self.after = tested.formula(self.tokens, self.states, range(n), 0)

    def decode(self, seq: int, start: int = 0, stop: int | None = None) -> None:
        """Decode these pairs and check them, given that the pairs before are in memory."""
        rows = slice(start, stop)
        found = self.tested.spec.decode(
            self.tokens[rows],
            self.tested.given(self.states[rows]),
            range(len(self.tokens))[rows],
            seq,
            top_k=3,
            logits=True,
        )
        self.tested.check(found, self.logits[rows], self.after[rows])


def spans(spec: lt.SpeculativeContext) -> list[tuple[int, int]]:
    return [(spec.memory.first(seq), spec.memory.last(seq)) for seq in range(spec.n_seq_max)]


NONE = (-1, -1)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_removed_can_be_decoded_again(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with SPECS[name](tmp_path) as tested:
        pairs, others = Pairs(tested, rng), Pairs(tested, rng)
        pairs.decode(1)
        others.decode(2, 0, 10)
        for start in (20, 7, 0):
            tested.spec.memory.remove(1, start)
            assert spans(tested.spec) == [NONE, (0, start - 1) if start else NONE, (0, 9), NONE]
            pairs.decode(1, start)
        others.decode(2, 10)
        tested.spec.memory.keep(2)
        assert spans(tested.spec) == [NONE, NONE, (0, N - 1), NONE]
        tested.spec.memory.clear()
        assert spans(tested.spec) == [NONE] * 4
        pairs.decode(2)


@pytest.mark.parametrize("name", SPECS)
def test_a_copy_goes_on_as_the_original(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with SPECS[name](tmp_path) as tested:
        pairs, memory = Pairs(tested, rng), tested.spec.memory
        pairs.decode(0, 0, 15)
        memory.copy(0, 3)
        memory.copy(0, 1, 0, 6)
        assert spans(tested.spec) == [(0, 14), (0, 5), NONE, (0, 14)]
        pairs.decode(3, 15)
        pairs.decode(1, 6)
        memory.remove(1)
        memory.remove(3, 2)
        pairs.decode(0, 15)
        pairs.decode(3, 2)


@pytest.mark.parametrize("name", SPECS)
def test_what_is_saved_goes_on_elsewhere(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """In another sequence, and in another context of the same draft."""
    with SPECS[name](tmp_path / "..") as tested:
        pairs, others = Pairs(tested, rng), Pairs(tested, rng)
        pairs.decode(0, 0, 15)
        others.decode(2)
        data = tested.spec.save(0)
        assert isinstance(data, bytes)
        pairs.decode(0, 15)
        tested.spec.restore(2, data)
        assert spans(tested.spec)[2] == (0, 14)
        pairs.decode(2, 15)
        tested.spec.memory.remove(0, 3)
        tested.spec.restore(0, memoryview(data))
        pairs.decode(0, 15)
        with SPECS[name](tmp_path / "..") as again:
            again.spec.restore(1, bytearray(data))
            elsewhere = Pairs.__new__(Pairs)
            elsewhere.__dict__ |= {**pairs.__dict__, "tested": again}
            elsewhere.decode(1, 15)


@pytest.mark.parametrize("name", SPECS)
def test_states_that_are_not_of_this_context_are_refused(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with SPECS[name](tmp_path) as tested:
        spec, pairs = tested.spec, Pairs(tested, rng)
        pairs.decode(0, 0, 15)
        data = spec.save(0)
        spec.target.decode(lt.Batch.of([5, 6]))
        damaged = bytearray(data)
        damaged[-5] ^= 1
        wrong: list[Any] = [
            b"",
            data[:-1],
            data[:40],
            data + b"x",
            bytes(damaged),
            spec.target.save(0),
            "abc",
            None,
        ]
        for one in wrong:
            with pytest.raises(lt.InvalidInputError):
                spec.restore(0, one)
            assert spans(spec)[0] == (0, 14)
        with pytest.raises(lt.InvalidInputError):
            spec.target.restore(0, data)
        calls: list[Callable[[], Any]] = [
            lambda: spec.restore(4, data),
            lambda: spec.restore(-1, data),
            lambda: spec.save(4),
        ]
        for call in calls:
            with pytest.raises(lt.InvalidInputError, match=r"0\.\.3"):
                call()
        with pytest.raises(lt.InvalidInputError, match="integer"):
            spec.save("0")
        pairs.decode(0, 15)


OTHERS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "other weights": (lambda path: drafters.write_eagle3(path, seed=7), {}),
    "another width": (lambda path: drafters.write_eagle3(path, n_embd=48), {}),
    "another kind": (lambda path: drafters.write_mtp_block(path, n_layer=4), {}),
    "another type of cache": (drafters.write_eagle3, {"type_k": "f16"}),
    "another layout of the cache": (drafters.write_eagle3, {"flash_attn": True}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_draft_is_refused(other: str, tmp_path: Path, rng: np.random.Generator) -> None:
    write, options = OTHERS[other]
    with (
        eagle3_spec(tmp_path) as tested,
        beside(tmp_path / "target.gguf", write(tmp_path / "other.gguf"), **options) as spec,
    ):
        pairs = Pairs(tested, rng)
        pairs.decode(0, 0, 10)
        spec.decode([5, 6], rng.standard_normal((2, spec.n_state)).astype(np.float32), [0, 1])
        with pytest.raises(lt.InvalidInputError):
            tested.spec.restore(0, spec.save(0))
        with pytest.raises(lt.InvalidInputError):
            spec.restore(1, tested.spec.save(0))
        assert spans(spec)[:2] == [(0, 1), NONE]
        pairs.decode(0, 10)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SPECS)
def test_a_full_memory_says_so_and_stays_of_use(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with SPECS[name](tmp_path, n_ctx=256) as tested:
        spec, pairs = tested.spec, Pairs(tested, rng, 256)
        assert spec.n_ctx == 256
        state = tested.states(rng, 9)
        pairs.decode(0)
        with pytest.raises(lt.ContextFullError, match=r"256.*256.*1"):
            spec.decode([5], tested.given(state[:1]), [256])
        assert spans(spec)[0] == (0, 255)
        with pytest.raises(lt.ContextFullError):
            spec.decode([5], tested.given(state[:1]), [0], 1)
        spec.memory.remove(0, 250)
        with pytest.raises(lt.ContextFullError, match=r"256.*250.*9"):
            spec.decode(range(5, 14), tested.given(state), range(250, 259))
        assert spans(spec) == [(0, 249), NONE, NONE, NONE]
        assert spec.encode(np.zeros((3, spec.n_features), np.float32)).shape == (3, spec.n_state)
        pairs.decode(0, 250)


@pytest.mark.parametrize("name", SPECS)
def test_use_after_close_raises(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    with SPECS[name](tmp_path) as tested:
        spec, features = tested.spec, np.zeros((1, tested.spec.n_features), np.float32)
        state = tested.given(tested.states(rng, 1))
        spec.decode([5], state, [0])
        memory = spec.memory
        data = spec.save(0)
        assert spec.kind in repr(spec)
        assert not spec.closed
        spec.close()
        spec.close()
        assert spec.closed
        assert "closed" in repr(spec)
        makers: dict[str, Callable[..., Any]] = {
            "eagle3": lt.Eagle3Drafter,
            "mtp": lt.MtpDrafter,
            "model": lambda spec: lt.ModelDrafter(spec.target, spec),
        }
        calls: list[Callable[[], Any]] = [
            lambda: spec.decode([5], state, [1]),
            lambda: spec.encode(features),
            lambda: spec.memory.last(0),
            lambda: memory.clear(),
            lambda: spec.save(0),
            lambda: spec.restore(0, data),
            lambda: (spec.n_ctx, spec.n_state),
            lambda: spec.n_heads,
            lambda: makers[spec.kind](spec),
        ]
        for call in calls:
            with pytest.raises(lt.ClosedError):
                call()


@pytest.mark.sampled(25)
@pytest.mark.parametrize("order", ["c", "m", "d", "cm", "mc", "dmc", "cmd"])
@pytest.mark.parametrize("name", SPECS)
def test_it_lives_on_when_its_target_or_a_model_is_closed(
    name: str, order: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The draft holds the target, whose embedding and head it inherits."""
    with SPECS[name](tmp_path) as tested:
        spec, pairs = tested.spec, Pairs(tested, rng)
        pairs.decode(0, 0, 8)
        parts: dict[str, Any] = {"c": spec.target, "m": spec.target.model, "d": spec.model}
        for part in order:
            parts[part].close()
        gc.collect()
        pairs.decode(0, 8)
        spec.restore(1, spec.save(0))


def test_an_embedding_and_a_head_that_are_inherited_outlive_the_target(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with eagle3_spec(tmp_path, "inherited") as tested:
        pairs = Pairs(tested, rng)
        tested.spec.target.close()
        tested.spec.target.model.close()
        gc.collect()
        pairs.decode(0)


def features(
    spec: lt.SpeculativeContext, tokens: list[int], *args: Any, **options: Any
) -> NDArray[np.float32]:
    with spec.target.tap(*args, **options) as tap:
        spec.target.decode(lt.Batch.of(tokens))
    return tap.states.select(spec.target_layers).array.reshape(len(tokens), -1)


def test_features_are_the_targets_states_side_by_side(tmp_path: Path, rng: np.random.Generator) -> None:
    tokens = random_text(rng, 12)
    with eagle3_spec(tmp_path, "layers backwards") as tested:
        spec = tested.spec
        assert spec.target_layers == (4, 3, 1)
        with lt.Extractor(spec.target.model, **EXACT) as extractor:
            expected = extractor(tokens, [4, 3, 1]).array.reshape(12, -1)
        for layers in (spec.target_layers, [-1, -2, 1], range(5), [1, "norm", 3, 3, 0, 4]):
            spec.target.memory.clear()
            found = features(spec, tokens, layers)
            assert found.dtype == np.float32
            assert found.shape == (12, 3 * 64)
            assert np.abs(found - expected).max() < 1e-5
            spec.encode(found)
    with mtp_spec(tmp_path) as tested:
        spec = tested.spec
        (layer,) = spec.target_layers
        with lt.Extractor(spec.target.model, **EXACT) as extractor:
            expected = extractor(tokens, [layer]).array[:, 0]
        assert np.abs(features(spec, tokens, [-1]) - expected).max() < 1e-5


def test_states_that_a_drafter_needs_are_asked_for(tmp_path: Path) -> None:
    with eagle3_spec(tmp_path) as tested:
        spec = tested.spec
        drafter, batch = lt.Eagle3Drafter(spec), lt.Batch.of([5])
        with pytest.raises(lt.InvalidInputError, match=r"with context.tap\(layers=\[1, 2, 3\]\)"):
            drafter.process(batch)
        calls: list[tuple[Any, dict[str, Any], str]] = [
            ([1, 2], {}, r"\[1, 2, 3\].*\[1, 2\]"),
            ([0, 4, "norm"], {}, "'norm'"),
            (range(5), {"rows": "outputs"}, "of 1 tokens, but the batch has 2"),
            (range(5), {"dtype": "float16"}, "float16"),
            (range(5), {"dtype": "bfloat16"}, "bfloat16"),
        ]
        for layers, options, words in calls:
            spec.target.memory.clear()
            batch = lt.Batch.of([5, 6])
            with spec.target.tap(layers, **options) as tap:
                spec.target.decode(batch)
            with pytest.raises(lt.InvalidInputError, match=words):
                drafter.process(batch, tap.states)
        # The states of a batch whose entries all are outputs are of all rows.
        spec.target.memory.clear()
        batch = lt.Batch.of([5])
        with spec.target.tap(range(5), rows="outputs") as tap:
            spec.target.decode(batch)
        drafter.process(batch, tap.states)


def test_a_decode_that_failed_leaves_no_states(tmp_path: Path) -> None:
    with eagle3_spec(tmp_path) as tested:
        spec = tested.spec
        with spec.target.tap(spec.target_layers) as tap:
            spec.target.decode(lt.Batch.of([5, 6]))
            with pytest.raises(lt.InvalidInputError):
                spec.target.decode(lt.Batch.of([5, 6]))
            with pytest.raises(lt.InvalidInputError, match="decode"):
                tap.states  # noqa: B018


def test_a_context_of_its_own_number_of_sequences(tmp_path: Path, rng: np.random.Generator) -> None:
    target = TinyLlama().write(tmp_path / "target.gguf")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf")
    with beside(target, draft) as spec:
        assert (spec.n_seq_max, spec.n_ctx) == (4, 1024)
    with beside(target, draft, n_seq_max=2, n_ctx=300) as spec:
        assert (spec.n_seq_max, spec.n_ctx) == (2, 512)
        state = rng.standard_normal((1, 64)).astype(np.float32)
        spec.decode([5], state, [0], 1)
        with pytest.raises(lt.InvalidInputError, match=r"0\.\.1"):
            spec.decode([5], state, [0], 2)
    with beside(target, draft, n_seq_max=40, n_ubatch=8) as spec:
        spec.decode([5] * 40, np.repeat(state, 40, axis=0), [0] * 40, range(40))
        assert spans(spec) == [(0, 0)] * 40


@pytest.mark.parametrize("window", [0, 8])
def test_positions_are_moved_where_the_engine_can(window: int, tmp_path: Path) -> None:
    path = drafters.write_mimo2(tmp_path / "mtp.gguf", window=window)
    with (
        lt.Model(path, load_mtp=True) as model,
        model.context(n_ctx=256, **EXACT) as context,
        lt.SpeculativeContext(context, model, **EXACT) as spec,
    ):
        spec.decode([5, 6], np.ones((2, 64), np.float32), [0, 1])
        # Of the two caches that the engine makes for this architecture, one has no layer.
        with pytest.raises(lt.UnsupportedError, match="cannot move positions"):
            spec.memory.shift(0, None, None, 5)
        assert spec.memory.last(0) == 1
