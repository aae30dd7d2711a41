"""``llamatap encode``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.numerics import computes_with_nan
from support.presets import PRESET
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.__main__ import main


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(PRESET.replace("LAYERS", "[-2]"))
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("layers", "own"), [("[-2]", [3]), ("[1, -1]", [1, "norm"])])
def test_the_file_holds_what_a_pipeline_reads(
    layers: str,
    own: list[lt.LayerId],
    dtype: str,
    tiny_path: Path,
    tiny_model: lt.Model,
    preset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    preset.write_text(PRESET.replace("LAYERS", layers))
    out = tmp_path / "x.safetensors"
    command = ["encode", str(tiny_path), "--preset", str(preset), "{{ a }} b", "-o", str(out)]
    assert main([*command, *(["--dtype", dtype] if dtype != "float32" else [])]) == 0
    expected = lt.extract(tiny_model, "<{{ a }} b>", own, max_length=8, window=(2, None), dtype=dtype)
    with safe_open(out, framework="np") as file:
        assert set(file.keys()) == {"prompt_embeds", "attention_mask"}
        embeds, mask = file.get_tensor("prompt_embeds"), file.get_tensor("attention_mask")
        metadata = file.metadata()
    assert embeds.dtype.name == dtype
    assert embeds.shape == ((6, 64) if len(own) == 1 else (6, 2, 64))
    assert np.array_equal(embeds.reshape(expected.array.shape), expected.array)
    assert mask.dtype == np.int64
    assert mask.tolist() == [1] * 6
    assert metadata["preset"] == "mine"
    assert json.loads(metadata["layers"]) == own
    assert json.loads(metadata["norm"]) == ["post" if layer == "norm" else "pre" for layer in own]
    assert metadata["convention"].startswith("llamatap")
    assert metadata["model_sha256"] == hashlib.sha256(tiny_path.read_bytes()).hexdigest()
    assert json.loads(metadata["max_length"]) == 8
    assert metadata["dtype"] == dtype
    assert f"prompt_embeds {embeds.shape} {dtype}, preset mine" in capsys.readouterr().out
    assert {entry.name for entry in tmp_path.iterdir()} == {"mine.toml", "x.safetensors"}


@computes_with_nan
@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [(np.nan, "float32", "NaN or infinity in layers"), (1e8, "float16", "float16 ends at 65504")],
)
def test_what_is_not_finite_is_not_written(
    weight: float,
    dtype: str,
    message: str,
    preset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][ord("b") + 3] = weight
    path = tiny.write(tmp_path / "broken.gguf")
    out = tmp_path / "x.safetensors"
    command = ["encode", str(path), "--preset", str(preset), "ab", "--dtype", dtype, "-o", str(out)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "allow" not in error
    assert {entry.name for entry in tmp_path.iterdir()} == {"mine.toml", "broken.gguf"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "a", "--preset", "z-image", "-o", "x"], "preset z-image is made for Qwen3-4B"),
        (["MODEL", "a", "--preset", "flux", "-o", "x"], "no preset is called 'flux'; there are z-image"),
        (["MODEL", "a", "--preset", "missing.toml", "-o", "x"], "missing.toml"),
        (["missing.gguf", "a", "--preset", "z-image", "-o", "x"], "missing.gguf"),
        (["MODEL", "a", "--preset", "PRESET", "-o", "nowhere/x"], "no such folder: nowhere"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tiny_path: Path,
    preset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": str(tiny_path), "PRESET": str(preset)}
    assert main(["encode", *(names.get(item, item) for item in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]


def test_a_prompt_that_was_cut_is_told_of(
    tiny_path: Path, preset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template gives BOS, "<", the prompt and ">"; the first eight tokens are kept."""
    out = tmp_path / "x.safetensors"
    for prompt, n, truncated in (("abcde", 8, "false"), ("abcdef", 9, "true")):
        assert main(["encode", str(tiny_path), "--preset", str(preset), prompt, "-o", str(out)]) == 0
        error = capsys.readouterr().err
        with safe_open(out, framework="np") as file:
            metadata = file.metadata()
        assert (metadata["truncated"], metadata["prompt_tokens"]) == (truncated, str(n))
        assert "truncated" in json.loads(metadata["json_keys"])
        if truncated == "true":
            expected = "max_length of preset mine truncated the prompt of 9 tokens to the first 8"
            assert error == f"llamatap: warning: {expected}\n"
        else:
            assert error == ""


def test_a_prompt_without_rows_names_the_preset_and_them(
    tiny_path: Path, preset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset.write_text(PRESET.replace("LAYERS", "[-2]").replace("2:", "6:"))
    assert main(["encode", str(tiny_path), "--preset", str(preset), "ab", "-o", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert 'preset mine keeps the rows "6:" of a text, but this one has 5 tokens' in error
    assert error.count("\n") == 1


def test_a_file_is_whole_or_as_it_was(
    tiny_path: Path,
    preset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full_disk(_: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    out = tmp_path / "x.safetensors"
    out.write_bytes(b"before")
    assert main(["encode", str(tiny_path), "--preset", str(preset), "abc", "-o", str(out)]) == 1
    assert "no space left" in capsys.readouterr().err
    assert out.read_bytes() == b"before"
    assert {entry.name for entry in tmp_path.iterdir()} == {"mine.toml", "x.safetensors"}


def test_details_stay_with_states(tiny_model: lt.Model, tmp_path: Path) -> None:
    states = lt.extract(tiny_model, "abc")
    more = states.with_details(preset="mine")
    assert more.provenance == {**states.provenance, "preset": "mine"}
    assert "preset" not in states.provenance
    assert np.shares_memory(more.array, states.array)
    more.save(tmp_path / "x.safetensors")
    again = lt.States.load(tmp_path / "x.safetensors")
    assert again.with_details(preset="yours").provenance == {**states.provenance, "preset": "yours"}
    assert again.provenance["preset"] == "mine"
