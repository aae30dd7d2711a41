"""Layer numbers of transformers by architecture, against entries and states of its model classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load
from support.numerics import EXACT, relative
from support.paths import DATA
from support.servers import running, tiny_options
from support.tiny_models import Tiny, decoders, mambas
from support.tiny_models.registry import FILES

import llamatap as lt
from llamatap import dataset
from llamatap.__main__ import main
from llamatap.layers import LayerId, translate, translate_for
from llamatap.presets import load_preset
from llamatap.serve import ServerOptions

NUMBERS: dict[str, dict[str, Any]] = json.loads((DATA / "layer_numbers.json").read_text())
CURRENT = max(NUMBERS, key=lambda version: int(version.split(".")[0]))
CLASSES = NUMBERS[CURRENT]

#: Models whose hidden_states by transformers are in tests/data/states_golden.npz.
TINIES: dict[str, Callable[[], Tiny]] = {
    "mamba": mambas.mamba,
    "falcon_mamba": mambas.falcon_mamba,
    "mamba2": mambas.mamba2,
    "bamba": mambas.bamba,
    "afmoe": decoders.afmoe,
}


def own_id(name: str) -> LayerId:
    """llamatap's layer id for a tensor named in the golden file."""
    return "norm" if name == "norm" else int(name.removeprefix("H_"))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_numbers_of_every_class_of_transformers(name: str) -> None:
    """The golden is transformers' own passes, with hooks (tests/golden/make_layer_numbers.py)."""
    arch, n_layer, entries = (CLASSES[name][key] for key in ("arch", "n_layer", "entries"))
    for k, found in enumerate(entries):
        if found == "other" or (arch == "hrm_text" and 0 < k < len(entries) - 1):
            with pytest.raises(lt.InvalidInputError, match=r"leaves each block.*id of llamatap"):
                translate([k], source="transformers", n_layer=n_layer, arch=arch)
            continue
        expected = own_id(found)
        for number in (k, k - len(entries)):
            assert translate([number], source="transformers", n_layer=n_layer, arch=arch) == [expected]
        assert translate([expected], target="transformers", n_layer=n_layer, arch=arch) == [k]
    for beyond in (len(entries), -len(entries) - 1):
        with pytest.raises(lt.InvalidInputError, match="is not in"):
            translate([beyond], source="transformers", n_layer=n_layer, arch=arch)


def test_what_the_golden_is_about() -> None:
    """The golden file covers each family; otherwise the test above would assert little."""
    archs = {found["arch"] for found in CLASSES.values()}
    assert {"llama", "qwen3", "gemma3", "gpt2", "gptneox", "falcon", "bloom", "mpt", "phi2", "phi3"} <= archs
    assert {"mamba", "mamba2", "jamba", "granitehybrid", "falcon-h1", "nemotron_h", "lfm2"} <= archs
    assert {"bert", "nomic-bert", "modern-bert", "eurobert", "jina-bert-v3", "t5encoder", "t5"} <= archs


def test_versions_of_transformers_differ_in_one_class() -> None:
    """docs/extraction.md names it."""
    (older,) = set(NUMBERS) - {CURRENT}
    common = set(NUMBERS[older]) & set(CLASSES)
    assert len(common) > 50
    differ = [name for name in sorted(common) if NUMBERS[older][name] != CLASSES[name]]
    assert differ == ["ModernBertModel"]
    assert [NUMBERS[version]["ModernBertModel"]["entries"][-1] for version in (older, CURRENT)] == [
        "H_4",
        "norm",
    ]


@pytest.mark.parametrize(
    ("arch", "theirs", "ours"),
    [
        # RWKV-6 as its checkpoints' own code has it, like transformers' RWKV-4.
        ("rwkv6", [0, -2, -1], [1, 36, "norm"]),
        # The convention of flash-linear-attention.
        ("rwkv7", [1, -2, -1], [1, 35, "norm"]),
        ("nomic-bert-moe", [0, -2, -1], [0, 35, 36]),
        ("jina-bert-v2", [0, -2, -1], [0, 35, 36]),
        # No architecture or an unknown one: counted as Llama's.
        (None, [0, -2, -1], [0, 35, "norm"]),
        ("an architecture of tomorrow", [0, -2, -1], [0, 35, "norm"]),
    ],
)
def test_architectures_that_are_not_in_transformers(
    arch: str | None, theirs: list[LayerId], ours: list[LayerId]
) -> None:
    assert translate(theirs, source="transformers", n_layer=36, arch=arch) == ours


def test_only_transformers_counts_by_architecture() -> None:
    for system in ("vllm", "speculators", "llamatap", "eagle3-gguf"):
        assert translate([2, 36], source=system, n_layer=36, arch="mamba") == [2, 36]
    assert translate([35], source="specforge", target="transformers", n_layer=36, arch="mamba") == [35]
    assert translate([35], source="transformers", target="sglang", n_layer=36, arch="mamba2") == [35]


