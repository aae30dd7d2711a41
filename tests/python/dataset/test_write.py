from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow
import pytest
from support.datasets import (
    TEMPLATE,
    assert_same,
    expected_states,
    random_rows,
    read_states,
    visible_files,
    write_lines,
)
from support.numerics import EXACT, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset
from llamatap.__main__ import main

Options = dataset.Options


@pytest.fixture(scope="module")
def chat_path(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("chat") / "tiny.gguf", chat_template=TEMPLATE)


def arrow_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder of Dataset.save_to_disk, by the format's description."""
    state = json.loads((folder / "state.json").read_text())
    assert state["_format_type"] == "torch"
    assert state["_format_columns"] == ["input_ids", "loss_mask"]
    (file,) = (folder / entry["filename"] for entry in state["_data_files"])
    with pyarrow.memory_map(str(file)) as memory, pyarrow.ipc.open_stream(memory) as stream:
        table = stream.read_all()
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features == json.loads((folder / "dataset_info.json").read_text())["features"]
    assert list(features) == table.schema.names
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-3), ("float16", 1e-3)])
def test_states_of_every_sample(
    tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    rows = random_rows(1, 70, longest=90)
    folder = tmp_path / "out"
    options = Options(layers=[1, 3], dtype=dtype, batch_tokens=128, context=EXACT)
    job = dataset.Job(tiny_model, rows, folder, options)
    predicted = job.n_bytes
    report = job.run()
    assert report == dataset.Report(70, sum(len(row["input_ids"]) for row in rows), 70, {}, True)
    files = sorted((folder / "hidden_states").iterdir())
    assert [f.name for f in files] == sorted(f"hs_{i}.safetensors" for i in range(70))
    assert sum(file.stat().st_size for file in files) == predicted
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    for i, row in enumerate(rows):
        tokens, states, metadata = read_states(folder / "hidden_states" / f"hs_{i}.safetensors")
        assert tokens.dtype == np.int64
        assert tokens.tolist() == row["input_ids"]
        assert states.dtype == numpy_dtype
        # H_n is the last slot, without the final norm.
        expected = expected_states(tiny, row["input_ids"], [1, 3, tiny.n_layer])
        assert states.shape == expected.shape
        assert all(relative(states[:, k], expected[:, k]) < tolerance for k in range(3))
        assert (metadata["row"], json.loads(metadata["layers"])) == (str(i), [1, 3, 4])
        assert metadata["model_sha256"] == lt.extract(tiny_model, [5]).provenance["model_sha256"]
    assert arrow_rows(folder) == [{**row, "seq_len": len(row["input_ids"])} for row in rows]
    manifest = json.loads((folder / "llamatap.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["provenance"]["norm"] == ["pre", "pre", "pre"]


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (Options(layers=[1, 2]), (1, 2, 4)),
        (Options(layers=[-1]), (4,)),
        (Options(layers=[1, 4]), (1, 4)),
        (Options(layers=[1, 2], convention="specforge"), (2, 3, 4)),
        (Options(layers=[-2], convention="transformers"), (3, 4)),
    ],
)
def test_layers_by_convention(
    tiny_model: lt.Model, tmp_path: Path, options: Options, columns: tuple[int, ...]
) -> None:
    assert dataset.Job(tiny_model, [{"text": "abc"}], tmp_path / "o", options).columns == columns


def test_rows_of_every_kind(chat_path: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yo "}]
    rows: list[Any] = [
        {"text": "plain"},
        {"messages": turns, "text": "not this"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"input_ids": [9, 8, 7], "messages": turns},
        {"input_ids": [9, 8, 7, 6], "loss_mask": [False, True, False, True]},
    ]
    with lt.Model(chat_path) as model:
        # BOS and 20 bytes are the prompt: of 21 tokens none is of the answer.
        job = dataset.Job(model, rows, tmp_path / "o", Options(layers=[1], max_length=21))
        assert list(job.skipped) == [1, 2]
        assert "loss mask has 0 of its first 21 tokens" in job.skipped[1]
        job = dataset.Job(model, rows, tmp_path / "o", Options(layers=[1], max_length=23))
        assert job.n_truncated == 2
        found = [(s.tokens.tolist(), s.loss_mask.astype(int).tolist()) for s in job.samples]
        whole = dataset.Job(model, rows, tmp_path / "o", Options(layers=[1])).samples[1]
    prompt = [1, *(3 + byte for byte in b"[user]Hi\n[assistant]")]
    answer = [3 + ord("Y"), 3 + ord("o")]
    masked = ([*prompt, *answer], [0] * 21 + [1, 1])
    # The end of the turn is the assistant's, the newline after it is not.
    assert whole.tokens.tolist() == [*prompt, *answer, 2, 3 + ord("\n")]
    assert whole.loss_mask.tolist() == [False] * 21 + [True] * 3 + [False]
    assert found == [
        ([1, *(3 + byte for byte in b"plain")], [1] * 6),
        masked,
        masked,
        ([9, 8, 7], [1, 1, 1]),
        ([9, 8, 7, 6], [0, 1, 0, 1]),
    ]


def test_rows_that_cannot_be_used(
    chat_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"input_ids": [5, 6, 7]}
    rows: list[Any] = [
        good,
        "{",
        '["a"]',
        {"input_ids": [5]},
        {"input_ids": []},
        {"input_ids": [5, 259]},
        {"input_ids": [5, -1]},
        {"input_ids": [5, 2**40]},
        {"input_ids": "5 6"},
        {"input_ids": [5, 6], "loss_mask": [1]},
        {"input_ids": [5, 6], "loss_mask": [1, 2]},
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
        {"input_ids": [5, 6], "loss_mask": [[1], [1, 0]]},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"text": ""},
        {"text": 5},
        {"text": "\ud800"},
        {"other": 1},
        good,
    ]
    path = write_lines(tmp_path / "in.jsonl", rows)
    command = ["dataset", str(chat_path), str(path), "-o", str(tmp_path / "out"), "--layers", "1", "--quiet"]
    assert main(command) == 0
    assert "20 left out (skipped.jsonl)" in capsys.readouterr().out
    skipped = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in skipped] == list(range(1, 21))
    assert all(entry["reason"] for entry in skipped)
    assert "line 2 is not JSON" in skipped[0]["reason"]
    assert [row["input_ids"] for row in arrow_rows(tmp_path / "out")] == [[5, 6, 7], [5, 6, 7]]
    metadata = read_states(tmp_path / "out" / "hidden_states" / "hs_1.safetensors")[2]
    assert metadata["row"] == "21"
    with lt.Model(chat_path) as model:
        with pytest.raises(lt.InvalidInputError, match="row 1: line 2 is not JSON"):
            dataset.write(model, path, tmp_path / "stop", Options(layers=[1], on_error="stop"))
        assert not (tmp_path / "stop").exists()


