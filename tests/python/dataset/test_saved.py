"""Folders saved by the real `datasets` library, which `nox -s train` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.datasets import assert_same, random_rows, write_lines

import llamatap as lt
from llamatap import dataset

datasets = pytest.importorskip("datasets")

OPTIONS = dataset.Options(layers=[1, 2], batch_tokens=100)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_folder(tiny_model: lt.Model, tmp_path: Path, shards: int) -> None:
    rows = random_rows(41, 50)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=shards)
    assert len(list((tmp_path / "saved").glob("*.arrow"))) == shards
    report = dataset.write(tiny_model, tmp_path / "saved", tmp_path / "found", OPTIONS)
    assert (report.n_samples, report.complete) == (50, True)
    dataset.write(tiny_model, rows, tmp_path / "expected", OPTIONS)
    assert_same(tmp_path / "found", tmp_path / "expected")


def test_chats_of_a_saved_folder(tmp_path: Path) -> None:
    """A column's struct has all fields that any message has: the others are dropped again."""
    call = {"type": "function", "function": {"name": "f"}}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}], "other": 1},
        {
            "messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [call]}],
            "other": 2,
        },
        {"messages": [{"role": "user", "content": "é"}], "other": 3},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert list(dataset.read_rows(tmp_path / "saved")) == [{"messages": row["messages"]} for row in rows]


def test_a_part_of_a_data_set(tmp_path: Path) -> None:
    """`select` and `shuffle` are kept as indices until a data set is saved."""
    rows = random_rows(42, 20)
    whole = datasets.Dataset.from_list(rows)
    whole.shuffle(seed=3).select(range(5, 15)).save_to_disk(str(tmp_path / "saved"))
    expected = [whole.shuffle(seed=3)[i] for i in range(5, 15)]
    assert list(dataset.read_rows(tmp_path / "saved")) == expected


def test_splits(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows = random_rows(43, 12)
    splits = datasets.Dataset.from_list(rows).train_test_split(test_size=4, seed=1)
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(lt.InvalidInputError, match=r"holds splits \(test, train\): give the folder of one"):
        dataset.write(tiny_model, tmp_path / "saved", tmp_path / "o", OPTIONS)
    for name, count in (("train", 8), ("test", 4)):
        found = list(dataset.read_rows(tmp_path / "saved" / name))
        assert (len(found), found) == (count, list(splits[name]))


def test_what_was_written_is_read(tiny_model: lt.Model, tmp_path: Path) -> None:
    """The folder of a data set of states is itself such a folder."""
    rows = random_rows(44, 10)
    dataset.write(tiny_model, write_lines(tmp_path / "in.jsonl", rows), tmp_path / "o", OPTIONS)
    found = datasets.load_from_disk(str(tmp_path / "o")).with_format(None)
    assert [(row["input_ids"], row["loss_mask"]) for row in found] == [
        (row["input_ids"], row["loss_mask"]) for row in rows
    ]
