"""Matrices converted as they are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
from conftest import EXACT, relative
from numpy.typing import NDArray
from tiny import TinyLlama

import llamatap as lt
from reference import decoder

Weights = Literal["f32", "f16", "bf16"]


@pytest.fixture(scope="module")
def prompt() -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(100, 40_000, 40).astype(np.int32)


def every_layer(model: lt.Model, tokens: NDArray[np.int32]) -> lt.States:
    with lt.Extractor(model, **EXACT) as extractor:
        return extractor(tokens, [*range(model.n_layer + 1), "norm"])


def test_converted_to_f32_is_the_dequantised_file_bit_for_bit(
    smollm2_path: Path, smollm2_f32_path: Path, prompt: NDArray[np.int32]
) -> None:
    """The file was dequantised by the gguf package, not by the engine."""
    with lt.Model(smollm2_path, weights="f32") as model, lt.Model(smollm2_f32_path) as truth:
        found = every_layer(model, prompt)
        assert np.array_equal(found.array, every_layer(truth, prompt).array)
        assert (model.file_type, model.weights) == ("Q4_1", "f32")
        assert (found.provenance["file_type"], found.provenance["weights"]) == ("Q4_1", "f32")
        assert found.provenance["model_sha256"] is not None


@pytest.mark.parametrize(("weights", "bound"), [("f16", 1e-3), ("bf16", 1e-2)])
def test_converted_to_16_bits_is_within_their_rounding(
    smollm2_path: Path, smollm2_f32_path: Path, prompt: NDArray[np.int32], weights: Weights, bound: float
) -> None:
    with lt.Model(smollm2_f32_path) as model:
        truth = every_layer(model, prompt)
    with lt.Model(smollm2_path, weights=weights) as model:
        found = every_layer(model, prompt)
        assert model.size_bytes < 1.1 * 2 * model.n_params
    for layer in truth.layers:
        assert 0 < relative(found[layer], truth[layer]) < bound


def test_the_quantised_file_is_further_from_the_truth(
    smollm2: lt.Model, smollm2_f32_path: Path, prompt: NDArray[np.int32]
) -> None:
    """What the conversion takes away: the engine rounds activations to 8 bits beside quantised weights."""
    with lt.Model(smollm2_f32_path) as model:
        truth = every_layer(model, prompt)
    assert relative(every_layer(smollm2, prompt)[15], truth[15]) > 5e-3


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("alignment", [32, 256])
def test_files_of_any_alignment(tiny: TinyLlama, tmp_path: Path, alignment: int, use_mmap: bool) -> None:
    path = tmp_path / "aligned.gguf"
    reader = gguf.GGUFReader(tiny.write(tmp_path / "tiny.gguf", tokenizer=False))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = np.arange(5, 35, dtype=np.int32)
    states, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    with lt.Model(path, weights="f16", use_mmap=use_mmap) as model:
        found = every_layer(model, tokens)
    for layer, expected in enumerate(states):
        assert relative(found[layer], expected) < 1e-3
    assert relative(found["norm"], normed) < 1e-3


def test_nothing_is_left_behind(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with lt.Model(tiny_path, weights="bf16") as model:
        lt.extract(model, [5, 6], [1])
    assert not list(tmp_path.iterdir())
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        lt.Model(tiny_path, weights="f16").close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_wrong_types_of_weights_raise(tiny_path: Path, tmp_path: Path) -> None:
    for wrong in ("q4_0", "F16", "", "float16", "\udcff", b"f16", np.float16, ["f16"]):
        with pytest.raises(lt.InvalidInputError, match="weights must be"):
            lt.Model(tiny_path, weights=wrong)  # type: ignore[arg-type]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny_path.read_bytes()[:-1000])
    with pytest.raises(lt.ModelLoadError, match="not complete"):
        lt.Model(bad, weights="f16")


def test_a_saved_state_is_of_its_weights(tiny_path: Path) -> None:
    with lt.Model(tiny_path) as plain, lt.Model(tiny_path, weights="bf16") as converted:
        with plain.context(n_ctx=256) as context:
            context.decode(lt.Batch.of([5, 6, 7]))
            state = context.save()
        with converted.context(n_ctx=256) as context, pytest.raises(lt.InvalidInputError):
            context.restore(0, state)
