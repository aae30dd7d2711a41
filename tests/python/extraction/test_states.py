from __future__ import annotations

import gc
import hashlib
import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.numerics import EXACT
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.storage.file_hashes import file_sha256


@pytest.mark.slow
def test_the_array_outlives_model_and_context(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    states = lt.extract(model, [5, 6, 7], [1, -1])
    array, layer = states.array, states[-1]
    copy, layer_copy = array.copy(), layer.copy()
    model.close()
    del states, model
    gc.collect()
    junk = [np.full(1000, np.nan) for _ in range(1000)]
    assert np.array_equal(array, copy)
    del array, junk
    gc.collect()
    assert np.array_equal(layer, layer_copy)
    assert not layer.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        layer[0, 0] = 1


def test_arrays_are_aligned_and_owned_by_nobody_else(tiny_model: lt.Model) -> None:
    first = lt.extract(tiny_model, [5, 6, 7], [1])
    second = lt.extract(tiny_model, [5, 6, 7], [1])
    assert not np.shares_memory(first.array, second.array)
    assert first.array.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_save_and_load(tiny_model: lt.Model, tmp_path: Path, dtype: str) -> None:
    states = lt.Extractor(tiny_model, **EXACT)([5, 6, 7], [-1, "norm", 0], dtype=dtype, window=(1, None))
    path = tmp_path / "states.safetensors"
    states.save(path)
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {"hidden_states", "tokens"}
        metadata = file.metadata()
    assert json.loads(metadata["layers"]) == [4, "norm", 0]
    assert json.loads(metadata["norm"]) == ["pre", "post", "pre"]
    assert metadata["model_sha256"] == hashlib.sha256(tiny_model.path.read_bytes()).hexdigest()
    again = lt.States.load(path)
    assert again.array.dtype == states.array.dtype
    assert np.array_equal(again.array, states.array)
    assert np.array_equal(again["norm"], states["norm"])
    assert np.array_equal(again[-1], states[-1])
    assert again.tokens.tolist() == [6, 7]
    assert again.provenance == states.provenance
    assert [entry.name for entry in tmp_path.iterdir()] == ["states.safetensors"]


def test_loading_something_else_raises(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.States.load(tiny_path)
    with pytest.raises(FileNotFoundError):
        lt.States.load(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("pool", [None, "mean"])
def test_a_file_of_another_shape_than_it_tells_raises(
    tiny_model: lt.Model, tmp_path: Path, pool: Literal["mean"] | None
) -> None:
    path = tmp_path / "states.safetensors"
    lt.extract(tiny_model, [5, 6, 7], [1, 2], pool=pool).save(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    states = tensors["hidden_states"]
    assert lt.States.load(path).array.shape == states.shape
    for wrong in (states[..., :1, :], states[..., :8], states[:1], states.ravel(), states[None]):
        save_file({**tensors, "hidden_states": np.ascontiguousarray(wrong)}, path, metadata=metadata)
        with pytest.raises(lt.InvalidInputError, match="but the metadata says"):
            lt.States.load(path)


def test_values_that_are_not_finite_are_told_of_and_not_written(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["blk.2.ffn_down.weight"] *= 1e6
    path = tmp_path / "states.safetensors"
    with lt.Model(tiny.write(tmp_path / "large.gguf")) as model:
        wide = lt.extract(model, [5, 6, 7], [1, 2, 3, "norm"], dtype="bfloat16")
        assert wide.nonfinite_layers() == []
        narrow = lt.extract(model, [5, 6, 7], [1, 2, 3, "norm"], dtype="float16")
        assert narrow.nonfinite_layers() == [3]
        assert lt.extract(model, [5, 6, 7], [3], dtype="float16", pool="mean").nonfinite_layers() == [3]
        with pytest.raises(lt.InvalidInputError, match=r"layers \[3\] \(float16\).*take bfloat16"):
            narrow.save(path)
        assert not path.exists()
        narrow.save(path, allow_nonfinite=True)
        assert np.isinf(lt.States.load(path)[3]).any()
        wide.save(path)


def test_provenance_says_what_the_states_are(smollm2: lt.Model) -> None:
    states = lt.extract(smollm2, "Hello", [-2, "norm"], max_length=5)
    found = states.provenance
    assert found["model"] == smollm2.path.name
    assert found["model_sha256"] == hashlib.sha256(smollm2.path.read_bytes()).hexdigest()
    assert (found["arch"], found["file_type"], found["n_layer"]) == ("llama", "Q4_1", 30)
    assert found["engine_commit"] == lt.build_config()["engine_commit"]
    assert found["llamatap_version"] == lt.__version__
    assert (found["backend"], found["type_k"], found["type_v"]) == ("CPU", "f16", "f16")
    assert isinstance(found["flash_attention"], bool)
    assert (found["layers"], found["norm"]) == ([29, "norm"], ["pre", "post"])
    assert found["max_length"] == 5


def test_a_replaced_file_is_not_hashed_as_the_loaded_one(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_path, path)
    with lt.Model(path) as model:
        states = lt.extract(model, [5], [1])
        path.unlink()
        path.write_bytes(b"another file")
        assert states.provenance["model_sha256"] is None


def test_hashes_are_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMATAP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = file_sha256(file)
    assert first == hashlib.sha256(b"one").hexdigest()
    index = tmp_path / "cache" / "sha256.json"
    index.write_text(index.read_text().replace(first, "remembered"))
    assert file_sha256(file) == "remembered"
    file.write_bytes(b"two!")
    assert file_sha256(file) == hashlib.sha256(b"two!").hexdigest()
    index.write_text("broken")
    assert file_sha256(file) == hashlib.sha256(b"two!").hexdigest()


def test_states_are_no_sequence_but_convert(tiny_model: lt.Model) -> None:
    states = lt.extract(tiny_model, [5, 6], [0, 1])
    assert np.asarray(states) is states.array
    assert np.asarray(states, np.float16).dtype == np.float16
    assert np.array(states, copy=True).flags.writeable
    with pytest.raises(TypeError):
        list(states)  # type: ignore[call-overload]


def test_a_missing_folder_is_not_made(tiny_model: lt.Model, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lt.extract(tiny_model, [5], [1]).save(tmp_path / "missing" / "states.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_layers_that_were_not_asked_for_raise(tiny_model: lt.Model) -> None:
    states = lt.extract(tiny_model, [5], [1, -1])
    assert np.array_equal(states[4], states[-1])
    with pytest.raises(lt.InvalidInputError, match=r"\[1, 4\]"):
        states[2]
    with pytest.raises(lt.InvalidInputError):
        states[9]
    assert "layers=[1, 4]" in repr(states)
