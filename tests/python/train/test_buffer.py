"""DataBuffer: the samples it keeps, by step, and those it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.training import generation, states

import llamatap as lt
from llamatap.train import DataBuffer, TrainOptions, training_batch


def text(k: int, n: int = 3) -> dict[str, Any]:
    return {"input_ids": [k] * n}


def keys(samples: list[Any]) -> list[int]:
    return [int(one.input_ids[0]) for one in samples]


def test_the_oldest_make_room() -> None:
    buffer = DataBuffer(max_size=5, current_size=2)
    for step in range(3):
        for k in range(3):
            buffer.add_batch(text(10 * step + k), [states([1, 2, 3])])
        assert keys(buffer.collected_data) == [10 * step + 1, 10 * step + 2]
        assert buffer.get_data_count() == min(3 * (step + 1), 5)
        if step < 2:
            buffer.increment_step()
    assert buffer.step == 2
    assert keys(buffer.get_all_data()) == [11, 12, 20, 21, 22]
    assert [one.step for one in buffer.get_all_data()] == [1, 1, 2, 2, 2]
    for n, expected in (
        (-1, []),
        (0, []),
        (1, [20, 21, 22]),
        (2, [11, 12, 20, 21, 22]),
        (9, keys(buffer.get_all_data())),
    ):
        assert keys(buffer.get_data_from_last_n_steps(n)) == expected
    buffer.increment_step()
    assert buffer.collected_data == []
    assert keys(buffer.get_data_from_last_n_steps(1)) == []
    assert keys(buffer.get_data_from_last_n_steps(2)) == [20, 21, 22]
    assert repr(buffer) == "DataBuffer(5 of 5 samples, step 3)"


@pytest.mark.parametrize("current_size", [2, 2000])
@pytest.mark.parametrize("store", [True, False])
def test_the_oldest_make_room_for_bytes(store: bool, current_size: int) -> None:
    """A sample of 3 x 2 bfloat16 takes 12 bytes; 3.5 fit, and samples without states take none."""
    options = TrainOptions(
        data_buffer_max_bytes=42, store_hidden_states=store, buffer_max_samples=current_size
    )
    buffer = options.buffer()
    for k in range(4):
        buffer.add_batch(text(k), [states([1, 2, 3])])
    buffer.add_batch(text(9), None)
    current = [1, 2, 3, 9] if current_size == 2000 else [3, 9]
    # Tokens alone stay where states are not kept over the steps.
    assert keys(buffer.get_all_data()) == ([1, 2, 3, 9] if store else [0, 1, 2, 3, 9])
    assert keys(buffer.collected_data) == current
    buffer.increment_step()
    buffer.add_batch({"input_ids": [[4] * 3, [5] * 3]}, [states([1, 2, 3])] * 2)
    assert keys(buffer.collected_data) == [4, 5]
    assert keys(buffer.get_all_data())[-4:] == [3, 9, 4, 5]
    assert buffer.get_data_count() == (4 if store else 7)
    # One that is too large alone is the only one.
    buffer.add_batch(text(6, 30), [states([1] * 30)])
    assert keys(buffer.collected_data) == [6]
    assert buffer.get_data_count() == (1 if store else 8)
    for wrong in (0, 1.5, "1G"):
        with pytest.raises(lt.InvalidInputError, match="max_bytes must be"):
            DataBuffer(max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("max_size", [1, 4, 1000])
@pytest.mark.parametrize("current_size", [1, 3, 2000])
def test_the_bytes_of_all_that_is_held_are_bounded(store: bool, max_size: int, current_size: int) -> None:
    """The current step's samples too, which may be more than are kept over the steps."""
    max_bytes = 100
    buffer = DataBuffer(max_size, store, current_size=current_size, max_bytes=max_bytes)
    rng = np.random.default_rng(0)
    newest: list[tuple[int, int]] = []
    for k in range(300):
        if rng.random() < 0.03:
            buffer.increment_step()
            newest.clear()
        n = int(rng.integers(1, 8))
        buffer.add_batch({"input_ids": [[k] * n]}, [np.zeros((n, 1), np.float32)])
        newest.append((k, 4 * n))
        held = {id(one): one for one in [*buffer.get_all_data(), *buffer.collected_data]}
        taken = sum(one.hidden_states.nbytes for one in held.values() if one.hidden_states is not None)
        assert taken <= max_bytes
        # The current step has its newest samples, as many as fit.
        sizes = np.cumsum([size for _, size in newest[::-1]])
        fits = min(int((sizes <= max_bytes).sum()), current_size)
        assert keys(buffer.collected_data) == [key for key, _ in newest[-fits:]]


