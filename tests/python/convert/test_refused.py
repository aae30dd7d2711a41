"""Checkpoints that no draft file can be made of: errors name what was expected and what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import LLAMA3, Eagle3Checkpoint, write_shards
from support.tiny import TinyLlama
from support.tiny_models import drafters

import llamatap as lt
from llamatap.__main__ import main
from llamatap.convert import to_checkpoint, to_gguf

Change = Callable[[Eagle3Checkpoint], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("target") / "target.gguf")


def said(**entries: Any) -> Change:
    """Entries of the config; those of the block in the format that has one."""

    def change(source: Eagle3Checkpoint) -> None:
        inner = source.config.get("transformer_layer_config", source.config)
        inner.update(entries)

    return change


def told(**entries: Any) -> Change:
    """Entries beside the block."""
    return lambda source: source.config.update(entries)


def plus(*names: str, rows: int = 64) -> Change:
    return lambda source: source.tensors.update({name: np.ones(rows, np.float32) for name in names})


def scaled(**entries: Any) -> Change:
    return said(rope_parameters={"rope_theta": 1e5, **entries})


FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))
BIAS = "layers.0.self_attn.q_proj.bias"
Q_NORM = "layers.0.self_attn.q_norm.weight"

#: What the engine's graph has no place for, and the words of the error.
NOT_COMPUTED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "fc_norm": (lambda one: (told(fc_norm=True)(one), plus(*FC_NORMS)(one)), ("fc_norm = True", *FC_NORMS)),
    "norm_output": (told(norm_output=True), ("norm_output = True",)),
    "both": (
        lambda one: (told(norm_output=True)(one), plus(*FC_NORMS, "norm_output.weight")(one)),
        ("norm_output = True", "norm_output.weight", *FC_NORMS),
    ),
    "a norm without its setting": (plus("input_norm.weight", rows=192), ("input_norm.weight",)),
    "a bias": (
        lambda one: (said(attention_bias=True)(one), plus(BIAS)(one)),
        ("attention_bias = True", BIAS),
    ),
    "a bias of the feed-forward": (said(mlp_bias=True), ("mlp_bias = True",)),
    "a scale": (plus("layers.0.self_attn.q_proj.weight_scale", rows=1), ("q_proj.weight_scale",)),
    "an unknown tensor": (plus("gate_of_mine"), ("gate_of_mine",)),
    "an unknown setting": (said(logit_scale=0.5), ("transformer_layer_config.logit_scale = 0.5",)),
    "an unknown setting beside the block": (told(parallel_drafting=True), ("parallel_drafting = True",)),
    "norms of heads": (lambda one: (said(model_type="qwen3")(one), plus(Q_NORM)(one)), ("'qwen3'", Q_NORM)),
    "no kind of block": (
        lambda one: one.config["transformer_layer_config"].pop("model_type"),
        ("transformer_layer_config.model_type",),
    ),
    "two layers": (
        lambda one: (said(num_hidden_layers=2)(one), plus("layers.1.hidden_norm.weight")(one)),
        ("num_hidden_layers = 2", "layers.1.hidden_norm.weight"),
    ),
    "another activation": (said(hidden_act="gelu"), ("hidden_act = 'gelu'",)),
    "a window": (said(sliding_window=512), ("sliding_window = 512",)),
    "a window of layers": (said(layer_types=["sliding_attention"]), ("layer_types = ['sliding_attention']",)),
    "dynamic rope": (scaled(rope_type="dynamic", factor=2.0), ("rope_type = 'dynamic'",)),
    "longrope": (scaled(rope_type="longrope", long_factor=[1.0]), ("rope_type = 'longrope'",)),
    "a part rotated": (
        scaled(rope_type="default", partial_rotary_factor=0.5),
        ("partial_rotary_factor = 0.5",),
    ),
    "rope sections": (scaled(rope_type="default", mrope_section=[4, 2, 2]), ("mrope_section",)),
    "quantised": (told(quantization_config={"quant_method": "fp8"}), ("quantization_config",)),
    "four layers of the target": (
        told(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]),
        ("[0, 1, 2, 3]", "takes 3"),
    ),
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_the_engine_would_not_compute_is_refused_by_name(
    name: str, target: Path, tmp_path: Path
) -> None:
    change, words = NOT_COMPUTED[name]
    source = Eagle3Checkpoint()
    change(source)
    with pytest.raises(lt.UnsupportedError, match="graph does not compute with") as caught:
        to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf")
    for word in words:
        assert word in str(caught.value)
    assert "input_layernorm" not in str(caught.value)
    assert not (tmp_path / "draft.gguf").exists()


@pytest.mark.parametrize("value", [True, False])
def test_a_setting_that_two_systems_read_differently_is_refused(
    value: bool, target: Path, tmp_path: Path
) -> None:
    source = Eagle3Checkpoint("eagle3")
    source.config["norm_output"] = value
    folder = source.write(tmp_path / "checkpoint")
    with pytest.raises(lt.UnsupportedError, match=f"norm_output = {value}.*SpecForge"):
        to_gguf(folder, target, tmp_path / "draft.gguf")
    # Whoever knows that it was the default says so.
    assert to_gguf(folder, target, tmp_path / "draft.gguf", ignore=["norm_output"]).path.exists()


def test_a_tensor_is_left_out_by_name_alone(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint()
    plus("unused.weight", "other.weight")(source)
    folder = source.write(tmp_path / "checkpoint")
    with pytest.raises(lt.UnsupportedError, match=r"with other\.weight$"):
        to_gguf(folder, target, tmp_path / "draft.gguf", ignore=["unused.weight"])
    assert to_gguf(
        folder, target, tmp_path / "draft.gguf", ignore=["unused.weight", "other.weight"]
    ).path.exists()


def without(*names: str) -> Change:
    return lambda one: [one.tensors.pop(name) for name in names]


def with_tensor(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda one: one.tensors.update({name: change(one.tensors[name])})


Q = "layers.0.self_attn.q_proj.weight"

#: Checkpoints that contradict themselves or the target, and what the error says.
MISFITS: dict[str, tuple[Change, str]] = {
    "no fc": (without("fc.weight"), r"lacks fc\.weight"),
    "several": (without("fc.weight", Q), rf"lacks fc\.weight, {Q}"),
    "no d2t": (without("d2t", "t2d"), "lacks d2t.*100 rows for 259"),
    "no head": (without("lm_head.weight"), r"lacks lm_head\.weight"),
    "another shape": (
        with_tensor(Q, lambda q: q[:, :64]),
        r"q_proj\.weight has the shape \[64, 64\], expected \[64, 128\]",
    ),
    "another type": (with_tensor(Q, lambda q: q.astype(np.float64)), r"q_proj\.weight is of type float64"),
    "not finite": (
        with_tensor(Q, lambda q: q * np.float32(np.nan)),
        r"q_proj\.weight has values that are not finite",
    ),
    "d2t absolute": (with_tensor("d2t", lambda d2t: d2t + np.arange(100)), "offsets"),
    "d2t out of range": (with_tensor("d2t", lambda d2t: d2t + 200), "offsets"),
    "d2t short": (with_tensor("d2t", lambda d2t: d2t[:50]), r"\[50\].*expected \[100\]"),
    "d2t of floats": (with_tensor("d2t", lambda d2t: d2t.astype(np.float32)), "float32, expected.*int64"),
    "t2d of others": (with_tensor("t2d", lambda t2d: ~t2d), "t2d and d2t disagree"),
    "t2d short": (with_tensor("t2d", lambda t2d: t2d[:-1]), "t2d and d2t disagree"),
    "another width": (told(target_hidden_size=128), "features of width 128.*has 64"),
    "another vocabulary": (said(vocab_size=300), "a vocabulary of 300.*has 259"),
    "a layer too many": (told(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), "5 is not in 0..4"),
    "layers that are no numbers": (told(eagle_aux_hidden_state_layer_ids=["a"]), "a list of integers"),
    "heads that do not share": (said(num_key_value_heads=3), "4 heads.*share 3"),
    "an odd head": (said(head_dim=15), "heads of width 15"),
    "text for a number": (said(hidden_size="64"), "hidden_size.*integer above 0, not '64'"),
    "negative eps": (said(rms_norm_eps=-1.0), "rms_norm_eps.*above 0"),
    "llama3 without a factor": (
        scaled(**{key: value for key, value in LLAMA3.items() if key != "factor"}),
        "no transformer_layer_config.rope_parameters.factor",
    ),
    "two ropes": (said(rope_theta=5e5), "two ropes that disagree"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit(name: str, target: Path, tmp_path: Path) -> None:
    change, words = MISFITS[name]
    source = Eagle3Checkpoint()
    change(source)
    with pytest.raises(lt.InvalidInputError, match=words):
        to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf")
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


def test_layers_that_contradict_each_other(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint("angelslim")
    # One counts as vLLM does, the other as SGLang does.
    source.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    assert to_gguf(source.write(tmp_path / "one"), target, tmp_path / "draft.gguf").target_layers == (1, 2, 3)
    source.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    with pytest.raises(lt.InvalidInputError, match="different layers"):
        to_gguf(source.write(tmp_path / "two"), target, tmp_path / "draft.gguf")


def test_a_value_beyond_float16(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint()
    source.tensors[Q] = source.tensors[Q] * np.float32(1e6)
    folder = source.write(tmp_path / "checkpoint")
    with pytest.raises(lt.InvalidInputError, match=r"attn_q\.weight.*beyond float16; use bf16"):
        to_gguf(folder, target, tmp_path / "draft.gguf")
    assert to_gguf(folder, target, tmp_path / "draft.gguf", type="bf16").path.exists()


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def half_of_the_weights(folder: Path) -> None:
    cut(folder / "model.safetensors")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_of_the_config(folder: Path) -> None:
    cut(folder / "config.json")


def a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def another_model(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 64})
    )


#: Spoilt folders: the error and its words.
BROKEN: dict[str, tuple[Callable[[Path], None], type[lt.Error], str]] = {
    "no config": (no_config, lt.ModelNotFoundError, r"no config\.json.*found model\.safetensors"),
    "no weights": (no_weights, lt.ModelNotFoundError, r"no weights.*model\.safetensors.*found config\.json"),
    "half a file": (half_of_the_weights, lt.ModelLoadError, "not a readable safetensors file"),
    "half a config": (half_of_the_config, lt.ModelLoadError, "is not JSON"),
    "a config that is a list": (a_list, lt.ModelLoadError, "must be a JSON object"),
    "another model": (another_model, lt.UnsupportedError, r"expected EAGLE-3.*found.*LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_no_checkpoint(name: str, target: Path, tmp_path: Path) -> None:
    spoil, error, words = BROKEN[name]
    folder = Eagle3Checkpoint().write(tmp_path / "checkpoint")
    spoil(folder)
    with pytest.raises(error, match=words):
        to_gguf(folder, target, tmp_path / "draft.gguf")


def test_paths(target: Path, tmp_path: Path) -> None:
    folder = Eagle3Checkpoint().write(tmp_path / "checkpoint")
    draft = tmp_path / "draft.gguf"
    with pytest.raises(lt.ModelNotFoundError, match=r"no such checkpoint.*expected a folder"):
        to_gguf(tmp_path / "missing", target, draft)
    with pytest.raises(lt.InvalidInputError, match=r"is a GGUF file; expected a folder.*--to"):
        to_gguf(target, target, draft)
    with pytest.raises(lt.InvalidInputError, match="is a file; expected a folder"):
        to_gguf(folder / "config.json", target, draft)
    with pytest.raises(lt.ModelNotFoundError, match="no such file"):
        to_gguf(folder, tmp_path / "missing.gguf", draft)
    with pytest.raises(lt.ModelLoadError, match="not a readable GGUF file"):
        to_gguf(folder, folder / "config.json", draft)
    with pytest.raises(lt.InvalidInputError, match="is a file to convert"):
        to_gguf(folder, target, target)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        to_gguf(folder, target, tmp_path / "nowhere" / "draft.gguf")
    with pytest.raises(lt.InvalidInputError, match="'f32', 'f16', 'bf16' or 'q8_0', not 'q4_0'"):
        to_gguf(folder, target, draft, type="q4_0")  # type: ignore[arg-type]
    with pytest.raises(lt.InvalidInputError, match=r"layer id 5 is not in -5\.\.4"):
        to_gguf(folder, target, draft, target_layers=[0, 2, 5])
    with pytest.raises(lt.UnsupportedError, match="2 target layers"):
        to_gguf(folder, target, draft, target_layers=[0, -1])
    half = tmp_path / "half.gguf"
    half.write_bytes(target.read_bytes())
    with pytest.raises(lt.ModelLoadError, match="not a readable GGUF file"):
        to_gguf(folder, cut(half), draft)
    assert not draft.exists()


def test_weights_in_two_files(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint()
    whole = to_gguf(source.write(tmp_path / "whole"), target, tmp_path / "whole.gguf").path
    folder = write_shards(tmp_path / "shards", source.config, source.tensors)
    parts = to_gguf(folder, target, tmp_path / "parts.gguf").path
    assert parts.read_bytes() == whole.read_bytes()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(lt.ModelLoadError, match=r"lacks model-00002-of-00002\.safetensors"):
        to_gguf(folder, target, tmp_path / "draft.gguf")


def failed_without(package: str, *arguments: str | Path) -> str:
    """The error of ``llamatap convert`` where a package is missing."""
    code = (
        f"import sys; sys.modules['{package}'] = None; from llamatap.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "convert", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr


def test_packages_that_are_missing(target: Path, tmp_path: Path) -> None:
    folder = Eagle3Checkpoint().write(tmp_path / "checkpoint")
    arguments = (folder, target, "-o", tmp_path / "draft.gguf")
    words = 'reading GGUF files needs gguf: pip install "llamatap[convert]"'
    assert words in failed_without("gguf", *arguments)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    words = 'reading pytorch_model.bin needs torch: pip install "llamatap[train]"'
    assert words in failed_without("torch", *arguments)


def test_drafts_that_cannot_be_turned_back(target: Path, tmp_path: Path) -> None:
    with pytest.raises(lt.UnsupportedError, match="architecture llama"):
        to_checkpoint(target, target, tmp_path / "back")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf", norm_before_residual=True)
    with pytest.raises(lt.UnsupportedError, match="norm_before_residual"):
        to_checkpoint(draft, target, tmp_path / "back", format="eagle3")
    wide = TinyLlama(n_embd=128).write(tmp_path / "wide.gguf")
    with pytest.raises(lt.InvalidInputError, match=r"width 64.*has 128"):
        to_checkpoint(draft, wide, tmp_path / "back")
    with pytest.raises(lt.InvalidInputError, match="'angelslim' or 'mtp'"):
        to_checkpoint(draft, target, tmp_path / "back", format="other")  # type: ignore[arg-type]
    assert not (tmp_path / "back").exists()


def test_the_command(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Eagle3Checkpoint().write(tmp_path / "checkpoint")
    draft, back = str(tmp_path / "draft.gguf"), str(tmp_path / "back")
    assert (
        main(["convert", str(folder), str(target), "-o", draft, "--type", "q8_0", "--layers", "1,2,4"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith(f"{draft}: eagle3 on H_1, H_2, H_4, ")
    assert gguf.GGUFReader(draft).fields["eagle3.target_layers"].contents() == [1, 2, 4]
    assert main(["convert", draft, str(target), "--to", "eagle3", "-o", back]) == 0
    assert json.loads((Path(back) / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert main(["convert", draft, str(target), "--to", "eagle3", "--type", "f16", "-o", back]) == 1
    assert main(["convert", str(folder), str(target), "--layers", "norm,2,3", "-o", draft]) == 1
    assert 'drafters take an H_i, 0..4, not "norm"' in capsys.readouterr().err
