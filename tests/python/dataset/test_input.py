"""Input files and folders of every accepted form, and rows that are not samples."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.datasets import assert_same, read_states, visible_files

import llamatap as lt
from llamatap import dataset
from llamatap.dataset import rows_to_samples
from llamatap.dataset.options import DatasetOptions

Options = dataset.Options

GOOD = {"input_ids": [5, 6, 7]}


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        # NumPy makes floats, or objects, of integers beyond 64 bits.
        ([5, 2**63], "sequence of integers"),
        ([5, 2**70], "sequence of integers"),
        ([-(2**63), 5], "found -9223372036854775808..5"),
        ([2**31, 5], "found 5..2147483648"),
        ([5.0, 6.0], "sequence of integers"),
        ([5, float("nan")], "sequence of integers"),
        ([5, None], "sequence of integers"),
        ([True, False], "sequence of integers"),
        (["5", "6"], "sequence of integers"),
        ([[5, 6]], "one-dimensional"),
        ([[5], [6, 7]], "flat sequence"),
        ({"a": 1}, "sequence of integers"),
        (None, "needs input_ids, messages"),
    ],
    ids=str,
)
def test_ids_that_are_none(tiny_model: lt.Model, tmp_path: Path, ids: Any, why: str) -> None:
    job = dataset.Job(tiny_model, [GOOD, {"input_ids": ids}, GOOD], tmp_path / "o", Options(layers=[1]))
    assert list(job.skipped) == [1]
    assert why in job.skipped[1]
    assert [sample.row for sample in job.samples] == [0, 2]
    with pytest.raises(lt.InvalidInputError, match=f"row 1: .*{re.escape(why)}"):
        dataset.Job(
            tiny_model, [GOOD, {"input_ids": ids}], tmp_path / "o", Options(layers=[1], on_error="stop")
        )


def test_lines_as_other_systems_write_them(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines; and one line that is no UTF-8."""
    lines = [b'\xef\xbb\xbf{"input_ids": [5, 6]}', b'{"text": "a\xff"}', b"", b"  ", '{"text": "ü"}'.encode()]
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(lines))
    first, spoilt, last = dataset.read_rows(tmp_path / "in.jsonl")
    assert first == {"input_ids": [5, 6]}
    assert last == {"text": "ü"}
    assert isinstance(spoilt, lt.InvalidInputError)
    assert "line 2 is not JSON" in str(spoilt)


def test_columns_of_any_width(tmp_path: Path) -> None:
    texts = pyarrow.array(["ab", "cd", "ab"], pyarrow.large_string())
    ids: list[list[int]] = [[5, 6], [7], [8, 9, 10]]
    for kind in (pyarrow.list_, pyarrow.large_list):
        for width in (pyarrow.int16(), pyarrow.int32(), pyarrow.uint64()):
            table = pyarrow.table(
                {"text": texts.dictionary_encode(), "input_ids": pyarrow.array(ids, kind(width))}
            )
            parquet.write_table(table, tmp_path / "in.parquet")
            rows: list[Any] = list(dataset.read_rows(tmp_path / "in.parquet"))
            assert [row["text"] for row in rows] == ["ab", "cd", "ab"]
            assert [row["input_ids"] for row in rows] == ids


def test_folders_of_any_name(tiny_model: lt.Model, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    rows: list[dict[str, Any]] = [GOOD, {"text": "plain"}]
    for name in ("link", "a b ü 漢", "deep/er", "there"):
        options = Options(layers=[1], resume=name == "there")
        assert dataset.write(tiny_model, rows, tmp_path / name, options).complete
    for name in ("a b ü 漢", "deep/er"):
        assert_same(tmp_path / name, tmp_path / "there")
    assert (tmp_path / "link").is_symlink()


def test_a_template_that_fails_on_a_sample(tiny_model: lt.Model, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no such thing') }}{% endif %}"
        "{% if m.content == 'odd' %}{{ m.content.x.y }}{% endif %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = [
        {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "Yo"}]}
        for said in ("good", "bad", "odd", "good")
    ]
    report = dataset.write(tiny_model, rows, tmp_path / "o", Options(layers=[1], template=template))
    assert report.n_samples == 2
    assert list(report.skipped) == [1, 2]
    assert "no such thing" in report.skipped[1]
    assert "no attribute" in report.skipped[2]