def test_a_small_buffer_holds_few_states_within_a_step() -> None:
    """4 samples over the steps, 1,000 of one step: 40 KB of states stay 4 KB."""
    buffer = DataBuffer(4, max_bytes=4000)
    for k in range(1000):
        buffer.add_batch(text(k), [np.zeros((3, 10), np.float32)])
    assert keys(buffer.get_all_data()) == [996, 997, 998, 999]
    assert keys(buffer.collected_data) == list(range(967, 1000))


def test_states_may_be_kept_for_the_current_step_alone() -> None:
    buffer = DataBuffer(store_hidden_states=False)
    buffer.add_batch(text(1), [states([1, 1, 1])])
    (current,), (kept,) = buffer.collected_data, buffer.get_all_data()
    assert current.hidden_states is not None
    assert current.hidden_states.tolist() == states([1, 1, 1]).tolist()
    assert kept.hidden_states is None
    assert kept.input_ids.tolist() == [1, 1, 1]
    options = TrainOptions(store_hidden_states=False)
    assert options.samples(buffer) == [current]
    buffer.increment_step()
    with pytest.raises(lt.InvalidInputError, match="no sample was added"):
        options.samples(buffer)


def test_the_sizes_are_those_of_the_document() -> None:
    """10,000 samples over the steps, 2,000 of the current one."""
    for buffer in (DataBuffer(), TrainOptions().buffer()):
        assert (buffer.max_size, buffer.current_size, buffer.store_hidden_states) == (10000, 2000, True)
    buffer.add_batch({"input_ids": [[1]] * 10003}, [np.array([[k]], np.float32) for k in range(10003)])
    assert buffer.get_data_count() == 10000
    assert len(buffer.collected_data) == 2000
    values = [float(np.asarray(one.hidden_states)[0, 0]) for one in buffer.collected_data[-2:]]
    # 10,000 and more have 14 bits: bfloat16, the options' dtype, has 8.
    assert values == [9984.0, 9984.0]
    options = TrainOptions()
    found = (options.buffer_steps, options.training_interval_steps, options.batch_size, options.max_len)
    assert found == (2, 10, 32, 512)
    assert (options.vloss_weight, options.ploss_weight) == (0.5, 0.5)


def rows(value: Any, tokens: list[int] | None = None, **batch: Any) -> NDArray[Any] | None:
    buffer = DataBuffer()
    buffer.add_batch({"input_ids": [[7, 8, 9] if tokens is None else tokens], **batch}, [value])
    (found,) = buffer.get_all_data()
    return found.hidden_states


