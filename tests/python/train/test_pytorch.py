"""Co-training's data with PyTorch, and the shifts beside speculators' own code: `nox -s train`."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import sample, states

import llamatap as lt
from llamatap.connectors import SharedMemoryConnector
from llamatap.states import DTYPES
from llamatap.train import DataBuffer, TrainOptions, training_batch

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from llamatap.train.pytorch import BufferDataset, collate, eagle_loss  # noqa: E402

FLOAT = TrainOptions(dtype="float32", batch_size=2)


def filled(options: TrainOptions, n: int = 5, layers: int | None = None) -> DataBuffer:
    """Texts of 2 to n + 1 tokens: 10, 11; 20, 21, 22; ..."""
    buffer = options.buffer()
    for k in range(1, n + 1):
        tokens = list(range(10 * k, 10 * k + k + 1))
        buffer.add_batch({"input_ids": tokens}, [states(tokens, layers)])
    return buffer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layers", [None, 4])
def test_a_loader_has_the_batches_of_numpy(dtype: str, layers: int | None) -> None:
    options = TrainOptions(dtype=dtype, batch_size=2)
    buffer = filled(options, layers=layers)
    loader = torch.utils.data.DataLoader(
        BufferDataset(buffer, options), options.batch_size, collate_fn=collate(options)
    )
    batches = list(loader)
    expected: list[Any] = list(options.batches(buffer))
    assert len(batches) == len(expected) == 3
    for found, wanted in zip(batches, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert found["hidden_states"].dtype == found["target"].dtype == getattr(torch, dtype)
        assert {
            found[name].dtype for name in ("input_ids", "attention_mask", "document_ids", "position_ids")
        } == {torch.int64}
        for name, value in found.items():
            array = wanted[name]
            assert tuple(value.shape) == array.shape
            assert value.double().numpy().tolist() == array.astype(np.float64).tolist()
    # A tensor that is written into changes no sample.
    batches[0]["hidden_states"].zero_()
    assert next(iter(loader))["hidden_states"].abs().sum() > 0


def test_a_data_set_sees_what_is_added_meanwhile() -> None:
    buffer = FLOAT.buffer()
    dataset = BufferDataset(buffer, FLOAT)
    with pytest.raises(lt.InvalidInputError, match="no sample was added"):
        iter(dataset)
    buffer.add_batch({"input_ids": [1, 2]}, None)
    with pytest.raises(lt.InvalidInputError, match="in 1 samples: 1 with no states"):
        iter(dataset)
    for step in range(3):
        buffer.add_batch({"input_ids": [step, 8]}, [states([step, 8])])
        buffer.increment_step()
    # The last two steps, of which one has just begun.
    assert [one.input_ids.tolist() for one in dataset] == [[2, 8]]
    buffer.add_batch({"input_ids": [3, 8]}, [states([3, 8])])
    assert [one.input_ids.tolist() for one in dataset] == [[2, 8], [3, 8]]


def test_orders_are_drawn() -> None:
    options = TrainOptions(dtype="float32")
    buffer = filled(options, 20)
    firsts = [[int(one.input_ids[0]) for one in BufferDataset(buffer, options)]]
    dataset, again = (BufferDataset(buffer, options, seed=3) for _ in range(2))
    firsts += [[int(one.input_ids[0]) for one in data] for data in (dataset, dataset, again)]
    plain, first, second, same = firsts
    assert plain == list(range(10, 210, 10))
    assert first == same != second
    assert sorted(first) == sorted(second) == plain != first
    assert [one.input_ids[0] for one in buffer.get_all_data()] == plain


def test_workers_are_refused() -> None:
    """They would train on the buffer as it was when they were started, each on all of it."""
    loader = torch.utils.data.DataLoader(
        BufferDataset(filled(FLOAT), FLOAT), 2, collate_fn=collate(FLOAT), num_workers=1
    )
    with pytest.raises(lt.UnsupportedError, match="num_workers=0"):
        list(loader)


def test_tensors_are_taken() -> None:
    values = torch.tensor([[1.0, 2.5], [3.0, -4.0], [5.0, 6.0]], requires_grad=True)
    batch = {
        "input_ids": torch.tensor([[7, 8, 9], [4, 5, 6]]),
        "loss_mask": torch.tensor([[False, True, True], [False, False, True]]),
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        buffer = DataBuffer()
        # A transposed one is not contiguous.
        given = values.to(dtype)
        buffer.add_batch(batch, [given.T.contiguous().T, given[None]])
        for one, tokens, mask in zip(
            buffer.get_all_data(), ([7, 8, 9], [4, 5, 6]), ([0, 1, 1], [0, 0, 1]), strict=True
        ):
            assert one.input_ids.tolist() == tokens
            assert one.loss_mask.tolist() == mask
            assert np.asarray(one.hidden_states).astype(float).tolist() == values.tolist()
            assert str(np.asarray(one.hidden_states).dtype) == str(dtype).removeprefix("torch.")
    buffer = DataBuffer()
    buffer.add_batch(batch, values.detach().expand(2, 3, 2))
    assert buffer.get_data_count() == 2
    with torch.no_grad():
        values[:] = 0
    assert np.abs(np.asarray(buffer.get_all_data()[0].hidden_states)).sum() > 0
    with pytest.raises(lt.InvalidInputError, match="must be float32"):
        buffer.add_batch(batch, [values.double()] * 2)


@pytest.mark.parametrize(("vloss", "ploss"), [(0.5, 0.5), (1.0, 0.0), (0.0, 0.1), (0.3, 2.0)])
@pytest.mark.parametrize(
    ("states_dtype", "drafter_dtype", "head_dtype"),
    [
        ("float32", "float32", None),
        # The default of states, and models of float32, of bfloat16, of both.
        ("bfloat16", "float32", None),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "bfloat16", "bfloat16"),
    ],
)
def test_eagle_loss(
    states_dtype: str,
    drafter_dtype: str,
    head_dtype: str | None,
    vloss: float,
    ploss: float,
    rng: np.random.Generator,
) -> None:
    """The document's formulas, in NumPy, float64 and one position after the other; the head a module, or a
    function of what the drafter gives.

    How a machine rounds the head's products is not the loss's: bfloat16 has 8 bits, and float32 may be
    computed with fewer. So what the head is given must be right bit for bit, and the formulas begin with the
    logits that it gave. What is left is some ten operations in float32 on each of 13 numbers: 1e-5 is more
    than a hundred times their rounding, of 2**-24 each.
    """
    options = TrainOptions(vloss_weight=vloss, ploss_weight=ploss, dtype=states_dtype)
    buffer = options.buffer()
    for n, loss in ((6, [0, 0, 1, 1, 1, 1]), (4, [0, 1, 0, 1])):
        rows = rng.standard_normal((n, 8)).astype(np.float32) * 2
        buffer.add_batch({"input_ids": list(range(n)), "loss_mask": loss}, [rows])
    batch = collate(options)(buffer.get_all_data())
    assert batch["target"].dtype == getattr(torch, states_dtype)
    calls: list[tuple[Any, Any]] = []
    module = torch.nn.Linear(8, 5, bias=False, dtype=getattr(torch, head_dtype or drafter_dtype))
    module.register_forward_hook(lambda _, given, logits: calls.append((given[0], logits)))
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32)))
    module.weight.requires_grad_(False)
    given = torch.from_numpy(rng.standard_normal((1, 9, 8)).astype(np.float32) * 2)
    given = given.to(getattr(torch, drafter_dtype)).requires_grad_()
    lm_head = module if head_dtype else lambda x: module(x)
    result = eagle_loss(given, batch, lm_head, options)
    (target, target_logits), (predicted, predicted_logits) = calls
    assert torch.equal(target, batch["target"].to(module.weight.dtype))
    assert torch.equal(predicted, given.to(module.weight.dtype))
    expected, count = 0.0, 0
    for t in range(9):
        if batch["loss_mask"][0, t] == 0:
            continue
        count += 1
        wanted, got = (one[0, t].detach().double().numpy() for one in (batch["target"], given))
        gap = np.abs(wanted - got)
        value = np.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
        logits, found = (one[0, t].detach().double().numpy() for one in (target_logits, predicted_logits))
        p = np.exp(logits) / np.exp(logits).sum()
        policy = -(p * (found - np.log(np.exp(found).sum()))).sum()
        expected += vloss * value + ploss * policy
    assert count == 4 + 2
    assert result.shape == ()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected / count, rel=1e-5)
    result.backward()
    # Only what counts is learnt from.
    learns = given.grad.abs().sum(-1)[0] > 0
    assert learns.tolist() == (batch["loss_mask"][0] == 1).tolist()


def test_a_drafter_learns() -> None:
    """Training finds the matrix that maps tokens and states to the next states."""
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    step = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32)
    table = rng.standard_normal((50, 16)).astype(np.float32)
    options = TrainOptions(dtype="float32", batch_size=8, ploss_weight=0.0)
    buffer = options.buffer()
    for _ in range(32):
        tokens = rng.integers(0, 50, 20)
        rows = [table[tokens[0]]]
        for token in tokens[1:]:
            rows.append(0.5 * rows[-1] @ step + table[token])
        buffer.add_batch({"input_ids": tokens}, [np.stack(rows)])
    table_ = torch.from_numpy(table)
    layer = torch.nn.Linear(32, 16, bias=False)
    optimiser = torch.optim.Adam(layer.parameters(), 0.02)
    dataset = BufferDataset(buffer, options, seed=1)
    losses = []
    for _ in range(60):
        for batch in torch.utils.data.DataLoader(dataset, options.batch_size, collate_fn=collate(options)):
            given = torch.cat([table_[batch["input_ids"]], batch["hidden_states"]], -1)
            loss = eagle_loss(layer(given), batch, lambda x: x, options)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    # With the wrong pairing, or across borders of samples, no matrix would fit.
    assert losses[-1] < 1e-4 < 0.1 < losses[0]


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_the_shift_of_speculators(layers: int) -> None:
    """Its own code, `shift_batch` and `CollateFn`, on our samples: the same, but for its padding and for our
    rows between samples, which count for nothing."""
    data = pytest.importorskip("speculators.train.data")
    shift_batch = pytest.importorskip("speculators.models.eagle3.data").shift_batch
    texts = [
        ([11, 12, 13, 14], [0, 0, 1, 1]),
        ([21, 22, 23], [0, 1, 1]),
        ([31, 32], [0, 1]),
        ([41] * 9, [1] * 9),
    ]
    items: list[dict[str, Any]] = []
    for tokens, mask in texts:
        rows = torch.from_numpy(states(tokens, layers))
        items.append(
            {
                # The form in which ArrowDataset and BaseDataset make them.
                "hidden_states": rows[:, :-1].flatten(1),
                "verifier_last_hidden_states": rows[:, -1],
                "input_ids": torch.tensor(tokens),
                "loss_mask": torch.tensor(mask),
                "lengths": torch.tensor([len(tokens)]),
                "position_ids": torch.arange(len(tokens)),
            }
        )
    theirs = data.CollateFn(64, 2, layers - 1, dtype=torch.float32, preprocess=shift_batch)(items)
    ours: Any = training_batch([sample(tokens, mask, layers) for tokens, mask in texts])
    documents = ours["document_ids"][0]
    inside = np.append(documents[1:] == documents[:-1], True)
    assert ours["loss_mask"][0][~inside].tolist() == [0, 0, 0]
    n_rows = int(inside.sum())
    assert n_rows == 3 + 2 + 1 + 8
    names = {"target": "verifier_last_hidden_states"}
    for name in ("input_ids", "hidden_states", "target", "loss_mask", "document_ids", "position_ids"):
        found = ours[name][0][inside]
        assert found.tolist() == theirs[names.get(name, name)][0, :n_rows].tolist()
    assert theirs["document_ids"][0, n_rows:].tolist() == [-1] * (64 - n_rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_trainer_of_speculators_reads_a_connector(dtype: str, tmp_path: Path) -> None:
    """Its own data set and checks, on shared memory: tensors in the pages that were written."""
    data = pytest.importorskip("speculators.train.data")
    offline = pytest.importorskip("speculators.data_generation.offline")
    datasets = pytest.importorskip("datasets")
    from llamatap.connectors.speculators import SpeculatorsTransfer

    texts = [[11, 12, 13, 14], [21, 22], [31, 32, 33]]
    rows = {
        "input_ids": texts,
        "loss_mask": [[0, *[1] * (len(one) - 1)] for one in texts],
        "seq_len": [len(one) for one in texts],
    }
    dataset = datasets.Dataset.from_dict(rows).with_format(
        "torch", columns=["input_ids", "loss_mask"], output_all_columns=True
    )
    dataset.save_to_disk(tmp_path / "prompts")
    connector = SharedMemoryConnector(f"test-{uuid.uuid4().hex}")
    try:
        params: Any = None
        for i, tokens in enumerate(texts):
            array = states(tokens, 4).astype(DTYPES[dtype])
            found = lt.States(array, np.array(tokens, np.int32), (1, 2, 3, 5), n_layer=5)
            connector.put(found, index=i)
            params = connector.put(found)
        transfer = SpeculatorsTransfer(connector)
        arrow = data.ArrowDataset(64, tmp_path / "prompts", transfer=transfer, on_missing="raise")
        for i, tokens in enumerate(texts):
            item = arrow[i]
            expected = states(tokens, 4).astype(DTYPES[dtype]).astype(np.float32)
            assert item["hidden_states"].dtype == getattr(torch, dtype)
            assert item["hidden_states"].tolist() == expected[:, :-1].reshape(len(tokens), -1).tolist()
            assert item["verifier_last_hidden_states"].tolist() == expected[:, -1].tolist()
        transfer.setup()
        generated = transfer.get_generated(params)
        assert generated is not None
        offline.check_hidden_states(generated, texts[-1])
        # Writing into a tensor changes no other reader's data and does not crash.
        generated["hidden_states"].zero_()
        again = transfer.get_generated(params)
        assert again is not None
        assert again["hidden_states"].tolist() == expected.tolist()
        transfer.delete(params["handle"])
        assert transfer.get_generated(params) is None
        assert transfer.get_cached(9) is None
    finally:
        shutil.rmtree(connector.folder)
