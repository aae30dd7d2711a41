from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support import checkpoints
from support.checkpoints import LINEAR, LLAMA3, Eagle3Checkpoint
from support.drafting import EXACT, Oracle, Pair, assert_drafted, opened, random_text, states_of
from support.numerics import relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.convert import to_checkpoint, to_gguf
from reference import eagle3_checkpoint

TINY = TinyLlama()


def oracle_of(source: Eagle3Checkpoint, tiny: TinyLlama = TINY, layers: Sequence[int] = (1, 2, 3)) -> Oracle:
    block = source.block(tiny.weights["token_embd.weight"])

    def draft(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        states = states_of(tiny, text[:-1])
        features = np.concatenate([states[layer] for layer in layers], axis=1)
        return eagle3_checkpoint.draft(text, features, block, n)

    return draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("target") / "target.gguf")


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "speculators, transformers 4": {"old_rope": True},
    "speculators, normed": {"norm_before_residual": True, "norm_before_fc": True},
    "speculators, all tokens": {"n_draft_vocab": None},
    "speculators, the target's embedding": {"embedding": False},
    "speculators, wide heads": {"head_width": 24, "n_head_kv": 4, "n_ff": 80},
    "speculators, llama3": {"scaling": LLAMA3},
    "speculators, linear, transformers 4": {"scaling": LINEAR, "old_rope": True},
    "SpecForge": {"format": "eagle3"},
    "SpecForge, llama3, transformers 4": {"format": "eagle3", "scaling": LLAMA3, "old_rope": True},
    "SpecForge, narrow": {"format": "eagle3", "n_embd": 48},
    "AngelSlim": {"format": "angelslim", "layers": (1, 3, 4)},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_are_those_of_the_checkpoint(
    name: str, target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = Eagle3Checkpoint(**CHECKPOINTS[name])
    done = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="f32")
    assert source.layers is not None
    assert (done.kind, done.target_layers) == ("eagle3", source.layers)
    oracle = oracle_of(source, layers=source.layers)
    with opened(Pair(target, done.path, "eagle3", oracle)) as loop:
        # Far apart enough for a wrong frequency to show.
        loop.start({0: random_text(rng, 80)})
        for _ in range(4):
            drafts = loop.draft()
            assert_drafted(drafts[0], oracle, loop.texts[0], 4)
            loop.verify(drafts, rng)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_logits_of_several_steps(kind: Any, target: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    source = Eagle3Checkpoint(norm_before_residual=True, seed=3)
    draft = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type=kind).path
    text = random_text(rng, 20)
    states = states_of(TINY, text)
    features = np.concatenate([states[layer] for layer in (1, 2, 3)], axis=1).astype(np.float32)
    block = source.block()
    with (
        lt.Model(target) as model,
        model.context(n_ctx=256, **EXACT) as context,
        lt.SpeculativeContext(context, draft, **EXACT) as spec,
    ):
        tokens, expected_states = text[1:], eagle3_checkpoint.encode(features[:-1], block)
        found = spec.decode(tokens, spec.encode(features[:-1]), np.arange(19), outputs=True, logits=True)
        # Q8_0 rounds the activations to 8 bits, too.
        bound = {"f32": 1e-5, "f16": 3e-3, "bf16": 3e-2, "q8_0": 6e-2}[kind]
        for _ in range(3):
            expected, after = eagle3_checkpoint.decode(tokens, expected_states, block)
            reached = np.isfinite(expected[-1])
            assert found.logits is not None
            assert found.states is not None
            assert np.array_equal(np.isfinite(found.logits[-1]), reached)
            assert relative(found.logits[-1][reached], expected[-1][reached]) < bound
            # The next step goes on from the engine's state on one side, and the oracle's on the other.
            token = int(expected[-1].argmax())
            tokens = [*tokens, token]
            expected_states = np.concatenate([expected_states, after[-1:]])
            at = np.array([len(tokens) - 1])
            found = spec.decode([token], found.states[-1:], at, outputs=True, logits=True)


FORMATS = ("speculators", "eagle3", "angelslim")