def test_states_become_rows() -> None:
    flat = states([7, 8, 9])
    for shape in ((3, 2), (1, 3, 2), (3, 1, 2), (1, 1, 3, 2), (1, 3, 1, 2)):
        found = rows(flat.reshape(shape))
        assert found is not None
        assert found.tolist() == flat.tolist()
    layers = states([7, 8, 9], 4)
    for shape in ((3, 4, 2), (1, 3, 4, 2)):
        found = rows(layers.reshape(shape))
        assert found is not None
        assert found.tolist() == layers.tolist()
    singles: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2,), (1, 2)),
        ((1, 2), (1, 2)),
        ((1, 1, 2), (1, 2)),
        ((1, 4, 2), (1, 4, 2)),
    ]
    for given, expected in singles:
        found = rows(np.ones(given, np.float32), [7])
        assert found is not None
        assert found.shape == expected
    # Lists, as JSON has them.
    found = rows(flat.tolist())
    assert found is not None
    assert found.dtype == np.float32
    nothings: list[Any] = [None, [], np.zeros((0, 2), np.float32), np.zeros(0, np.float32)]
    for nothing in nothings:
        assert rows(nothing) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((4, 2), np.float32), r"hidden_states of sample 0 must be .* with n=3, .*; found \(4, 2\)"),
        (np.ones((2, 2), np.float32), r"found \(2, 2\)"),
        (np.ones(2, np.float32), r"found \(2,\)"),
        # Neither dimension says which is that of tokens.
        (np.ones((2, 3, 2), np.float32), r"found \(2, 3, 2\)"),
        (np.ones((1, 2, 3, 2), np.float32), r"found \(1, 2, 3, 2\)"),
        (np.ones((3, 2, 2, 2), np.float32), r"found \(3, 2, 2, 2\)"),
        (np.ones((3, 2)), "must be float32, float16 or bfloat16, not dtype\\('float64'\\)"),
        (np.ones((3, 2), int), "must be float32"),
    ],
)
def test_states_that_do_not_fit_their_tokens_are_refused(value: Any, message: str) -> None:
    buffer = DataBuffer()
    with pytest.raises(lt.InvalidInputError, match=message.replace("sample 0", "sample 1")):
        buffer.add_batch({"input_ids": [[1, 2, 3], [7, 8, 9]]}, [states([1, 2, 3]), value])
    with pytest.raises(lt.InvalidInputError, match=message):
        buffer.add_batch({"input_ids": [[7, 8, 9]]}, [value])
    # A batch is added as a whole or not at all.
    assert buffer.get_data_count() == 0
    assert buffer.collected_data == []


