"""What files and folders may be like, and rows that are none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from datasets_of import assert_same, read_states, visible_files
from pyarrow import parquet

import llamatap as lt
from llamatap import dataset

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
    assert "line 2 is no JSON" in str(spoilt)


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