@pytest.mark.parametrize("layers", [None, (1, 4, 6)])
@pytest.mark.parametrize("form", FORMATS)
def test_layers_are_translated(form: str, layers: tuple[int, int, int] | None, tmp_path: Path) -> None:
    """A checkpoint that names none is for the three that both systems take by default."""
    tiny = TinyLlama(n_layer=6)
    target = tiny.write(tmp_path / "target.gguf")
    source = Eagle3Checkpoint(form, layers=layers)
    done = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="f32")
    expected = (2, 3, 3) if layers is None else layers
    assert done.target_layers == expected
    keys = gguf.GGUFReader(done.path).fields
    assert keys["eagle3.target_layers"].contents() == list(expected)
    text = list(range(10, 40))
    with opened(Pair(target, done.path, "eagle3", oracle_of(source, tiny, expected))) as loop:
        loop.start({0: text})
        assert_drafted(loop.draft()[0], oracle_of(source, tiny, expected), text, 4)
    other = to_gguf(tmp_path / "checkpoint", target, tmp_path / "other.gguf", target_layers=[0, 1, 2])
    assert other.target_layers == (0, 1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_there_and_back_bit_for_bit(form: Any, dtype: str, target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint(form, layers=(1, 2, 4), dtype=dtype, scaling=LLAMA3)
    kind: Any = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    folder = source.write(tmp_path / "checkpoint")
    draft = to_gguf(folder, target, tmp_path / "draft.gguf", type=kind).path
    back = to_checkpoint(draft, target, tmp_path / "back", format=form).path
    found = checkpoints.read(back)
    assert found.keys() == source.tensors.keys()
    for name, values in source.tensors.items():
        assert found[name].dtype == values.dtype, name
        assert np.array_equal(found[name], values), name
    # The settings came back too: the same file again.
    again = to_gguf(back, target, tmp_path / "again.gguf", type=kind)
    assert again.path.read_bytes() == draft.read_bytes()


def test_formats_turn_into_each_other(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint("speculators", layers=(1, 2, 4))
    first = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="f32").path
    for form in FORMATS:
        folder = to_checkpoint(first, target, tmp_path / form, format=form).path  # type: ignore[arg-type]
        again = to_gguf(folder, target, tmp_path / f"{form}.gguf", type="f32")
        assert again.target_layers == (1, 2, 4)
        assert again.path.read_bytes() == first.read_bytes()
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_matrices_of_the_target_are_not_written_again(target: Path, tmp_path: Path) -> None:
    """A frozen embedding, in the trainer's dtype, is the target's."""
    source = Eagle3Checkpoint(n_draft_vocab=None, dtype="bfloat16")
    for name, theirs in (("embed_tokens", "token_embd"), ("lm_head", "output")):
        source.tensors[f"{name}.weight"] = TINY.weights[f"{theirs}.weight"].astype("bfloat16")
    folder = source.write(tmp_path / "checkpoint")
    done = to_gguf(folder, target, tmp_path / "draft.gguf")
    assert done.inherited == ("token_embd.weight", "output.weight")
    names = {tensor.name for tensor in gguf.GGUFReader(done.path).tensors}
    assert not names & {"token_embd.weight", "output.weight"}
    own = to_gguf(folder, target, tmp_path / "own.gguf", embedding="own")
    assert own.inherited == ()
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        assert lt.load_drafter(context, done.path).spec.kind == "eagle3"
    # Back, a trainer gets them from the target.
    found = checkpoints.read(to_checkpoint(done.path, target, tmp_path / "back").path)
    assert np.array_equal(found["embed_tokens.weight"], TINY.weights["token_embd.weight"])


def test_tensors_and_keys_of_the_file(target: Path, tmp_path: Path) -> None:
    source = Eagle3Checkpoint(norm_before_fc=True)
    draft = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="q8_0").path
    reader = gguf.GGUFReader(draft)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 16
    types = gguf.GGMLQuantizationType
    assert tensors["d2t"].tensor_type == types.I64
    ids = source.tensors["d2t"] + np.arange(100)
    assert np.array_equal(tensors["d2t"].data, ids)
    for name, tensor in tensors.items():
        if name != "d2t":
            assert tensor.tensor_type == (types.F32 if "norm" in name else types.Q8_0), name
    # Of q, the rows 0, 8, 1, 9, ... of each head of 16.
    found = gguf.dequantize(tensors["blk.0.attn_q.weight"].data, types.Q8_0).reshape(4, 16, 128)
    rows = source.tensors["layers.0.self_attn.q_proj.weight"].reshape(4, 16, 128)
    order = [one for pair in zip(range(8), range(8, 16), strict=True) for one in pair]
    assert relative(found, rows[:, order]) < 1e-2

    def key(name: str) -> Any:
        return reader.fields[name].contents()

    theirs = gguf.GGUFReader(target).fields
    assert key("tokenizer.ggml.tokens") == theirs["tokenizer.ggml.tokens"].contents()
    assert key("tokenizer.ggml.bos_token_id") == 1
    assert key("general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    assert key("eagle3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert (key("eagle3.norm_before_fc"), key("eagle3.norm_before_residual")) == (True, False)
    assert (key("eagle3.rope.freq_base"), key("eagle3.context_length")) == (1e5, 512)
