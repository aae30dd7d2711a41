"""Files of states: what their metadata keeps, and the files of others that load.

Oracles: the safetensors library as another reader; JSON's own equality.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.numerics import EXACT

import llamatap as lt
from llamatap import connectors
from llamatap.__main__ import main
from llamatap.storage.safetensors_metadata import from_metadata, to_metadata

VALUES: dict[str, Any] = {
    "integer": 3,
    "text of an integer": "3",
    "text of a list": "[1, 2]",
    "text of null": "null",
    "null": None,
    "truth": False,
    "float": 0.1,
    "large": 2**70,
    "list": [1, "2", None, {"a": []}],
    "object": {"a": {"b": [True]}, "": ""},
    "empty": "",
    "letters": '灯塔 🗼 \x00 "quoted"',
}


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="np") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize("name", VALUES)
def test_details_come_back_as_they_were(name: str, tiny_model: lt.Model, tmp_path: Path) -> None:
    states = lt.extract(tiny_model, "abc").with_details(step=VALUES[name])
    path = tmp_path / "x.safetensors"
    states.save(path)
    again = lt.States.load(path)
    assert again.provenance["step"] == VALUES[name]
    assert type(again.provenance["step"]) is type(VALUES[name])
    assert again.provenance == states.provenance
    # A second time, of what was loaded.
    again.with_details(other=1).save(path)
    assert lt.States.load(path).provenance == {**states.provenance, "other": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
# Any text, and text that could be taken for JSON.
texts = st.text() | json_values.map(json.dumps)


@pytest.mark.fuzz
@settings(derandomize=True, deadline=None, database=None)
@given(fields=st.dictionaries(st.text().filter(lambda key: key != "json_keys"), json_values | texts))
def test_any_json_value_survives(fields: dict[str, Any]) -> None:
    metadata = to_metadata(fields)
    assert all(isinstance(value, str) for value in metadata.values())
    found = from_metadata(metadata)
    assert found == fields
    # True is 1 to Python.
    assert json.dumps(found, sort_keys=True) == json.dumps(fields, sort_keys=True)


@pytest.mark.fuzz
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(text=st.text(st.characters(codec=None), max_size=8))
def test_texts_that_are_no_utf8_are_written_too(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Names of files may hold such text."""
    path = tmp_path_factory.mktemp("text") / "x.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path, to_metadata({"model": text + "\udcff", "plain": "a"}))
    assert from_metadata(metadata_of(path)) == {"model": text + "\udcff", "plain": "a"}
    assert metadata_of(path)["plain"] == "a"


def test_other_readers_find_strings_as_they_are_and_json(tiny_model: lt.Model, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    lt.extract(tiny_model, "abc", [1, "norm"]).with_details(step=3, note="3").save(path)
    metadata = metadata_of(path)
    assert (metadata["arch"], metadata["note"], metadata["step"]) == ("llama", "3", "3")
    assert json.loads(metadata["layers"]) == [1, "norm"]
    keys = json.loads(metadata["json_keys"])
    assert {"layers", "step", "n_layer", "flash_attention"} <= set(keys)
    assert not {"note", "arch", "model_sha256"} & set(keys)


def test_files_of_earlier_versions_load(tiny_model: lt.Model, tmp_path: Path) -> None:
    """They do not say which values are JSON."""
    states = lt.extract(tiny_model, "abc", max_length=2)
    path = tmp_path / "x.safetensors"
    provenance = {
        key: value for key, value in states.provenance.items() if key not in ("prompt_tokens", "truncated")
    }
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in provenance.items()
    }
    save_file({"hidden_states": states.array, "tokens": states.tokens}, path, metadata | {"step": "3"})
    again = lt.States.load(path)
    assert again.provenance == {**provenance, "step": "3"}
    assert np.array_equal(again[-2], states[-2])
    assert not again.truncated


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"step": np.int64(3)}, "JSON"),
        ({"step": float("nan")}, "JSON"),
        ({"step": {1, 2}}, "JSON"),
        ({"layers": [1]}, "layers cannot be given"),
        ({"norm": "x", "dtype": "y"}, "dtype, norm cannot be given"),
        ({"json_keys": []}, "json_keys cannot be given"),
    ],
)
def test_details_that_files_could_not_keep_are_refused(
    details: dict[str, Any], message: str, tiny_model: lt.Model
) -> None:
    with pytest.raises(lt.InvalidInputError, match=message):
        lt.extract(tiny_model, "abc").with_details(**details)


