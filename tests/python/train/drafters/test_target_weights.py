"""The weights that a drafter shares with a target, whose logits must be ``head @ norm(H_n)``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.architecture_snapshot import OF_THE_ENGINE, SNAPSHOT
from support.drafting import EXACT, rewritten
from support.numerics import random_tokens, relative
from support.quantisation import quantise
from support.tiny import TinyGemma3, TinyLlama, TinyQwen3, split
from support.tiny_models.registry import FILES

import llamatap as lt
from llamatap.train.drafters.target_weights import TargetWeights
from reference.decoder import rms_norm


def computed(path: Path, tokens: NDArray[np.int32] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """The engine's logits of some tokens, and those of the weights from its H_n."""
    target = TargetWeights.read(path)
    with lt.Model(path) as model, model.context(n_ctx=64, **EXACT) as context:
        if tokens is None:
            tokens = random_tokens(np.random.default_rng(0), model, 9)
        batch = lt.Batch()
        for position, token in enumerate(tokens):
            batch.add(int(token), position, output=True)
        context.decode(batch)
        logits = np.stack([context.logits(row) for row in range(len(tokens))])
        context.memory.clear()
        last = lt.extract(context, [tokens], -1)[0].array[:, 0].astype(np.float64)
    norm, head = target.norm.astype(np.float64), target.head.astype(np.float64)
    return logits, rms_norm(last, norm, target.rms_eps) @ head.T


def tied(tensors: dict[str, NDArray[Any]]) -> None:
    del tensors["output.weight"]
    # Else the logits of a token's own are far from all others.
    tensors["token_embd.weight"] = tensors["token_embd.weight"] / np.float32(8)


TINY = [TinyLlama(), TinyQwen3(), TinyGemma3()]


@pytest.mark.parametrize("change", [None, tied], ids=["own head", "tied"])
@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: str(tiny.arch))
def test_logits_are_the_engines(
    tiny: TinyLlama, change: Callable[[dict[str, NDArray[Any]]], None] | None, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "target.gguf")
    if change is not None:
        path = rewritten(path, tmp_path / "changed.gguf", change)
    logits, expected = computed(path)
    assert relative(logits, expected) < 1e-6
    target = TargetWeights.read(path)
    assert (target.head is target.embedding) == (change is not None)
    assert (target.arch, target.n_embd, target.n_vocab) == (tiny.arch, 64, 259)
    sizes = (target.n_layer, target.n_head, target.n_head_kv, target.head_size, target.n_ff, target.n_ctx)
    assert sizes == (tiny.n_layer, 4, 2, tiny.head_width, 96, 4096)
    assert [target.rms_eps, target.rope_base] == pytest.approx([tiny.eps, tiny.rope_base])


@pytest.mark.parametrize(
    ("kind", "bound"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2), ("Q4_1", 0.2)], ids=str
)
def test_quantised_files(kind: str, bound: float, tmp_path: Path) -> None:
    """The engine rounds activations, too, so its logits are close and not equal."""
    path = TinyLlama().write(tmp_path / "target.gguf")
    target = tmp_path / "quantised.gguf"
    quantise(path, target, gguf.GGMLQuantizationType[kind])
    logits, expected = computed(target)
    assert relative(logits, expected) < bound
    weights = TargetWeights.read(target)
    for name, found in (("token_embd.weight", weights.embedding), ("output.weight", weights.head)):
        assert found.dtype == np.float32
        assert 0 < relative(found, TinyLlama().weights[name]) < bound


def test_a_target_in_several_files(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "target.gguf")
    first = split(path, tmp_path / "shards")[0]
    whole, found = TargetWeights.read(path), TargetWeights.read(first)
    assert np.array_equal(found.head, whole.head)
    assert np.array_equal(found.norm, whole.norm)
    assert found.n_layer == whole.n_layer


def test_weights_are_not_the_files(tmp_path: Path) -> None:
    """They may be written to, which does not change the file, and may outlive it."""
    path = TinyLlama().write(tmp_path / "target.gguf")
    before = path.read_bytes()
    target = TargetWeights.read(path)
    for values in (target.embedding, target.norm, target.head):
        values += 1
    assert path.read_bytes() == before