def test_no_bar_without_a_terminal(
    chat_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}])
    assert main(["dataset", str(chat_path), str(path), "-o", str(tmp_path / "out"), "--layers", "1"]) == 0
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    assert "tokens/s" not in said.err
    assert "3 tokens; layers [1, 4], of which the layout adds 4; " in said.err


def test_bad_input(tiny_model: lt.Model, tmp_path: Path) -> None:
    def refused(
        samples: Any, match: str, error: type[Exception] = lt.InvalidInputError, **options: Any
    ) -> None:
        with pytest.raises(error, match=match):
            dataset.write(tiny_model, samples, tmp_path / "out", Options(**{"layers": [1], **options}))
        assert not (tmp_path / "out").exists()

    good = [{"input_ids": [5, 6]}]
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "some.txt").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    refused(tmp_path / "empty.jsonl", "it is empty")
    refused(tmp_path / "none.jsonl", "no such file", FileNotFoundError)
    refused(tmp_path / "folder", "holds no .jsonl")
    refused(tmp_path / "some.txt", r"from the name, which must end in \.jsonl.*line such as \{\"text\": ")
    refused(tmp_path / "bad.parquet", "not a Parquet file")
    refused([{"text": ""}], "none of the 1 rows can be used; row 0")
    refused(good, r"not in -5\.\.4", layers=[7])
    refused(good, "layers is empty", layers=[])
    refused(good, "unknown convention", convention="x")
    refused(good, "unknown layout", layout="x")
    refused(good, "dtype must be", dtype="int8")
    refused(good, "rank must be less than world_size=2, not 2: ranks count from 0", rank=2, world_size=2)
    wrong: list[tuple[str, Any]] = [
        ("layout", []),
        ("convention", 5),
        ("template", b"x"),
        ("date", 20260101),
        ("template_variables", None),
        ("template_variables", {"x": {1}}),
        ("context", None),
        ("context", {"n_thread": 1}),
        ("max_length", 2.0),
        ("batch_tokens", None),
    ]
    for name, value in wrong:
        refused(good, name, **{name: value})
    # Rows that are none, and columns without a value as pandas has them.
    refused([5], "must be a mapping")
    refused([{5: 6}], "it has 5")
    refused([{"tools": "[" * 100_000, "messages": [{"role": "user", "content": "x"}]}], "JSON|template")
    refused(good, "on_error", on_error="x")
    refused(good, "YYYY-MM-DD", date="today")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OSError, match="out"):
        dataset.write(tiny_model, good, tmp_path / "out", Options(layers=[1]))


def test_a_folder_of_something_else_is_left_alone(tiny_model: lt.Model, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(lt.InvalidInputError, match=r"not empty and holds no llamatap\.json"):
        dataset.write(tiny_model, [{"input_ids": [5, 6]}], tmp_path, Options(layers=[1], resume=True))
    assert visible_files(tmp_path) == [Path("thesis.txt")]


def test_no_room_is_told_before_the_start(
    tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000}))
    rows = random_rows(2, 40)
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes more, and 10,000 are free"):
        dataset.write(tiny_model, rows, tmp_path / "out", Options(layers=[1]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("world_size", [2, 5])
def test_workers_write_the_same_files(tiny_model: lt.Model, tmp_path: Path, world_size: int) -> None:
    rows = random_rows(3, 60)
    dataset.write(tiny_model, rows, tmp_path / "one", Options(layers=[1, 2], batch_tokens=100))
    complete = []
    for rank in reversed(range(world_size)):
        options = Options(layers=[1, 2], batch_tokens=100, rank=rank, world_size=world_size)
        report = dataset.write(tiny_model, rows, tmp_path / "many", options)
        complete.append(report.complete)
        assert 0 < report.n_written < 60
    assert complete == [False] * (world_size - 1) + [True]
    assert_same(tmp_path / "many", tmp_path / "one")
