from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT, random_tokens, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.context_options import ContextOptions


def decoded(model: lt.Model, tokens: list[int], **options: Any) -> lt.Context:
    context = model.context(**{"n_ctx": 256, **EXACT, **options})
    context.decode(lt.Batch.of(tokens))
    return context


def last_logits(model: lt.Model, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    with decoded(model, tokens) as context:
        return context.logits()


def test_memory_remove_copy_keep_shift(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, tiny_model, 12).tolist()
    with decoded(tiny_model, tokens, n_seq_max=3) as context:
        memory = context.memory
        assert (memory.first(0), memory.last(0), memory.last(1)) == (0, 11, -1)
        memory.remove(0, 8)
        assert memory.last(0) == 7
        context.decode(lt.Batch.of(tokens[8:], pos0=8))
        assert relative(context.logits(), last_logits(tiny_model, tokens)) < 1e-5
        memory.copy(0, 1)
        memory.remove(0)
        assert (memory.last(0), memory.last(1)) == (-1, 11)
        context.decode(lt.Batch.of([9], seq=1, pos0=12))
        assert relative(context.logits(), last_logits(tiny_model, [*tokens, 9])) < 1e-5
        memory.copy(1, 2, 0, 4)
        assert memory.last(2) == 3
        memory.keep(2)
        assert (memory.last(1), memory.last(2)) == (-1, 3)
        memory.remove(2, 0, 2)
        context.decode(lt.Batch.of([9], seq=2, pos0=4))
        expected = context.logits()
        memory.remove(2, 4)
        memory.shift(2, None, None, -2)
        assert (memory.first(2), memory.last(2)) == (0, 1)
        # Positions are relative in a rotary model.
        context.decode(lt.Batch.of([9], seq=2, pos0=2))
        assert relative(context.logits(), expected) < 1e-5
        memory.clear()
        assert [memory.last(seq) for seq in range(3)] == [-1, -1, -1]


def test_memory_does_not_mix_what_is_there_with_what_comes(
    tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, tiny_model, 12).tolist()
    with decoded(tiny_model, tokens, n_seq_max=2) as context:
        memory = context.memory
        context.decode(lt.Batch.of(tokens[:3], seq=1))
        # A copy replaces what is there.
        memory.copy(0, 1)
        assert (memory.first(1), memory.last(1)) == (0, 11)
        context.decode(lt.Batch.of([9], pos0=12, seq=1))
        assert relative(context.logits(), last_logits(tiny_model, [*tokens, 9])) < 1e-5
        for p0, p1, delta in ((5, None, -3), (0, 5, 6), (3, 6, 1)):
            with pytest.raises(lt.InvalidInputError, match="that others hold"):
                memory.shift(0, p0, p1, delta)
        with pytest.raises(lt.InvalidInputError, match="outside of"):
            memory.shift(0, 2, 4, -3)
        context.decode(lt.Batch.of([7], pos0=12))
        assert relative(context.logits(), last_logits(tiny_model, [*tokens, 7])) < 1e-5
        # Positions may move into a gap that all sequences sharing them have.
        memory.remove(0, 4, 8)
        with pytest.raises(lt.InvalidInputError, match="sequence 1 on positions that others hold"):
            memory.shift(0, 8, None, -4)
        memory.remove(1, 4, 8)
        memory.shift(0, 8, None, -4)
        assert memory.last(1) == 12
        assert (memory.first(0), memory.last(0)) == (0, 8)
        with pytest.raises(lt.InvalidInputError, match="that others hold"):
            memory.shift(0, 5, None, -1)


def test_positions_move_after_a_decode_that_ended_early(
    tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, tiny_model, 12).tolist()
    batch = lt.Batch()
    for position, token in enumerate(tokens):
        batch.add(token, position)  # no output: with a tap of H_n the head is left out
    logits = []
    for tapped in (False, True):
        with tiny_model.context(n_ctx=256, **EXACT) as context:
            if tapped:
                with context.tap([-1]):
                    context.decode(batch)
            else:
                context.decode(batch)
            context.memory.remove(0, 0, 4)
            context.memory.shift(0, None, None, -4)
            context.decode(lt.Batch.of([9], pos0=8))
            logits.append(context.logits())
    assert relative(logits[1], logits[0]) < 1e-6


def test_a_context_lives_on_when_its_model_is_closed(tiny_path: Path, rng: np.random.Generator) -> None:
    model = lt.Model(tiny_path)
    tokens = random_tokens(rng, model, 9).tolist()
    expected = lt.extract(model, tokens, layers=[2]).array
    with model.context(n_ctx=256) as context:
        model.close()
        with context.tap([2]) as tap:
            context.decode(lt.Batch.of(tokens))
            assert relative(tap.states.array, expected) < 1e-3
        context.restore(0, context.save(0))


def test_the_state_of_another_model_of_this_shape_is_refused(tiny_model: lt.Model, tmp_path: Path) -> None:
    with (
        lt.Model(TinyLlama(seed=1).write(tmp_path / "other.gguf")) as other,
        other.context(n_ctx=256) as context,
        tiny_model.context(n_ctx=256) as target,
    ):
        context.decode(lt.Batch.of([1, 2, 3]))
        with pytest.raises(lt.InvalidInputError, match="weights"):
            target.restore(0, context.save(0))


def test_options_in_the_provenance_and_in_the_header_of_saved_sequences(tiny_model: lt.Model) -> None:
    options: ContextOptions = {
        "n_ctx": 256,
        "type_k": "f32",
        "flash_attn": False,
        "kv_unified": False,
        "swa_full": False,
    }
    with tiny_model.context(**options) as context:
        batch = lt.Batch.of([1, 2, 3])
        with context.tap() as tap:
            context.decode(batch)
        header = context.save(0)
        last = list(tap.states.provenance)[9:13]
    assert last == ["type_k", "type_v", "flash_attention", "layers"]
    assert tap.states.provenance["type_k"] == "f32"
    assert tap.states.provenance["flash_attention"] is False
    recorded = {name: value for name, value in options.items() if name != "n_ctx"}
    start = header.index(b"{")
    found = json.JSONDecoder().raw_decode(header[start : header.index(b"}") + 1].decode())[0]
    names = "arch file_type n_layer n_embd weights converted_to engine " + " ".join([*recorded, "type_v"])
    assert list(found) == sorted(names.split())
    assert {name: found[name] for name in recorded} == recorded
    assert found["type_v"] == "f16"


def test_save_and_restore_in_any_order_and_elsewhere(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    first = random_tokens(rng, tiny_model, 10).tolist()
    second = random_tokens(rng, tiny_model, 17).tolist()
    expected = [last_logits(tiny_model, [*tokens, 7]) for tokens in (first, second)]
    with tiny_model.context(n_ctx=512, n_seq_max=4, **EXACT) as context:
        context.decode(lt.Batch.of(first, seq=0))
        context.decode(lt.Batch.of(second, seq=1))
        saved = [context.save(0), context.save(1)]
    with tiny_model.context(n_ctx=512, n_seq_max=4, **EXACT) as other:
        for tokens, state, logits, seq in zip(
            (second, first), saved[::-1], expected[::-1], (3, 0), strict=True
        ):
            other.restore(seq, state)
            assert other.memory.last(seq) == len(tokens) - 1
            other.decode(lt.Batch.of([7], seq=seq, pos0=len(tokens)))
            assert relative(other.logits(), logits) < 1e-5


def test_a_truncated_changed_or_foreign_state_raises(tiny_model: lt.Model, smollm2: lt.Model) -> None:
    with decoded(tiny_model, [5, 6, 7]) as context:
        state = context.save(0)
        damaged = bytearray(state)
        damaged[-5] ^= 1
        for bad in (b"", b"x" * 100, state[:-1], state[:20], state + b"x", bytes(damaged)):
            with pytest.raises(lt.InvalidInputError):
                context.restore(0, bad)
        with (
            smollm2.context(n_ctx=256) as other,
            pytest.raises(lt.InvalidInputError, match="does not match this context"),
        ):
            other.restore(0, state)
        with tiny_model.context(n_ctx=256) as half, pytest.raises(lt.InvalidInputError, match="type_k"):
            half.restore(0, state)
        assert context.memory.last(0) == 2


def test_a_state_that_does_not_fit_leaves_the_sequence(tiny_model: lt.Model) -> None:
    with decoded(tiny_model, [5] * 600, n_ctx=1024) as large, decoded(tiny_model, [7, 8, 9]) as small:
        with pytest.raises(lt.InvalidInputError, match="fit"):
            small.restore(0, large.save(0))
        assert small.memory.last(0) == 2
        small.decode(lt.Batch.of([5], pos0=3))
        assert relative(small.logits(), last_logits(tiny_model, [7, 8, 9, 5])) < 1e-5


def test_keep_in_a_cache_that_is_not_unified(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=1024, n_seq_max=4, kv_unified=False) as context:
        for seq in range(4):
            context.decode(lt.Batch.of([5, 6], seq=seq))
        context.memory.keep(1)
        assert [context.memory.last(seq) for seq in range(4)] == [-1, 1, -1, -1]


def test_a_moved_sequence_goes_on_as_if_it_had_been_there(tiny_model: lt.Model) -> None:
    """In a rotary model only distances count."""
    with decoded(tiny_model, [5, 6, 7, 8]) as context:
        context.memory.shift(0, None, None, 10)
        assert (context.memory.first(0), context.memory.last(0)) == (10, 13)
        context.decode(lt.Batch.of([9], pos0=14))
        assert relative(context.logits(), last_logits(tiny_model, [5, 6, 7, 8, 9])) < 1e-4
        for delta in (2**31 - 1, -15):
            with pytest.raises(lt.InvalidInputError, match="outside"):
                context.memory.shift(0, None, None, delta)
        assert context.memory.last(0) == 14


def test_more_sequences_than_tokens_of_a_batch(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=4, n_batch=4, n_seq_max=8, **EXACT) as context:
        assert context.n_batch >= 8
        context.decode(lt.Batch.of([5, 6], seq=7))
        assert relative(context.logits(), last_logits(tiny_model, [5, 6])) < 1e-5


def test_n_fits_and_one_more_raises_with_both_numbers(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        context.decode(lt.Batch.of([5] * 250))
        with pytest.raises(lt.ContextFullError, match=r"256.*250.*7"):
            context.decode(lt.Batch.of([5] * 7, pos0=250))
        assert context.memory.last(0) == 249
        with pytest.raises(lt.InvalidInputError, match="no logits"):
            context.logits()
        context.decode(lt.Batch.of([5] * 6, pos0=250))
        assert context.memory.last(0) == 255
        assert relative(context.logits(), last_logits(tiny_model, [5] * 256)) < 1e-5


def test_a_batch_that_overflows_halfway_leaves_the_memory_as_it_was(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256, n_batch=32, **EXACT) as context:
        context.decode(lt.Batch.of([5] * 100))
        with pytest.raises(lt.ContextFullError):
            context.decode(lt.Batch.of([6] * 200, pos0=100))
        assert context.memory.last(0) == 99
        context.decode(lt.Batch.of([7], pos0=100))
        assert relative(context.logits(), last_logits(tiny_model, [5] * 100 + [7])) < 1e-5


def bad_batches() -> dict[str, lt.Batch]:
    def batch(*entries: tuple[Any, ...]) -> lt.Batch:
        result = lt.Batch()
        for entry in entries:
            result.add(*entry)
        return result

    wide = lt.Batch(n_embd=32)
    wide.add_embedding(np.zeros(32, np.float32), 0)
    return {
        "empty": lt.Batch(),
        "token": batch((259, 0)),
        "negative token": batch((-1, 0)),
        "position": batch((5, -1)),
        "sequence": batch((5, 0, 2)),
        "negative sequence": batch((5, 0, -1)),
        "no sequence": batch((5, 0, [])),
        "gap": batch((5, 0), (5, 2)),
        "twice": batch((5, 0), (5, 0)),
        "width": wide,
    }


@pytest.mark.parametrize("kind", list(bad_batches()))
def test_a_wrong_batch_raises_and_changes_nothing(tiny_model: lt.Model, kind: str) -> None:
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        with pytest.raises(lt.InvalidInputError):
            context.decode(bad_batches()[kind])
        assert context.memory.last(0) == -1
        context.decode(lt.Batch.of([5, 6]))
        assert relative(context.logits(), last_logits(tiny_model, [5, 6])) < 1e-5


def test_wrong_entries_raise() -> None:
    batch = lt.Batch()
    for wrong in (2**31, -(2**40)):
        with pytest.raises(lt.InvalidInputError, match="32 bits"):
            batch.add(wrong, 0)
        with pytest.raises(lt.InvalidInputError, match="32 bits"):
            batch.add(0, wrong)
    with pytest.raises(lt.InvalidInputError, match="twice"):
        batch.add(5, 0, [1, 1])
    with pytest.raises(lt.InvalidInputError, match="tokens"):
        batch.add_embedding(np.zeros(0, np.float32), 0)
    embeddings = lt.Batch(n_embd=4)
    with pytest.raises(lt.InvalidInputError, match="embeddings"):
        embeddings.add(5, 0)
    with pytest.raises(lt.InvalidInputError, match="4"):
        embeddings.add_embedding(np.zeros(5, np.float32), 0)
    with pytest.raises(TypeError):
        embeddings.add_embedding(np.zeros(4, np.float64), 0)
    assert (len(batch), len(embeddings)) == (0, 0)


def test_a_batch_is_what_was_put_into_it() -> None:
    batch = lt.Batch.of([5, 6, 7], seq=2, pos0=10)
    batch.add(8, 0, [0, 1], output=True)
    assert batch.tokens.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [10, 11, 12, 0]
    assert batch.sequences == [[2], [2], [2], [0, 1]]
    assert batch.outputs == [False, False, True, True]
    batch.clear()
    assert len(batch) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"n_batch": 0},
        {"n_ubatch": 0},
        {"n_seq_max": 0},
        {"n_seq_max": 257},
        {"n_ctx": -1},
        {"n_ctx": 2**31},
        {"n_ctx": 1.5},
        {"n_threads": 0},
        {"n_threads": 513},
        {"type_k": "q6_K"},
        {"type_v": "float16"},
        {"n_seq_max": 4, "n_outputs_max": 2},
    ],
)
def test_wrong_options_raise(tiny_model: lt.Model, options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError):
        tiny_model.context(**options)