@dataclass
class Keyed(TinyLlama):
    """A file with a key of its own."""

    key: str = ""
    value: float = 0.0

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_float32(f"{self.arch}.{self.key}", self.value)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "embedding_scale"])
def test_scaled_and_capped_logits(key: str, tmp_path: Path) -> None:
    path = Keyed(key=key, value=30.0).write(tmp_path / "target.gguf")
    with pytest.raises(lt.UnsupportedError, match=rf"target\.gguf has llama\.{key}: its logits are more"):
        TargetWeights.read(path)
    TargetWeights.read(Keyed(key=key).write(path))


CHANGES: dict[str, tuple[Callable[[dict[str, NDArray[Any]]], object], str]] = {
    "no embedding": (lambda tensors: tensors.pop("token_embd.weight"), r"has no token_embd\.weight"),
    "no norm": (lambda tensors: tensors.pop("output_norm.weight"), r"has no output_norm\.weight"),
    "a biased norm": (
        lambda tensors: tensors.update({"output_norm.bias": np.ones(64, np.float32)}),
        "final norm with a bias",
    ),
    "a biased head": (
        lambda tensors: tensors.update({"output.bias": np.ones(259, np.float32)}),
        "head with a bias",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_are_missing_or_too_many(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    path = TinyLlama().write(tmp_path / "whole.gguf")
    path = rewritten(path, tmp_path / "target.gguf", change)
    with pytest.raises(lt.UnsupportedError, match=rf"target\.gguf \(llama\).*{message}"):
        TargetWeights.read(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("attention.layer_norm_rms_epsilon", "no RMS norm"),
        ("attention.head_count", r"has no llama\.attention\.head_count"),
        ("feed_forward_length", r"has no llama\.feed_forward_length"),
    ],
)
def test_keys_that_are_missing(key: str, message: str, tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "whole.gguf")
    path = rewritten(path, tmp_path / "target.gguf", lambda tensors: None, f"llama.{key}")
    with pytest.raises(lt.UnsupportedError, match=message):
        TargetWeights.read(path)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(lt.ModelNotFoundError):
        TargetWeights.read(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(lt.ModelLoadError):
        TargetWeights.read(tmp_path / "text.gguf")


#: Architectures of a plain norm and head that are refused nonetheless, and why.
REFUSED = {
    "arwkv7": "has no arwkv7.attention.head_count",
    "dream": "head with a bias",
    "granite": "granite.logit_scale",
    "granite_swa": "granite_swa.logit_scale",
    "granitehybrid": "granitehybrid.logit_scale",
    "granitemoe": "granitemoe.logit_scale",
    "cohere2moe": "cohere2moe.logit_scale",
    "grok": "grok.logit_scale",
    "hrm_text": "has no output_norm.weight",
    "lfm2": "has no output_norm.weight",
    "lfm2moe": "has no output_norm.weight",
    "minicpm": "minicpm.logit_scale",
    "qwen2vl": "head with a bias",
    "rwkv6qwen2": "has no rwkv6qwen2.attention.head_count",
    "talkie": "has no output_norm.weight",
}
# The engine's writer gives all its models this key, also those that do not read it.
KEY = b".final_logit_softcapping"


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", sorted(name for name in SNAPSHOT if "arch" in SNAPSHOT[name]))
def test_every_architecture(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its logits are those of the weights, or it is refused."""
    found = SNAPSHOT[name]
    path = tmp_path / f"{name}.gguf"
    if name in OF_THE_ENGINE:
        written: Path = request.getfixturevalue("arch_models")
        content = (written / path.name).read_bytes()
        path.write_bytes(content.replace(KEY, KEY[:-1] + b"x"))
    else:
        FILES[name]().write(path)
    plain = found["norm"] == "RMS norm" and found["head"] == "matmul"
    arch = re.sub("-(dense|moe)$", "", name) if name in OF_THE_ENGINE else name
    if found["head"] == "none":
        return  # it gives no logits
    # Gemma 3 caps its logits with the key alone.
    if arch in REFUSED or not (plain or arch == "gemma3"):
        with pytest.raises(lt.UnsupportedError, match=REFUSED.get(arch, "norm|bias|logits")):
            TargetWeights.read(path)
        return
    logits, expected = computed(path)
    assert relative(logits, expected) < 1e-6
