"""Layouts and inputs that test_write.py does not cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.datasets import assert_same, expected_states, random_rows, write_lines
from support.numerics import EXACT, computes_with_nan, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset
from llamatap.dataset.row_files import COLUMNS
from reference import decoder

Options = dataset.Options


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_npy(tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path, dtype: str) -> None:
    rows = random_rows(21, 40)
    rows[7] = {"input_ids": [5]}
    folder = tmp_path / "o"
    options = Options(layers=[0, 2], layout="npy", dtype=dtype, batch_tokens=128, context=EXACT)
    job = dataset.Job(tiny_model, rows, folder, options)
    predicted = job.n_bytes
    assert job.run().n_samples == 39
    layers = {k: np.load(folder / f"layer_{k}.npy", mmap_mode="r") for k in (0, 2, 4)}
    assert sum((folder / f"layer_{k}.npy").stat().st_size for k in layers) == predicted
    if dtype == "bfloat16":
        assert all(array.dtype == np.uint16 for array in layers.values())
        layers = {k: array.view(ml_dtypes.bfloat16) for k, array in layers.items()}
    index = np.load(folder / "index.npy")
    tokens, mask = np.load(folder / "tokens.npy"), np.load(folder / "loss_mask.npy")
    kept = [i for i in range(40) if i != 7]
    assert index[:, 2].tolist() == kept
    for start, length, row in index.tolist():
        part = slice(start, start + length)
        assert tokens[part].tolist() == rows[row]["input_ids"]
        assert mask[part].astype(int).tolist() == rows[row]["loss_mask"]
        expected = expected_states(tiny, rows[row]["input_ids"], [0, 2, 4])
        for column, array in enumerate(layers.values()):
            assert relative(array[part], expected[:, column]) < (1e-5 if dtype == "float32" else 4e-3)
    assert index[:, 1].sum() == len(tokens) == len(layers[0])


def test_npy_resumed_by_workers(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows = random_rows(22, 60)

    class EnoughError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise EnoughError

    for rank in (1, 0, 1):
        options = Options(layers=[1], layout="npy", batch_tokens=64, rank=rank, world_size=2)
        try:
            dataset.write(tiny_model, rows, tmp_path / "o", options, progress=progress if rank else None)
        except EnoughError:
            continue
    report = dataset.write(tiny_model, rows, tmp_path / "o", Options(**{**vars(options), "rank": 1}))
    assert report.complete
    dataset.write(tiny_model, rows, tmp_path / "calm", Options(layers=[1], layout="npy", batch_tokens=64))
    assert_same(tmp_path / "o", tmp_path / "calm")


@computes_with_nan
def test_npy_leaves_out_what_is_no_number(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][255] = np.nan
    rows = [{"input_ids": [5, 6]}, {"input_ids": [5, 255]}, {"input_ids": [7, 8, 9]}]
    with lt.Model(tiny.write(tmp_path / "nan.gguf")) as model:
        dataset.write(model, rows, tmp_path / "o", Options(layers=[1], layout="npy", dtype="float32"))
    assert np.load(tmp_path / "o" / "index.npy").tolist() == [[0, 2, 0], [4, 3, 2]]
    assert not np.load(tmp_path / "o" / "layer_1.npy")[2:4].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_specforge(tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rows = random_rows(23, 30)
    folder = tmp_path / "o"
    options = Options(layers=[1, 2, 3], layout="specforge", dtype=dtype, batch_tokens=128, context=EXACT)
    job = dataset.Job(tiny_model, rows, folder, options)
    predicted = job.n_bytes
    job.run()
    files = sorted(folder.rglob("*.ckpt"))
    assert [f.parent.name for f in files] == ["rows_0-2000"] * 30
    assert sum(f.stat().st_size for f in files) == predicted
    for i, row in enumerate(rows):
        found = torch.load(folder / "rows_0-2000" / f"data_{i}.ckpt", mmap=True, weights_only=True)
        assert found["input_ids"].tolist() == row["input_ids"]
        assert found["loss_mask"].tolist() == row["loss_mask"]
        assert json.loads(found["provenance"])["row"] == i
        n, width = len(row["input_ids"]), tiny.n_embd
        assert found["aux_hidden_state"].shape == (1, n, 3 * width)
        assert found["aux_hidden_state"].dtype == found["hidden_state"].dtype == getattr(torch, dtype)
        inputs = tiny.entering(np.array(row["input_ids"], np.int32))
        streams, normed, _ = decoder.forward(tiny.shape(), tiny.weights, inputs)
        tolerance = 1e-5 if dtype == "float32" else 4e-3
        aux = np.concatenate([streams[k] for k in (1, 2, 3)], 1)
        assert relative(found["aux_hidden_state"][0].float().numpy(), aux) < tolerance
        assert relative(found["hidden_state"][0].float().numpy(), normed) < tolerance


def test_what_a_layout_needs(tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for layout, package, extra in (("speculators", "pyarrow", "dataset"), ("specforge", "torch", "train")):
        expected = rf'layout {layout} needs {package}: pip install "llamatap\[{extra}\]"$'
        with pytest.raises(lt.MissingPackageError, match=expected):
            dataset.write(tiny_model, [{"text": "ab"}], tmp_path / "o", Options(layers=[1], layout=layout))


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
#: Columns fill in what a row does not have.
ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    {"text": "plain"},
    {"messages": [*CHAT, {**CHAT[0], "name": "x"}, CHAT[1]]},
]


def test_parquet_and_folders(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{**dict.fromkeys(COLUMNS), **row, "id": 1} for row in ROWS])
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=2)
    assert list(dataset.read_rows(tmp_path / "b.parquet")) == ROWS
    write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    assert list(dataset.read_rows(tmp_path)) == [{"text": "first"}, *ROWS]
    # A folder that Dataset.save_to_disk wrote: two Arrow streams.
    saved = tmp_path / "saved"
    saved.mkdir()
    for name, part in (("x.arrow", table.slice(0, 1)), ("y.arrow", table.slice(1))):
        with (
            pyarrow.OSFile(str(saved / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(part)
    state = {"_data_files": [{"filename": "x.arrow"}, {"filename": "y.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state))
    assert list(dataset.read_rows(saved)) == ROWS
    (saved / "y.arrow").write_text("x")
    with pytest.raises(lt.InvalidInputError, match=r"y\.arrow is not an Arrow stream"):
        list(dataset.read_rows(saved))
    (saved / "state.json").write_text("{}")
    with pytest.raises(lt.InvalidInputError, match="names no data files"):
        list(dataset.read_rows(saved))
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    with pytest.raises(lt.InvalidInputError, match="holds splits"):
        dataset.read_rows(tmp_path / "splits")


def test_what_was_written_can_be_read_again(tiny_model: lt.Model, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = random_rows(24, 12)
    dataset.write(tiny_model, rows, tmp_path / "a", Options(layers=[1]))
    # Its own data set, as input, for other layers.
    assert list(dataset.read_rows(tmp_path / "a")) == rows


def test_recurrent_models_and_those_without_a_memory(arch_models: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(25)
    for name in ("mamba-dense", "modern-bert-dense"):
        path = arch_models / f"{name}.gguf"
        if not path.exists():
            continue
        with lt.Model(path) as model:
            rows = [{"input_ids": rng.integers(3, model.n_vocab, n).tolist()} for n in (5, 40, 7, 80, 3)]
            report = dataset.write(
                model,
                rows,
                tmp_path / name,
                Options(layers=[0], dtype="float32", batch_tokens=64, context=EXACT),
            )
            assert report.n_samples == 5