def test_an_impossible_context_raises_with_the_engines_words(tiny_model: lt.Model) -> None:
    with pytest.raises(lt.UnsupportedError, match="flash_attn"):
        tiny_model.context(n_ctx=256, type_v="q8_0", flash_attn=False)


def test_more_threads_than_cpus_get_a_warning(tiny_model: lt.Model) -> None:
    with pytest.warns(RuntimeWarning, match="n_threads=500 is more than the"):
        tiny_model.context(n_ctx=256, n_threads=500).close()


def test_memory_arguments_are_checked(tiny_model: lt.Model) -> None:
    with decoded(tiny_model, [5, 6, 7], n_seq_max=2, kv_unified=False) as context:
        memory = context.memory
        for call in (
            lambda: memory.remove(2),
            lambda: memory.remove(-1),
            lambda: memory.remove(0, -5),
            lambda: memory.remove(0, 3, 1),
            lambda: memory.copy(0, 5),
            lambda: memory.keep(9),
            lambda: memory.last(7),
            lambda: memory.shift(0, 0, None, -1),
            lambda: context.save(3),
        ):
            with pytest.raises(lt.InvalidInputError):
                call()
        with pytest.raises(lt.UnsupportedError, match="whole"):
            memory.copy(0, 1, 0, 2)
        assert memory.last(0) == 2