def test_what_an_architecture_has_no_number_for() -> None:
    with pytest.raises(lt.InvalidInputError, match="no id for H_0"):
        translate([0], target="transformers", n_layer=36, arch="mamba")
    with pytest.raises(lt.InvalidInputError, match="embedding before the norm"):
        translate([0], source="transformers", n_layer=36, arch="rwkv7")
    with pytest.raises(lt.InvalidInputError, match="embedding before the norm"):
        translate([0], target="transformers", n_layer=36, arch="rwkv7")
    with pytest.raises(lt.InvalidInputError, match="without a final norm"):
        translate(["norm"], n_layer=36, arch="bert")
    with pytest.raises(lt.InvalidInputError, match="name of an architecture"):
        translate([0], n_layer=36, arch=5)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[Any]]:
    with np.load(DATA / "states_golden.npz") as file:
        return {name: file[name] for name in file}


@pytest.mark.parametrize("name", sorted(TINIES))
def test_states_are_those_of_transformers(name: str, golden: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    """All of hidden_states, by transformers' own numbers, on the same weights."""
    tiny = TINIES[name]()
    assert np.array_equal(tiny.weights["token_embd.weight"][:4], golden[f"{name}_embeddings"])
    expected = golden[name]
    with lt.Model(tiny.write(tmp_path / "tiny.gguf")) as model, lt.Extractor(model, **EXACT) as extractor:
        layers = translate_for(model, range(expected.shape[1]), source="transformers")
        found = extractor(golden["tokens"].tolist(), layers).array
    assert found.shape == expected.shape
    for k in range(expected.shape[1]):
        assert relative(found[:, k], expected[:, k]) < 1e-5, k


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_every_way_in_counts_by_architecture(
    name: str, golden: dict[str, NDArray[Any]], tmp_path: Path
) -> None:
    """``--convention``, presets, options of data sets and the server's ``layer``: -2 is H_n there."""
    path = TINIES[name]().write(tmp_path / "tiny.gguf")
    tokens = golden["tokens"].tolist()
    n = mambas.N_LAYER
    out = tmp_path / "states.safetensors"
    ids = ["--tokens", ",".join(map(str, tokens)), "--layers=-2,0,-1"]
    assert main(["extract", str(path), *ids, "--convention", "transformers", "-o", str(out)]) == 0
    assert lt.States.load(out).layers == (n, 1, "norm")

    (tmp_path / "mine.toml").write_text(
        'name = "mine"\n[states]\nconvention = "transformers"\nlayers = [-2, 0]\n'
    )
    with lt.Model(path) as model:
        assert load_preset(tmp_path / "mine.toml").layer_ids(model) == [n, 1]
        options = dataset.Options(layers=[-2, 0], convention="transformers")
        job = dataset.Job(model, [{"input_ids": tokens}], tmp_path / "data", options)
        assert job.columns[:2] == (n, 1)

    with running([tiny_options(path, n_ctx=256)]) as server:
        for k in (0, n - 1, -2, n):
            answer = server.states(input=tokens, layer=k)
            assert answer["layer"] == k
            found = np.array(answer["hidden_states"], np.float32)
            assert relative(found, golden[name][:, k]) < 1e-5, k
            states = server.post(
                "/v1/completions",
                model="tiny",
                prompt=tokens,
                max_tokens=1,
                layer=k,
                return_hidden_states=True,
            )["choices"][0]["hidden_states"]
            assert relative(np.array(states[0], np.float32), golden[name][:, k]) < 1e-5, k
        assert "is not in -4..3" in server.error(
            "/v1/hidden_states", 400, "invalid_request_error", model="tiny", input=tokens, layer=n + 1
        )


@pytest.mark.parametrize("encoding", ["float", "safetensors"])
@pytest.mark.parametrize("layers", ["[-1]", "[-1, 2]"])
def test_a_presets_layer_without_a_number_of_transformers(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, layers: str, encoding: str
) -> None:
    """H_n of Llama: the server gives it all the same, and no number of it."""
    (tmp_path / "mine.toml").write_text(
        f'name = "mine"\n[prompt]\ntemplate = "{{{{ prompt }}}}"\n'
        f'[states]\nconvention = "llamatap"\nlayers = {layers}\n'
    )
    options = ServerOptions(presets=(tmp_path / "mine.toml",))
    body = {"model": "tiny", "prompt": "abc", "preset": "mine", "encoding_format": encoding}
    with running([tiny_options(tiny_path)], options) as server:
        response = server.client.post("/v1/hidden_states", json=body)
    assert response.status_code == 200, response.text
    n = tiny_model.n_layer
    if encoding == "safetensors":
        states = load(response.content)["hidden_states"]
    else:
        answer = response.json()
        states = np.array(answer["hidden_states"], np.float32)
        assert answer["provenance"]["layers"] == ([n] if layers == "[-1]" else [n, 2])
        number = {"layer": None} if layers == "[-1]" else {"layers": [None, 2]}
        assert number.items() <= answer.items()
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        expected = extractor("abc", [n] if layers == "[-1]" else [n, 2]).array
    assert relative(states.reshape(expected.shape), expected) < 1e-5


def test_last_entry_of_encoders(tmp_path: Path) -> None:
    """BERT's is H_n; ModernBERT has a final norm."""
    for name, last in (("bert", 3), ("modern-bert", "norm"), ("t5encoder", "norm")):
        with lt.Model(FILES[name]().write(tmp_path / f"{name}.gguf")) as model:
            assert translate_for(model, [-1], source="transformers") == [
                last if last == "norm" else model.n_layer
            ]