def test_some_layers_of_loaded_states_keep_their_provenance(tiny_model: lt.Model, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    lt.extract(tiny_model, "abc", [1, "norm", 2]).with_details(step=None).save(path)
    again = lt.States.load(path)
    some = again.select(["norm", 1])
    expected = {**again.provenance, "layers": ["norm", 1], "norm": ["post", "pre"]}
    assert some.provenance == expected
    assert expected["step"] is None


def test_a_name_of_another_format_is_refused(tiny_model: lt.Model, tmp_path: Path) -> None:
    states = lt.extract(tiny_model, "abc", [1])
    for name in ("x.npy", "x.PT"):
        with pytest.raises(lt.InvalidInputError, match=r"safetensors, not as \.\w+: name it x\.safetensors"):
            states.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    for name in ("x", "x.v2"):
        states.save(tmp_path / name)
        assert np.array_equal(lt.States.load(tmp_path / name).array, states.array)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Python's own error: lt.Error is not its base, as docs/errors.md says."""
    with pytest.raises(FileNotFoundError, match="expected a safetensors file") as caught:
        lt.States.load(tmp_path / "x.safetensors")
    assert not isinstance(caught.value, lt.Error)


@pytest.mark.parametrize("layers", [[-2], [1, "norm"]])
def test_files_of_encode_load(
    layers: list[lt.LayerId], tiny_path: Path, tiny_model: lt.Model, tmp_path: Path
) -> None:
    preset, path = tmp_path / "mine.toml", tmp_path / "x.safetensors"
    preset.write_text(
        f'name = "mine"\n[prompt]\ntemplate = "<{{{{ prompt }}}}>"\nmax_length = 8\n[states]\nrows = "2:"\n'
        f'convention = "llamatap"\nlayers = {json.dumps(layers)}\n'
    )
    assert main(["encode", str(tiny_path), "abcdefghij", "--preset", str(preset), "-o", str(path)]) == 0
    expected = lt.extract(tiny_model, "<abcdefghij>", layers, max_length=8, window=(2, None))
    again = lt.States.load(path)
    assert again.layers == expected.layers
    assert np.array_equal(again.array, expected.array)
    assert again.tokens.tolist() == expected.tokens.tolist()
    assert again.provenance == {**expected.provenance, "preset": "mine"}
    assert again.truncated


def test_files_of_connectors_and_data_sets_load(tiny_model: lt.Model, tmp_path: Path) -> None:
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        expected = extractor("abc", [1, 2, 3, -1])
    connectors.FileConnector(tmp_path / "c").put(expected, index=0)
    again = lt.States.load(tmp_path / "c" / "hs_0.safetensors")
    assert np.array_equal(again.array, expected.array)
    assert again.tokens.tolist() == expected.tokens.tolist()
    assert again.provenance == expected.provenance


@pytest.mark.parametrize("change", ["of one layer", "no tokens", "tokens beyond", "tokens that are none"])
def test_files_that_hold_something_else_are_refused(
    change: str, tiny_model: lt.Model, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    lt.extract(tiny_model, "abc", [1, 2]).save(path)
    tensors, metadata = load_file(path), metadata_of(path)
    if change == "of one layer":
        tensors["hidden_states"] = tensors["hidden_states"][:, 0].copy()
    elif change == "no tokens":
        del tensors["tokens"]
    elif change == "tokens beyond":
        tensors["tokens"] = tensors["tokens"].astype(np.int64) + 2**32
    else:
        tensors["tokens"] = tensors["tokens"].astype(np.float32) + 0.5
    save_file(tensors, path, metadata)
    with pytest.raises(lt.InvalidInputError, match="holds no states"):
        lt.States.load(path)


numpy_2 = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 never asks")


@numpy_2
def test_a_copy_that_was_forbidden_is_refused(tiny_model: lt.Model) -> None:
    states = lt.extract(tiny_model, "abc")
    for dtype in ("float64", np.float16, np.int32):
        with pytest.raises(ValueError, match="copy"):
            np.array(states, dtype=dtype, copy=False)
        with pytest.raises(ValueError, match="copy"):
            np.asarray(states, dtype=dtype, copy=False)
    for same in (None, "float32", np.dtype(np.float32)):
        assert np.asarray(states, dtype=same, copy=False) is states.array
        assert np.shares_memory(np.array(states, dtype=same, copy=False), states.array)


def test_copies_are_made_where_they_are_needed_or_asked_for(tiny_model: lt.Model) -> None:
    states = lt.extract(tiny_model, "abc")
    assert np.array_equal(np.asarray(states, "float64"), states.array.astype(np.float64))
    for copied in (np.array(states), np.array(states, dtype="float32"), np.array(states, dtype="float16")):
        assert not np.shares_memory(copied, states.array)
        assert copied.flags.writeable
    # The calls that NumPy 1 makes.
    assert states.__array__() is states.array
    assert states.__array__(np.dtype(np.float32)) is states.array
    assert states.__array__(np.dtype(np.float64)).dtype == np.float64


@pytest.mark.parametrize(("max_length", "truncated"), [(None, False), (3, True), (4, False), (5, False)])
def test_states_say_whether_the_prompt_was_cut(
    max_length: int | None, truncated: bool, tiny_model: lt.Model, tmp_path: Path
) -> None:
    for prompt in ("abc", [1, 5, 6, 7]):
        states = lt.extract(tiny_model, prompt, max_length=max_length, window=(1, None))
        states.save(tmp_path / "x.safetensors")
        for found in (
            states,
            lt.States.load(tmp_path / "x.safetensors"),
            states.with_details(a=1),
            states.select(-2),
        ):
            assert found.truncated is truncated
            assert (found.provenance["truncated"], found.provenance["prompt_tokens"]) == (truncated, 4)
    with tiny_model.context(n_ctx=64) as context, context.tap() as tap:
        context.decode(lt.Batch.of([5]))
        assert tap.states.truncated is False


ODD_FIELDS: dict[str, dict[str, str]] = {
    "deep layers": {"layers": "[" * 200_000},
    "deep provenance": {"provenance": "[" * 200_000},
    "deep json_keys": {"json_keys": "[" * 200_000},
    "n_layer a text": {"n_layer": '"x"'},
    "n_layer null": {"n_layer": "null"},
    "n_layer 0": {"n_layer": "0"},
    "n_layer a float": {"n_layer": "2.0"},
    "n_embd a text": {"n_embd": '"x"'},
    "n_embd a float": {"n_embd": "4.0"},
    "layers out of range": {"layers": "[99, 1]"},
    "layers negative": {"layers": "[-1, 1]"},
    "layers of texts": {"layers": '["x", "y"]'},
    "layers an object": {"layers": '{"1": 1, "2": 2}'},
    "layers truths": {"layers": "[false, true]"},
    "truncated a text": {"truncated": '"no"'},
}


def write_states(path: Path, dtype: Any = np.float32, **fields: str) -> Path:
    """A file of two tokens, two layers and n_embd 4, of a model of two blocks."""
    metadata = {"layers": "[0, 1]", "n_layer": "2", "n_embd": "4"} | fields
    tensors = {"hidden_states": np.zeros((2, 2, 4), dtype), "tokens": np.arange(2, dtype=np.int32)}
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize("name", ODD_FIELDS)
def test_odd_metadata_is_refused(name: str, tmp_path: Path) -> None:
    assert lt.States.load(write_states(tmp_path / "good.safetensors")).layers == (0, 1)
    with pytest.raises(lt.InvalidInputError, match="holds no states"):
        lt.States.load(write_states(tmp_path / "odd.safetensors", **ODD_FIELDS[name]))


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.bool_])
def test_states_of_other_dtypes_are_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(lt.InvalidInputError, match="float32, float16 or bfloat16"):
        lt.States.load(write_states(tmp_path / "odd.safetensors", dtype))


def test_token_ids_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    fields = {"layers": [0], "n_layer": 2, "n_embd": 4, "token_ids": [2**40]}
    save_file({"prompt_embeds": np.zeros((1, 1, 4), np.float32)}, path, metadata=to_metadata(fields))
    with pytest.raises(lt.InvalidInputError, match="holds no states"):
        lt.States.load(path)
