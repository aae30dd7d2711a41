"""Data sets of states to train on: what is read into memory is asked for first, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import _system_limits, dataset

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from llamatap.train.drafters.sample_tensors import SampleTensors  # noqa: E402
from llamatap.train.drafters.state_sources import stored_states  # noqa: E402

LAYERS: list[lt.LayerId] = [1, 2, 0, 4]
LENGTHS = (9, 3, 14, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with lt.Model(TinyLlama(seed=3).write(tmp_path_factory.mktemp("model") / "tiny.gguf")) as found:
        assert found.n_layer == 4
        yield found


def written(model: lt.Model, folder: Path, layout: Any, dtype: str = "bfloat16") -> Path:
    rng = np.random.default_rng(1)
    rows = [
        {"input_ids": rng.integers(3, 250, n).tolist(), "loss_mask": [0] + [1] * (n - 1)} for n in LENGTHS
    ]
    texts = folder.with_suffix(".jsonl")
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset.write(model, texts, folder, dataset.Options(layout=layout, layers=[2, 0, 1], dtype=dtype))
    return folder


def leave_out(folder: Path, sample: int) -> None:
    """As if the states of a sample of the layout npy had not been finite."""
    index = np.load(folder / "index.npy")
    np.save(folder / "index.npy", np.delete(index, sample, 0))


def same(a: SampleTensors, b: SampleTensors) -> bool:
    return (
        a.offsets == b.offsets
        and torch.equal(a.tokens, b.tokens)
        and torch.equal(a.loss_mask, b.loss_mask)
        and all(torch.equal(*pair) for pair in zip(a.columns, b.columns, strict=True))
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_layouts_hold_the_same(dtype: str, model: lt.Model, tmp_path: Path) -> None:
    npy, about = stored_states(written(model, tmp_path / "npy", "npy", dtype), LAYERS)
    speculators, _ = stored_states(written(model, tmp_path / "speculators", "speculators", dtype), LAYERS)
    assert same(npy, speculators)
    assert npy.lengths.tolist() == list(LENGTHS)
    assert about["model"] == "tiny.gguf"
    with lt.Extractor(model) as extract:
        (expected,) = extract([npy.tokens[:9].tolist()], LAYERS)
    for found, values in zip(npy.columns, np.moveaxis(expected.array, 1, 0), strict=True):
        # Computed in other batches, and rounded to 8 bits, in float16 before that to 11.
        assert np.abs(found[:9].float().numpy() - values).max() <= 2**-7 * np.abs(values).max()


def test_samples_that_were_left_out(model: lt.Model, tmp_path: Path) -> None:
    whole, _ = stored_states(written(model, tmp_path / "npy", "npy"), LAYERS)
    leave_out(tmp_path / "npy", 1)
    found, _ = stored_states(tmp_path / "npy", LAYERS)
    assert found.lengths.tolist() == [9, 14, 5]
    for left_out, rows in zip(found.columns, whole.columns, strict=True):
        assert torch.equal(left_out, torch.cat([rows[:9], rows[12:]]))


@pytest.mark.parametrize(
    ("layout", "dtype", "advice"),
    [
        ("speculators", "bfloat16", "--layout npy"),
        ("npy", "float32", "of which no row was left out is read from the disk"),
        ("npy gaps", "bfloat16", "of which no row was left out is read from the disk"),
    ],
)
def test_states_that_do_not_fit_into_memory(
    layout: str,
    dtype: str,
    advice: str,
    model: lt.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = written(model, tmp_path / "states", layout.split()[0], dtype)
    if layout == "npy gaps":
        leave_out(folder, 0)
    n_tokens = sum(LENGTHS[layout == "npy gaps" :])
    n_bytes = 2 * n_tokens * len(LAYERS) * model.n_embd
    monkeypatch.setattr(_system_limits, "_SMALLEST_CHECKED", 0)
    monkeypatch.setattr(_system_limits, "available_memory", lambda: n_bytes - 1)
    # Nothing is taken before the question.
    monkeypatch.setattr(SampleTensors, "add", None)
    with pytest.raises(lt.OutOfMemoryError, match=f"the states of {n_tokens} tokens in .* take .*{advice}"):
        stored_states(folder, LAYERS)
    monkeypatch.undo()
    monkeypatch.setattr(_system_limits, "_SMALLEST_CHECKED", 0)
    monkeypatch.setattr(_system_limits, "available_memory", lambda: n_bytes)
    assert stored_states(folder, LAYERS)[0].n_tokens == n_tokens


def test_what_stays_on_the_disk_needs_no_memory(
    model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(model, tmp_path / "states", "npy")
    monkeypatch.setattr(_system_limits, "_SMALLEST_CHECKED", 0)
    monkeypatch.setattr(_system_limits, "available_memory", lambda: 1)
    assert stored_states(folder, LAYERS)[0].n_tokens == sum(LENGTHS)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("npy", "layer_1.npy"),
        ("npy", "index.npy"),
        ("npy", "tokens.npy"),
        ("speculators", "hidden_states/hs_0.safetensors"),
        ("speculators", "hidden_states/hs_2.safetensors"),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "empty"])
def test_damage_is_named(layout: str, name: str, damage: str, model: lt.Model, tmp_path: Path) -> None:
    path = written(model, tmp_path / "states", layout) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": path.read_bytes()[:90], "garbage": b"garbage " * 20, "empty": b""}[damage])
    with pytest.raises(
        lt.InvalidInputError, match=r"states is damaged: .*; make the data set again"
    ) as caught:
        stored_states(tmp_path / "states", LAYERS)
    assert "\n" not in str(caught.value)
