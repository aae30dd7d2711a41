"""Sequences that share cells of a KV cache, against a plain cache written in Python.

Also: what an empty sequence leaves behind, and copies of recurrent state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, relative
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35

import llamatap as lt
from llamatap._native import native_of
from llamatap.storage import saved_sequences
from reference import decoder


class RefusedError(Exception):
    """The plain cache refuses the operation."""


@dataclass
class Cell:
    position: int
    token: int
    sequences: set[int]


@dataclass
class PlainCache:
    """A KV cache as a list of cells: position, token, and the sequences that hold it."""

    unified: bool
    n_seqs: int
    cells: list[Cell] = field(default_factory=list)

    def of(self, seq: int) -> list[Cell]:
        """The cells of a sequence by rising position."""
        return sorted((one for one in self.cells if seq in one.sequences), key=lambda one: one.position)

    def pairs(self, seq: int) -> list[tuple[int, int]]:
        return [(one.position, one.token) for one in self.of(seq)]

    def last(self, seq: int) -> int:
        return max((one.position for one in self.of(seq)), default=-1)

    def first(self, seq: int) -> int:
        return min((one.position for one in self.of(seq)), default=-1)

    def add(self, token: int, position: int, seqs: Sequence[int]) -> None:
        self.cells.append(Cell(position, token, set(seqs)))

    def within(self, seq: int, p0: int | None, p1: int | None) -> list[Cell]:
        begin, end = p0 or 0, 2**31 if p1 is None else p1
        return [one for one in self.of(seq) if begin <= one.position < end]

    def remove(self, seq: int, p0: int | None = None, p1: int | None = None) -> None:
        for cell in self.within(seq, p0, p1):
            cell.sequences.remove(seq)
        self.cells = [one for one in self.cells if one.sequences]

    def copy(self, source: int, target: int, p0: int | None, p1: int | None) -> None:
        if source == target or (p0 or 0) == p1:
            return
        part = self.within(source, p0, p1)
        whole = len(part) == len(self.of(source))
        if not whole and not self.unified:
            raise RefusedError
        self.remove(target, None if whole else p0, None if whole else p1)
        for cell in part:
            if self.unified:
                cell.sequences.add(target)
            else:
                self.add(cell.token, cell.position, [target])

    def keep(self, seq: int) -> None:
        for other in range(self.n_seqs):
            if other != seq:
                self.remove(other)

    def shift(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        moved = self.within(seq, p0, p1)
        if any(one.position + delta < 0 for one in moved):
            raise RefusedError
        for cell in moved:
            cell.position += delta
        for other in range(self.n_seqs):
            if len({one.position for one in self.of(other)}) < len(self.of(other)):
                for cell in moved:
                    cell.position -= delta
                raise RefusedError

    def restore(self, seq: int, pairs: list[tuple[int, int]]) -> None:
        self.remove(seq)
        for position, token in pairs:
            self.add(token, position, [seq])


def last_block_only(tiny: TinyLlama) -> TinyLlama:
    """Change the model so that only its last block adds to the stream.

    What the cache holds for a token then depends on the token and its position alone.
    """
    for i in range(tiny.n_layer - 1):
        for name in ("attn_output", "ffn_down"):
            tiny.weights[f"blk.{i}.{name}.weight"][:] = 0
    return tiny


def logits_after(tiny: TinyLlama, pairs: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """The logits of the last of these (position, token) pairs, by the formulas."""
    positions, tokens = np.array(pairs).T
    logits: NDArray[np.float64] = decoder.forward(
        tiny.shape(), tiny.weights, tiny.entering(tokens), positions
    )[2][-1]
    return logits


MODELS: dict[str, Callable[[], TinyLlama]] = {
    "llama": lambda: last_block_only(TinyLlama(n_layer=1)),
    "gemma3, a window last": lambda: last_block_only(TinyGemma3(n_layer=7)),
    "gemma3, all seen last": lambda: last_block_only(TinyGemma3(n_layer=6)),
}
N_SEQS = 4


@pytest.fixture(scope="module", params=list(MODELS))
def tiny_and_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TinyLlama, lt.Model]]:
    tiny = MODELS[request.param]()
    with lt.Model(tiny.write(tmp_path_factory.mktemp("shared") / "tiny.gguf")) as model:
        yield tiny, model


class Walk:
    """Random operations on a context and on the plain cache, compared after each."""

    def __init__(self, tiny: TinyLlama, context: lt.Context, seed: int) -> None:
        self.tiny, self.context = tiny, context
        self.rng = np.random.default_rng(seed)
        self.plain = PlainCache(context.kv_unified, N_SEQS)
        self.saved: list[tuple[bytes, list[tuple[int, int]]]] = []
        self.windowed = isinstance(tiny, TinyGemma3)
        self.done: list[str] = []
        self.n_refused = 0

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def range(self, seq: int) -> tuple[int | None, int | None]:
        """A random range: often one that cuts the sequence, often an open one."""
        bounds = sorted(self.number(0, self.plain.last(seq) + 3) for _ in range(2))
        return (
            None if self.rng.random() < 0.3 else bounds[0],
            None if self.rng.random() < 0.4 else bounds[1],
        )

    def both(self, name: str, plain: Callable[[], object], ours: Callable[[], object]) -> None:
        self.done.append(name)
        try:
            plain()
        except RefusedError:
            with pytest.raises((lt.InvalidInputError, lt.UnsupportedError)):
                ours()
            return
        ours()

    def change(self, name: str, *arguments: int | None) -> None:
        before = [Cell(one.position, one.token, set(one.sequences)) for one in self.plain.cells]
        self.done.append(f"{name}{arguments}")
        try:
            getattr(self.plain, name)(*arguments)
        except RefusedError:
            with pytest.raises((lt.InvalidInputError, lt.UnsupportedError)):
                getattr(self.context.memory, name)(*arguments)
            return
        try:
            getattr(self.context.memory, name)(*arguments)
        except lt.UnsupportedError:
            # Only sliding windows may have dropped needed cells.
            assert self.windowed
            self.n_refused += 1
            self.plain.cells = before

    def decode(self) -> None:
        first = self.number(0, N_SEQS)
        position = self.plain.last(first) + 1 if self.plain.of(first) else self.number(0, 4)
        # An entry of several sequences sees what one of them holds, whichever that is.
        alike = [
            seq
            for seq in range(N_SEQS)
            if seq != first
            and self.plain.pairs(seq) == self.plain.pairs(first)
            and self.context.memory.first(seq) == self.context.memory.first(first)
        ]
        seqs = [first]
        if self.plain.unified:
            seqs += [seq for seq in alike if self.rng.random() < 0.5]
        batch = lt.Batch()
        for i in range(self.number(1, 6)):
            token = self.number(3, self.tiny.n_vocab)
            self.plain.add(token, position + i, seqs)
            batch.add(token, position + i, seqs, True)
        self.done.append(f"decode {len(batch)} tokens at {position} of {seqs}")
        self.context.decode(batch)
        found = self.context.logits()
        expected = logits_after(self.tiny, self.plain.pairs(first))
        assert relative(found, expected) < 2e-4, self.story()

    def save(self) -> None:
        seq = self.number(0, N_SEQS)
        self.saved.append((self.context.save(seq), self.plain.pairs(seq)))

    def restore(self) -> None:
        if self.saved:
            state, pairs = self.saved[self.number(0, len(self.saved))]
            seq = self.number(0, N_SEQS)
            self.done.append(f"restore {len(pairs)} tokens as {seq}")
            self.context.restore(seq, state)
            self.plain.restore(seq, pairs)

    def step(self) -> None:
        kind = self.rng.choice(
            ["decode", "remove", "copy", "shift", "keep", "save", "restore"],
            p=[0.42, 0.16, 0.14, 0.16, 0.01, 0.06, 0.05],
        )
        seq = self.number(0, N_SEQS)
        if kind == "decode":
            self.decode()
        elif kind == "remove":
            self.change("remove", seq, *self.range(seq))
        elif kind == "copy":
            self.change("copy", seq, self.number(0, N_SEQS), *self.range(seq))
        elif kind == "shift":
            self.change("shift", seq, *self.range(seq), self.number(-6, 9))
        elif kind == "keep":
            self.change("keep", seq)
        elif kind == "save":
            self.save()
        else:
            self.restore()
        self.compare()

    def compare(self) -> None:
        for seq in range(N_SEQS):
            assert self.context.memory.last(seq) == self.plain.last(seq), self.story()
            # In layers with windows the first ones may be gone.
            first = self.context.memory.first(seq)
            assert first == self.plain.first(seq) or (self.windowed and first > 0), self.story()
        if len(self.plain.cells) > 180:
            self.context.memory.clear()
            self.plain.cells.clear()

    def story(self) -> str:
        return "\n".join(self.done[-30:])


@pytest.mark.fuzz
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("seed", range(3))
def test_a_memory_is_what_a_plain_cache_is(
    tiny_and_model: tuple[TinyLlama, lt.Model], unified: bool, seed: int
) -> None:
    """First and last positions, what can be removed, copied and moved, and the logits of what comes next."""
    tiny, model = tiny_and_model
    # Room for all in each stream.
    n_ctx = 256 if unified else 256 * N_SEQS
    with model.context(n_ctx=n_ctx, n_seq_max=N_SEQS, kv_unified=unified, **EXACT) as context:
        walk = Walk(tiny, context, seed)
        n_steps = 400
        for _ in range(n_steps):
            walk.step()
        assert walk.n_refused < n_steps / 20


@pytest.fixture(scope="module", params=[TinyLlama, TinyGemma3, TinyQwen35], ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    with lt.Model(request.param().write(tmp_path_factory.mktemp("memory") / "tiny.gguf")) as model:
        yield model


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_an_empty_sequence_that_was_restored_holds_nothing(model: lt.Model, unified: bool) -> None:
    with model.context(n_ctx=512, n_seq_max=2, kv_unified=unified, **EXACT) as context:
        context.restore(0, context.save(0))
        assert (context.memory.first(0), context.memory.last(0)) == (-1, -1)
        context.memory.copy(0, 1)
        context.decode(lt.Batch.of([5, 6, 7]))
        context.memory.copy(0, 1)
        assert context.memory.last(1) == 2
        if not (native_of(model).is_recurrent or native_of(model).is_hybrid):
            context.memory.remove(0, 2)
            context.memory.remove(1, 1)
            assert (context.memory.last(0), context.memory.last(1)) == (1, 0)
        else:
            context.memory.remove(0, 0, 3)
            assert (context.memory.last(0), context.memory.last(1)) == (-1, 2)


@pytest.mark.parametrize(
    "name", ["gemma2-dense", "gpt-oss-moe", "cohere2-dense", "jamba-dense", "mamba-dense"]
)
def test_architectures_with_an_empty_sequence_restored(arch_models: Path, name: str) -> None:
    path = arch_models / f"{name}.gguf"
    with lt.Model(path) as model, model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        context.restore(1, context.save(0))
        context.decode(lt.Batch.of([5, 6, 7], seq=1))
        if native_of(model).n_swa > 0:
            context.memory.remove(1, 2)
            assert context.memory.last(1) == 1
        context.memory.copy(1, 0)
        context.memory.remove(1, 0, 3)
        assert (context.memory.last(0), context.memory.last(1)) == (2 - (native_of(model).n_swa > 0), -1)


def test_moving_a_sequence_moves_what_others_share(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256, n_seq_max=3) as context:
        memory = context.memory
        context.decode(lt.Batch.of([5, 6, 7, 8]))
        memory.copy(0, 1)
        memory.shift(0, None, None, 10)
        memory.remove(1, 12)
        assert (memory.last(0), memory.last(1)) == (13, 11)
        memory.clear()
        context.decode(lt.Batch.of([5, 6, 7, 8]))
        memory.copy(0, 1)
        context.decode(lt.Batch.of([9, 10], seq=1, pos0=4))
        with pytest.raises(lt.InvalidInputError, match=r"sequence 1 .* \(4; it shares .* sequence 0\)"):
            memory.shift(0, None, None, 4)
        assert [(memory.first(seq), memory.last(seq)) for seq in (0, 1)] == [(0, 3), (0, 5)]


def test_a_full_cache_counts_shared_tokens_once(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256, n_seq_max=2) as context:
        context.decode(lt.Batch.of([5] * 200))
        context.memory.copy(0, 1)
        with pytest.raises(lt.ContextFullError, match=r"room for 256 tokens.*hold 200 .*brings 57"):
            context.decode(lt.Batch.of([6] * 57, pos0=200))
        context.decode(lt.Batch.of([6] * 56, pos0=200))


@pytest.fixture
def qwen35(tmp_path: Path) -> Iterator[lt.Model]:
    with lt.Model(TinyQwen35().write(tmp_path / "qwen35.gguf")) as model:
        yield model


def after(context: lt.Context, token: int, position: int, seq: int) -> NDArray[np.float32]:
    context.decode(lt.Batch.of([token], seq=seq, pos0=position))
    return context.logits()


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_a_copy_of_recurrent_state_is_of_what_is_left(
    qwen35: lt.Model, unified: bool, rng: np.random.Generator
) -> None:
    """Tokens that were taken back are in no copy, and tokens taken back later stay in it."""
    tokens = rng.integers(3, qwen35.n_vocab, 24).tolist()
    options = {"n_ctx": 512, "n_seq_max": 2, "n_rs_seq": 4, "kv_unified": unified, **EXACT}
    with qwen35.context(**options) as context:
        context.decode(lt.Batch.of(tokens[:20]))
        expected_20 = after(context, tokens[20], 20, 0)
        context.memory.clear()
        context.decode(lt.Batch.of(tokens[:23]))
        expected_23 = after(context, tokens[23], 23, 0)
        assert relative(expected_20, expected_23) > 0.05

        context.memory.clear()
        context.decode(lt.Batch.of(tokens[:23]))
        context.memory.remove(0, 20)
        context.memory.copy(0, 1)
        assert relative(after(context, tokens[20], 20, 1), expected_20) < 1e-5
        assert relative(after(context, tokens[20], 20, 0), expected_20) < 1e-5

        context.memory.clear()
        context.decode(lt.Batch.of(tokens[:23]))
        context.memory.copy(0, 1)
        context.memory.remove(0, 20)
        assert (context.memory.last(0), context.memory.last(1)) == (19, 22)
        assert relative(after(context, tokens[23], 23, 1), expected_23) < 1e-5
        assert relative(after(context, tokens[20], 20, 0), expected_20) < 1e-5


def test_recurrent_state_moves_as_a_whole_and_alone(arch_models: Path) -> None:
    with (
        lt.Model(arch_models / "jamba-dense.gguf") as model,
        model.context(n_ctx=256, n_seq_max=2, **EXACT) as context,
    ):
        memory = context.memory
        context.decode(lt.Batch.of([5, 6, 7, 8]))
        with pytest.raises(lt.UnsupportedError, match="whole sequence"):
            memory.shift(0, 2, None, 3)
        memory.copy(0, 1)
        with pytest.raises(lt.UnsupportedError, match="shares nothing"):
            memory.shift(0, None, None, 3)
        memory.remove(1)
        memory.shift(0, None, None, 3)
        assert memory.last(0) == 6


def test_a_failing_restore_takes_back_nothing_of_others(tiny_model: lt.Model) -> None:
    """Decodes of another thread come before or after it, or get BusyError."""
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        context.decode(lt.Batch.of([5, 6, 7]))
        # Valid as far as llamatap checks: only the engine finds that it does not fit.
        broken = saved_sequences.pack(context._fingerprint(), b"\1\0\0\0" + b"\xff" * 64)
        n_decoded = 3
        stop = threading.Event()
        wrong: list[BaseException] = []

        def spoil() -> None:
            while not stop.is_set():
                try:
                    with contextlib.suppress(lt.BusyError):
                        context.restore(0, broken)
                        raise AssertionError("a broken state was restored")
                except lt.InvalidInputError:  # noqa: PERF203
                    continue
                except BaseException as error:
                    wrong.append(error)
                    return

        thread = threading.Thread(target=spoil)
        thread.start()
        tokens = [5, 6, 7]
        for attempt in range(3000):
            if n_decoded == 200:
                break
            with contextlib.suppress(lt.BusyError):
                context.decode(lt.Batch.of([3 + attempt % 250], pos0=n_decoded))
                tokens.append(3 + attempt % 250)
                n_decoded += 1
        stop.set()
        thread.join()
        assert not wrong
        assert context.memory.last(0) == n_decoded - 1
        found = after(context, 9, n_decoded, 0)
        context.memory.clear()
        context.decode(lt.Batch.of(tokens))
        assert relative(found, after(context, 9, n_decoded, 0)) < 1e-5
