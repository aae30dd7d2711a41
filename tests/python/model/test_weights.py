"""Weights converted as they are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, relative
from support.tiny import TinyLlama, copy_keys

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
    """Conversion avoids an error: beside quantised weights the engine rounds activations to 8 bits."""
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
    copy_keys(reader, writer)
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


#: Types that a file may have, which the gguf package turns into float32 too.
TYPES = [
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q5_1,
]


def with_types(
    tiny: TinyLlama,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    *,
    split: bool = False,
    told: bool = True,
) -> Path:
    """Write the model with its matrices as another type, in one file or in several; the first path."""
    whole = tiny.write(path.with_name("whole.gguf"), tokenizer=False)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=10 if split else 0)
    copy_keys(reader, writer, () if told else ("general.file_type",))
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
            tiny.weights[tensor.name] = gguf.dequantize(gguf.quantize(tensor.data, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.unlink()
    return min(path.parent.glob(f"{path.stem}*.gguf"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TYPES, ids=[kind.name for kind in TYPES])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_every_type_becomes_float32_exactly(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, split: bool
) -> None:
    """Against the formulas with the weights that the gguf package makes of them: no activation is rounded."""
    tiny = TinyLlama()
    path = with_types(tiny, tmp_path / "typed.gguf", kind, split=split)
    assert (len(list(tmp_path.iterdir())) > 1) == split
    tokens = np.arange(5, 35, dtype=np.int32)
    states, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    with lt.Model(path, weights="f32") as model:
        found = every_layer(model, tokens)
    for layer, expected in enumerate(states):
        assert relative(found[layer], expected) < 1e-6
    assert relative(found["norm"], normed) < 1e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["qwen3moe-moe", "mamba2-dense", "falcon-h1-dense", "deepseek2-moe", "gpt2-dense"]
)
@pytest.mark.parametrize("weights", ["f32", "f16", "bf16"])
def test_other_architectures_take_converted_weights(arch_models: Path, name: str, weights: Weights) -> None:
    """Their files hold float32 and float16; float32 tensors do not change."""
    path = arch_models / f"{name}.gguf"
    tokens = np.arange(5, 25, dtype=np.int32)
    layers: list[lt.LayerId] = [0, 1, -1]
    with lt.Model(path) as plain, lt.Model(path, weights=weights) as model:
        with lt.Extractor(plain, **EXACT) as extractor:
            expected = extractor(tokens, layers)
        with lt.Extractor(model, **EXACT) as extractor:
            assert relative(extractor(tokens, layers).array, expected.array) < 2e-2


def test_a_weight_beyond_float16_raises_and_tells_which(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyLlama()
    tiny.weights["blk.2.ffn_down.weight"][3, 5] = 70000.0
    path = with_types(tiny, tmp_path / "large.gguf", gguf.GGMLQuantizationType.BF16)
    with pytest.raises(lt.InvalidInputError, match=r"blk\.2\.ffn_down\.weight has weights beyond float16"):
        lt.Model(path, weights="f16")
    lt.Model(path, weights="f32").close()
    assert capfd.readouterr() == ("", "")


def test_a_conversion_can_be_followed_and_ended(smollm2_path: Path) -> None:
    seen: list[float] = []
    lt.Model(smollm2_path, weights="f32", progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert any(0.0 < fraction < 0.5 for fraction in seen)

    def end(fraction: float) -> None:
        if fraction > 0.01:
            raise KeyboardInterrupt

    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        lt.Model(smollm2_path, weights="f32", progress=end)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_no_file_is_left_open(tiny_path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        lt.Model(tiny_path, weights="f16").close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_wrong_types_of_weights_raise(tiny_path: Path, tmp_path: Path) -> None:
    for wrong in ("q4_0", "F16", "", "float16", "\udcff", b"f16", np.float16, ["f16"]):
        with pytest.raises(lt.InvalidInputError, match="weights must be"):
            lt.Model(tiny_path, weights=wrong)  # type: ignore[arg-type]
    with pytest.raises(lt.InvalidInputError, match="vocab_only"):
        lt.Model(tiny_path, weights="f16", vocab_only=True)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny_path.read_bytes()[:-1000])
    with pytest.raises(lt.ModelLoadError, match="not complete"):
        lt.Model(bad, weights="f16")


def test_the_type_of_a_file_that_does_not_tell_is_not_guessed(tmp_path: Path) -> None:
    path = with_types(TinyLlama(), tmp_path / "typed.gguf", gguf.GGMLQuantizationType.Q8_0, told=False)
    with lt.Model(path) as model:
        assert model.file_type == "Q8_0"
    with lt.Model(path, weights="bf16") as model:
        assert model.file_type == "unknown"


def test_a_saved_state_is_of_its_weights(tiny_path: Path) -> None:
    with lt.Model(tiny_path) as plain, lt.Model(tiny_path, weights="bf16") as converted:
        with plain.context(n_ctx=256) as context:
            context.decode(lt.Batch.of([5, 6, 7]))
            state = context.save()
        with converted.context(n_ctx=256) as context, pytest.raises(lt.InvalidInputError):
            context.restore(0, state)