def test_samples_longer_than_the_context(tiny_model: lt.Model, tmp_path: Path) -> None:
    """They are cut to what the model was trained for, or to n_ctx: the states of what stays are the same."""
    tokens = np.random.default_rng(31).integers(3, 250, 300).tolist()
    for name, options in (("n_ctx", {"context": {"n_ctx": 256}}), ("max", {"max_length": 256})):
        job = dataset.Job(
            tiny_model, [{"input_ids": tokens}], tmp_path / name, Options(layers=[1], **options)
        )
        assert job.n_truncated == 1
        assert job.run().n_tokens == 256
    ids, cut, _ = read_states(tmp_path / "n_ctx" / "hidden_states" / "hs_0.safetensors")
    assert ids.tolist() == tokens[:256]
    assert cut.tobytes() == read_states(tmp_path / "max" / "hidden_states" / "hs_0.safetensors")[1].tobytes()
    too_long = [{"input_ids": [5] * (tiny_model.n_ctx_train + 1)}]
    job = dataset.Job(tiny_model, too_long, tmp_path / "o", Options(layers=[1]))
    assert job.samples.lengths.tolist() == [tiny_model.n_ctx_train]
    assert visible_files(tmp_path / "o") == []


def test_a_stream_that_was_damaged(tmp_path: Path) -> None:
    """Offsets that lead out of the file are found before they are followed."""
    table = pyarrow.table({"text": ["hello"] * 300})
    path = tmp_path / "x.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    assert len(list(dataset.read_rows(tmp_path))) == 300
    data = bytearray(path.read_bytes())
    offsets = data.find(np.arange(0, 25, 5, dtype="<i4").tobytes())
    data[offsets + 4 * 10 + 3] = 0x7F
    path.write_bytes(data)
    with pytest.raises(lt.InvalidInputError, match=r"x\.arrow is not an Arrow stream"):
        list(dataset.read_rows(tmp_path))


def test_columns_without_a_value(tiny_model: lt.Model, tmp_path: Path) -> None:
    """Columns of other rows are null, or NaN as pandas has it."""
    nothing = float("nan")
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6], "loss_mask": None, "messages": None},
        {"input_ids": [5, 6], "loss_mask": nothing, "text": nothing},
    ]
    report = dataset.write(tiny_model, rows, tmp_path / "o", Options(layers=[1]))
    assert report.n_samples == 2
    with pytest.raises(lt.InvalidInputError, match="needs input_ids, messages, conversations or text"):
        dataset.write(tiny_model, [{"messages": nothing}], tmp_path / "p", Options(layers=[1]))


def test_reasons_that_are_no_unicode(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [5, 6]}, {"\ud800": 1}]
    report = dataset.write(tiny_model, rows, tmp_path / "o", Options(layers=[1]))
    assert report.complete
    (entry,) = map(json.loads, (tmp_path / "o" / "skipped.jsonl").read_text().splitlines())
    assert entry == {"row": 1, "reason": report.skipped[1]}
    assert "\ud800" in entry["reason"]


@pytest.mark.parametrize("layout", ["speculators", "npy"])
def test_a_folder_whose_files_were_removed(tiny_model: lt.Model, tmp_path: Path, layout: str) -> None:
    """States left in the hidden folder by another data set are not reused."""
    folder = tmp_path / "o"
    options: dict[str, Any] = {"layers": [1, 2], "layout": layout, "batch_tokens": 32}
    rng = np.random.default_rng(3)
    first, second = ([{"input_ids": rng.integers(3, 250, 10).tolist()} for _ in range(12)] for _ in range(2))

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset.write(tiny_model, first, folder, Options(**options), progress=progress)
    hidden = folder / ".llamatap"
    assert [path for name in ("computed", "written") for path in hidden.glob(name)]
    (hidden / "lost").mkdir()
    (hidden / "lost" / "3").write_text("NaN")
    for path in folder.iterdir():
        if path.is_dir() and path != hidden:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    assert dataset.write(tiny_model, second, folder, Options(**options)).n_written == 12
    dataset.write(tiny_model, second, tmp_path / "calm", Options(**options))
    assert_same(folder, tmp_path / "calm")


@pytest.mark.parametrize(
    ("cores", "quota", "expected"), [(8, 1.5, 2), (8, 0.2, 1), (3, None, 3), (64, None, 4)]
)
def test_threads_are_within_the_quota(
    tiny_model: lt.Model, monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, expected: int
) -> None:
    made: list[int] = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, max_workers: int, name: str) -> None:
            made.append(max_workers)
            super().__init__(max_workers, name)

    monkeypatch.setattr("llamatap._threads._physical_cores", lambda: cores)
    monkeypatch.setattr("llamatap._system_limits.cpu_quota", lambda: quota)
    monkeypatch.setattr("llamatap.dataset.rows_to_samples.ThreadPoolExecutor", Threads)
    rows_to_samples.prepare(tiny_model, [GOOD], DatasetOptions(max_length=64), lambda *_: None)
    assert made == [expected]