def test_padding_is_left_out() -> None:
    """verl's batches: prompts padded on the left, responses on the right."""
    batch = {
        "input_ids": np.array([[0, 5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 9, 9, 9]]),
        "attention_mask": np.array([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
        "prompts": np.array([[0, 5, 6], [1, 2, 3]]),
        "responses": np.array([[7, 8, 0, 0], [4, 9, 9, 9]]),
    }
    padded = states(batch["input_ids"][0].tolist())
    for first in (padded, padded[1:5]):
        for missing in ((), ("prompts",), ("responses",)):
            buffer = DataBuffer()
            given = {name: value for name, value in batch.items() if name not in missing}
            buffer.add_batch(given, [first, states([1, 2, 3, 4, 9, 9, 9])])
            one, other = buffer.get_all_data()
            assert one.input_ids.tolist() == [5, 6, 7, 8]
            assert one.loss_mask.tolist() == [0, 0, 1, 1]
            assert np.asarray(one.hidden_states)[:, 0].tolist() == [5, 6, 7, 8]
            assert other.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 9]
            assert other.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    # An explicit mask takes precedence.
    buffer.add_batch({**batch, "loss_mask": [[0, 0, 0, 1, 0, 0, 0], [1] * 7]}, None)
    assert [one.loss_mask.tolist() for one in buffer.get_all_data()[2:]] == [[0, 0, 1, 0], [1] * 7]
    assert [one.hidden_states for one in buffer.get_all_data()[2:]] == [None, None]


@pytest.mark.parametrize(
    ("batch", "given", "message"),
    [
        ([1, 2], None, "must be a dict with 'input_ids'"),
        ({"tokens": [1]}, None, "must be a dict with 'input_ids'"),
        ({"input_ids": [[1, 2], [3]]}, [None], "an entry for each of the 2 samples, None where .*; found 1"),
        ({"input_ids": [[1, 2], [3]]}, [None] * 3, "found 3"),
        (
            {"input_ids": [[1, 2], [3]], "loss_mask": [[1, 1]]},
            None,
            "loss_mask must have 2 entries.*; found 1",
        ),
        ({"input_ids": [1, 2], "loss_mask": [1]}, None, r"loss_mask of sample 0 must be 0 or 1 .* 2 tokens"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, None, "must be 0 or 1"),
        ({"input_ids": [1, 2], "attention_mask": [[1, 1, 1]]}, None, "attention_mask of sample 0 must"),
        ({"input_ids": [1, 2], "responses": [[1, 2, 3]]}, None, "longer than its 2 input_ids"),
        ({"input_ids": [1, 2], "prompts": [[1, 2, 3]]}, None, "longer than its 2 input_ids"),
        ({"input_ids": [1.0, 2.0]}, None, "must be integers"),
        ({"input_ids": [1, -1]}, None, "token ids of 0 or more; found -1"),
        ({"input_ids": np.ones((2, 2, 2), int)}, None, r"of the shape \(n,\)"),
    ],
)
def test_batches_that_are_none_are_refused(batch: Any, given: Any, message: str) -> None:
    buffer = DataBuffer()
    with pytest.raises(lt.InvalidInputError, match=message):
        buffer.add_batch(batch, given)
    assert buffer.get_data_count() == 0


def test_layers_are_counted() -> None:
    buffer = DataBuffer()
    with pytest.raises(lt.InvalidInputError, match=r"have 3 layers; layers= names \[1, 'norm'\]"):
        buffer.add_batch(text(1), [states([1, 1, 1], 3)], layers=[1, "norm"])
    buffer.add_batch(text(1), [states([1, 1, 1])], layers=["norm"])
    assert buffer.get_all_data()[0].layers == ("norm",)


@pytest.mark.parametrize(
    ("layers", "n_layer", "message"),
    [
        ((1, 2), 4, r"last of layers= .* or -1 \(H_n\) for trainers .*; found \[1, 2\]"),
        ((1, 2), None, r"or -1 \(H_n, with n_layer=\) for trainers .*; found \[1, 2\]"),
        (("norm", 1), 4, r"last of layers= .*found \['norm', 1\]"),
        ((), None, r"last of layers= .*found \[\]"),
        ((1, -1), None, r"without n_layer= an id of layers= must be in 0\.\..*, not -1"),
        ((1, 4), None, r"with n_layer="),
        ((1, 5), 4, r"layer id 5 is not in -5\.\.4"),
        ((1.5, "norm"), None, "without n_layer= an id of layers= must be an integer"),
        (("norm",), 0, "n_layer must be in 1"),
    ],
)
def test_a_layer_that_nobody_predicts_is_refused(layers: Any, n_layer: int | None, message: str) -> None:
    buffer = DataBuffer()
    with pytest.raises(lt.InvalidInputError, match=message):
        buffer.add_batch(text(1), [states([1, 1, 1], 2)], layers=layers, n_layer=n_layer)
    assert buffer.get_data_count() == 0


def test_layers_by_either_name_make_a_batch() -> None:
    """-1 and 4 are one layer of a model of four blocks; what generation gives is named 4."""
    buffer = DataBuffer()
    several: list[tuple[lt.LayerId, ...]] = [(1, -1), (1, 4), (-4, 4)]
    for layers in several:
        buffer.add_batch(text(1), [states([1, 1, 1], 2)], layers=layers, n_layer=4)
    buffer.add_generation(generation([1], [1, 1]))
    assert [one.layers for one in buffer.get_all_data()] == [(1, 4)] * 4
    assert training_batch(buffer.get_all_data())["target"][0, :, 0].tolist() == [101.0] * 11


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_generations_are_copied_once(dtype: str | None) -> None:
    """The one copy is all the memory that is taken."""
    rows = np.ones((4000, 2, 256), np.float32)
    given = generation(range(1000), range(3000), rows)
    buffer = DataBuffer(dtype=dtype)
    tracemalloc.start()
    try:
        buffer.add_generation(given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (found,) = buffer.get_all_data()
    states = np.asarray(found.hidden_states)
    # Besides, a byte a value says whether it is finite.
    assert peak < states.nbytes + 1.2 * states.size
    rows[:] = 0
    assert states.astype(np.float32).min() == 1
    assert len(found.input_ids) == 4000
    assert found.loss_mask.sum() == 3000


def test_samples_are_copies(rng: np.random.Generator) -> None:
    """The caller may reuse its arrays."""
    array = rng.standard_normal((3, 2)).astype(np.float32)
    tokens = np.array([[1, 2, 3]])
    before = array.copy()
    buffer, half = DataBuffer(), DataBuffer(dtype="bfloat16")
    for one in (buffer, half):
        one.add_batch({"input_ids": tokens}, array[None])
    array[:], tokens[:] = 0, 0
    (found,), (converted,) = buffer.get_all_data(), half.get_all_data()
    assert np.asarray(found.hidden_states).tolist() == before.tolist()
    assert found.input_ids.tolist() == [1, 2, 3]
    assert np.asarray(converted.hidden_states).dtype == ml_dtypes.bfloat16
    assert np.asarray(converted.hidden_states).tolist() == before.astype(ml_dtypes.bfloat16).tolist()
    for value in (found.input_ids, found.loss_mask, np.asarray(found.hidden_states)):
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 0


def test_threads_add_while_others_read() -> None:
    """Each sample is there once, whole, and of the step in which it was added."""
    buffer = DataBuffer(max_size=100_000)
    n_threads, n_each = 4, 300
    errors: list[BaseException] = []
    done = threading.Event()

    def add(thread: int) -> None:
        try:
            for k in range(n_each):
                token = thread * n_each + k
                buffer.add_batch(text(token), [states([token] * 3)])
                if k % 50 == 49:
                    buffer.increment_step()
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                for one in (
                    *buffer.get_all_data(),
                    *buffer.collected_data,
                    *buffer.get_data_from_last_n_steps(2),
                ):
                    assert np.asarray(one.hidden_states)[:, 0].tolist() == one.input_ids.tolist()
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    adders = [threading.Thread(target=add, args=(k,)) for k in range(n_threads)]
    for thread in readers + adders:
        thread.start()
    for thread in adders:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not errors
    found = buffer.get_all_data()
    assert sorted(keys(found)) == list(range(n_threads * n_each))
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert buffer.step == n_threads * n_each // 50


def test_when_training_runs_and_on_what() -> None:
    """Every third step, on two steps, two samples at a time."""
    options = TrainOptions(training_interval_steps=3, buffer_steps=2, batch_size=2, dtype="float32")
    buffer = options.buffer()
    trained = []
    for step in range(7):
        for k in range(2):
            buffer.add_batch(text(10 * step + k), [states([1, 2, 3])])
        if options.due(buffer):
            batches = [batch["input_ids"][0].tolist() for batch in options.batches(buffer)]
            trained.append((step, batches))
        buffer.increment_step()
    assert trained == [
        (2, [[10, 10, 11, 11, 11], [20, 20, 21, 21, 21]]),
        (5, [[40, 40, 41, 41, 41], [50, 50, 51, 51, 51]]),
    ]
    verl = TrainOptions(pairing="verl", max_len=2, dtype="float32")
    buffer = verl.buffer()
    buffer.add_batch({"input_ids": [1, 2, 3]}, [states([1, 2, 3])])
    buffer.add_batch(text(9), None)
    (batch,) = verl.batches(buffer)
    # The end of a response that is longer: the tokens 2 and 3.
    assert batch["input_ids"].tolist() == [[2]]
    empty = DataBuffer()
    empty.add_batch({"input_ids": [[1, 2], [3, 4]]}, None)
    with pytest.raises(lt.InvalidInputError, match="in 2 samples: 2 with no states"):
        # It raises at once, not with the first batch.
        options.batches(empty)


def test_numpy_is_enough() -> None:
    """PyTorch is imported only with the module that needs it."""
    code = "import sys, llamatap.train, llamatap.connectors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"buffer_steps": 0},
        {"training_interval_steps": 0},
        {"data_buffer_max_size": 0},
        {"data_buffer_max_bytes": 0},
        {"buffer_max_samples": 1.5},
        {"max_len": 1},
        {"dtype": "int8"},
        {"pairing": "EAGLE"},
        {"vloss_weight": -1},
        {"ploss_weight": float("nan")},
        {"store_hidden_states": "no"},
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(lt.InvalidInputError, match=name):
        TrainOptions(**wrong)
    several: list[dict[str, Any]] = [
        {"max_size": 0},
        {"current_size": 0},
        {"dtype": "int8"},
        {"store_hidden_states": 1},
    ]
    for arguments in several:
        with pytest.raises(lt.InvalidInputError):
            DataBuffer(**arguments)