def test_use_after_close_raises(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    context = model.context(n_ctx=256)
    context.decode(lt.Batch.of([5]))
    model.close()
    # The context holds what it needs of the model.
    context.decode(lt.Batch.of([6], pos0=1))
    context.close()
    context.close()
    model.close()
    assert context.closed
    assert model.closed
    assert "closed" in repr(context)
    assert "closed" in repr(model)
    for call in (
        lambda: context.decode(lt.Batch.of([5])),
        lambda: context.logits(),
        lambda: context.memory.clear(),
        lambda: context.n_ctx,
        lambda: context.tap([1]).__enter__(),
        lambda: lt.extract(context, [5], [1]),
        lambda: model.context(),
        lambda: model.tokenize("x"),
        lambda: model.n_layer,
        lambda: lt.extract(model, [5], [1]),
    ):
        with pytest.raises(lt.ClosedError):
            call()


@pytest.mark.usefixtures("without_gc")
def test_a_second_thread_gets_busy_and_the_gil_is_free(smollm2: lt.Model) -> None:
    with smollm2.context(n_ctx=2048) as context:
        beats = []
        errors: list[BaseException] = []
        running = threading.Event()

        def work() -> None:
            running.set()
            context.decode(lt.Batch.of([5] * 1024))

        thread = threading.Thread(target=work)
        thread.start()
        running.wait()
        time.sleep(0.05)
        while thread.is_alive():
            beats.append(time.perf_counter())
            try:
                context.memory.last(0)
            except lt.BusyError as error:
                errors.append(error)
            time.sleep(0.002)
        thread.join()
        assert errors
        assert isinstance(errors[0], RuntimeError)
        assert max(np.diff(beats)) < 0.5
        assert context.memory.last(0) == 1023


@pytest.mark.slow
def test_threads_that_fight_over_a_context_get_errors_of_ours(tiny_model: lt.Model) -> None:
    stop = threading.Event()
    wrong: list[BaseException] = []
    with tiny_model.context(n_ctx=512) as context:

        def spin() -> None:
            while not stop.is_set():
                try:
                    with contextlib.suppress(lt.BusyError):
                        context.memory.last(0)
                except BaseException as error:  # noqa: PERF203
                    wrong.append(error)

        threads = [threading.Thread(target=spin) for _ in range(2)]
        for thread in threads:
            thread.start()
        end = time.perf_counter() + 3
        while time.perf_counter() < end:
            with contextlib.suppress(lt.BusyError):
                lt.extract(context, [5, 6, 7, 8] * 4, [-2])
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(lt.extract(context, [5, 6], [1])) == 2


def test_sampler(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    logits = rng.standard_normal(tiny_model.n_vocab).astype(np.float32) * 3
    order = np.argsort(-logits)
    assert lt.Sampler(tiny_model).sample_logits(logits) == order[0]

    def draws(count: int = 4000, **options: Any) -> np.ndarray[Any, Any]:
        sampler = lt.Sampler(tiny_model, seed=7, **options)
        drawn = [sampler.sample_logits(logits) for _ in range(count)]
        sampler.reset()
        assert [sampler.sample_logits(logits) for _ in range(50)] == drawn[:50]
        return np.bincount(drawn, minlength=tiny_model.n_vocab) / count

    scaled = np.exp((logits - logits.max()).astype(np.float64) / 0.8)
    expected = scaled / scaled.sum()
    assert abs(draws(temperature=0.8) - expected).max() < 0.03
    top = draws(temperature=0.8, top_k=3)
    assert set(np.flatnonzero(top)) == set(order[:3])
    assert abs(top[order[:3]] - scaled[order[:3]] / scaled[order[:3]].sum()).max() < 0.03
    plain = np.exp((logits - logits.max()).astype(np.float64))
    plain /= plain.sum()
    nucleus = order[: int(np.searchsorted(np.cumsum(plain[order]), 0.5)) + 1]
    assert set(np.flatnonzero(draws(temperature=1.0, top_p=0.5))) <= set(nucleus)
    likely = np.flatnonzero(plain >= 0.2 * plain.max())
    assert set(np.flatnonzero(draws(temperature=1.0, min_p=0.2))) == set(likely)
    sampler = lt.Sampler(tiny_model, presence_penalty=100.0)
    assert [sampler.sample_logits(logits) for _ in range(3)] == order[:3].tolist()
    sampler.reset()
    sampler.accept(int(order[0]))
    assert sampler.sample_logits(logits) == order[1]


def test_sampler_reads_a_context(tiny_model: lt.Model) -> None:
    with decoded(tiny_model, [5, 6, 7]) as context:
        assert lt.Sampler(tiny_model).sample(context) == context.logits().argmax()
        with pytest.raises(lt.InvalidInputError):
            lt.Sampler(tiny_model).sample(context, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
        {"frequency_penalty": float("inf")},
        {"penalty_last_n": -1},
        {"seed": -1},
        {"seed": 2**32 - 1},
    ],
)
def test_wrong_sampler_options_raise(tiny_model: lt.Model, options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.Sampler(tiny_model, **options)


def test_wrong_logits_raise(tiny_model: lt.Model) -> None:
    sampler = lt.Sampler(tiny_model)
    wrongs: list[Any] = [
        np.zeros(5, np.float32),
        np.zeros(259, np.float64),
        np.full(259, np.nan, np.float32),
    ]
    for wrong in wrongs:
        with pytest.raises(lt.InvalidInputError):
            sampler.sample_logits(wrong)
    with pytest.raises(lt.InvalidInputError):
        sampler.accept(259)
