from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from support.checkpoints import MtpCheckpoint
from support.drafting import EXACT, Oracle, Pair, assert_drafted, opened, random_text, states_of
from support.numerics import random_tokens, relative
from support.tiny import TinyGemma3, TinyLlama, TinyQwen3, split

import llamatap as lt
from llamatap.__main__ import main
from llamatap.convert import MtpConfig, read_mtp, to_checkpoint, to_gguf, write_mtp
from reference import mtp, mtp_checkpoint

TINY = TinyLlama()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLAMATAP_CACHE", str(folder))
    return folder / "drafts"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("target") / "target.gguf")


def oracle_of(source: MtpCheckpoint) -> Oracle:
    def draft(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        return mtp_checkpoint.draft(text, states_of(source.tiny, text[:-1])[-1], source.block(), n)

    return draft


BLOCKS: dict[str, dict[str, Any]] = {
    "as the target": {},
    "a wider feed-forward": {"n_ff": 160},
    "other heads": {"n_head": 2, "n_head_kv": 1, "head_width": 24},
    "more heads": {"n_head": 8, "n_head_kv": 8, "head_width": 8, "n_ff": 64},
    "another rope": {"rope_base": 5e5, "eps": 1e-3},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_are_those_of_the_block(
    name: str, target: Path, tmp_path: Path, rng: np.random.Generator, cache: Path
) -> None:
    """Beside the unchanged llama file, with H_n from a tap."""
    source = MtpCheckpoint(TINY, **BLOCKS[name])
    path = source.write(tmp_path / "mtp.safetensors")
    oracle = oracle_of(source)
    with opened(Pair(target, path, "mtp", oracle)) as loop:
        assert isinstance(loop.drafter, lt.MtpDrafter)
        assert loop.drafter.target_layers == (TINY.n_layer,)
        loop.start({0: random_text(rng, 60)})
        for _ in range(4):
            drafts = loop.draft()
            if name == "bfloat16":
                # The engine rounds the activations to bfloat16, too.
                assert drafts[0].tokens[0] == oracle(loop.texts[0], 1)[0][0]
            else:
                assert_drafted(drafts[0], oracle, loop.texts[0], 4)
            loop.verify(drafts, rng)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("tiny", [TinyQwen3(), TinyGemma3()], ids=lambda tiny: str(tiny.arch))
def test_a_target_of_another_architecture(tiny: TinyLlama, tmp_path: Path, rng: np.random.Generator) -> None:
    source = MtpCheckpoint(tiny)
    target, path = tiny.write(tmp_path / "target.gguf"), source.write(tmp_path / "mtp.safetensors")
    text = random_text(rng, 40)
    with opened(Pair(target, path, "mtp", oracle_of(source))) as loop:
        loop.start({0: text})
        tokens, probabilities = oracle_of(source)(text, 4)
        draft = loop.draft()[0]
        assert draft.tokens.tolist() == tokens[: len(draft.tokens)]
        assert draft.probs is not None
        # Gemma's GELU is a table of float16.
        assert np.abs(draft.probs - probabilities[: len(draft.tokens)]).max() < 2e-3


def test_every_way_to_name_the_file(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        plain = next(iter(lt.generate(context, ["hello"], max_tokens=20)))
        for drafter in (
            lt.load_drafter(context, path, n_max=3),
            lt.MtpDrafter(lt.SpeculativeContext(context, str(path)), n_max=3),
        ):
            assert isinstance(drafter, lt.MtpDrafter)
            found = next(iter(lt.generate(context, ["hello"], drafter, max_tokens=20)))
            assert found.tokens.tolist() == plain.tokens.tolist()
            assert found.stats.drafted > 0
            drafter.spec.close()
    assert (
        main(["generate", str(target), "--prompt", "hello", "--drafter", str(path), "--stats", "-n", "8"])
        == 0
    )
    assert "drafted" in capsys.readouterr().err


def test_the_joined_file_is_made_once(target: Path, tmp_path: Path, cache: Path) -> None:
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        lt.load_drafter(context, path)
        (made,) = cache.iterdir()
        before = made.stat().st_ino
        lt.load_drafter(context, path)
        assert [one.stat().st_ino for one in cache.iterdir()] == [before]
        # Another block is another file, whatever its name.
        MtpCheckpoint(TINY, seed=1).write(path)
        lt.load_drafter(context, path)
        assert len(list(cache.iterdir())) == 2
        for index in range(8):
            made = next(iter(cache.iterdir()))
            os.utime(made, (index, index))
            MtpCheckpoint(TINY, seed=10 + index).write(path)
            lt.load_drafter(context, path)
        assert len(list(cache.iterdir())) == 8


def test_a_target_that_was_replaced(tmp_path: Path) -> None:
    target = TINY.write(tmp_path / "target.gguf")
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    with lt.Model(target) as model, model.context(n_ctx=256) as context:
        TinyLlama(seed=1).write(tmp_path / "other.gguf").replace(target)
        with pytest.raises(lt.InvalidInputError, match="was replaced since it was loaded"):
            lt.load_drafter(context, path)


def all_logits(model: lt.Model, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    batch = lt.Batch()
    for position, token in enumerate(tokens):
        batch.add(int(token), position, output=True)
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(batch)
        return np.stack([context.logits(row) for row in range(len(tokens))])


@pytest.mark.parametrize("block", [{}, {"n_ff": 64}, {"n_head": 8, "n_head_kv": 4}], ids=str)
def test_a_whole_model_computes_the_same(
    block: dict[str, Any], target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = MtpCheckpoint(TINY, **block)
    path = source.write(tmp_path / "mtp.safetensors")
    whole = to_gguf(path, target, tmp_path / "whole.gguf", type="f32", whole=True).path
    with lt.Model(target) as old, lt.Model(whole) as new:
        assert (new.arch, new.n_layer) == ("mimo2", TINY.n_layer)
        tokens = random_tokens(rng, old, 100)
        assert relative(all_logits(new, tokens), all_logits(old, tokens)) < 2e-6
        assert old.tokenize("hello").tolist() == new.tokenize("hello").tolist()
    # With its own block it drafts as the block says.
    oracle = oracle_of(source)
    with opened(Pair(whole, None, "mtp", oracle)) as loop:
        loop.start({0: random_text(rng, 60)})
        for _ in range(3):
            drafts = loop.draft()
            assert_drafted(drafts[0], oracle, loop.texts[0], 4)
            loop.verify(drafts, rng)


class Aligned(TinyLlama):
    """A file that aligns its tensors otherwise."""

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)


def test_a_whole_model_from_a_file_of_another_alignment(tmp_path: Path, rng: np.random.Generator) -> None:
    target = Aligned().write(tmp_path / "target.gguf")
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    whole = to_gguf(path, target, tmp_path / "whole.gguf", type="f32", whole=True).path
    with lt.Model(target) as old, lt.Model(whole) as new:
        tokens = random_tokens(rng, old, 50)
        assert relative(all_logits(new, tokens), all_logits(old, tokens)) < 2e-6


def test_a_target_in_several_files(target: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    source = MtpCheckpoint(TINY)
    path = source.write(tmp_path / "mtp.safetensors")
    first = split(target, tmp_path / "shards")[0]
    whole = to_gguf(path, target, tmp_path / "one.gguf", whole=True).path
    assert to_gguf(path, first, tmp_path / "two.gguf", whole=True).path.read_bytes() == whole.read_bytes()
    text = random_text(rng, 20)
    with opened(Pair(first, path, "mtp", oracle_of(source))) as loop:
        loop.start({0: text})
        assert_drafted(loop.draft()[0], oracle_of(source), text, 4)
    # A file may have the name of a shard and be whole.
    named = tmp_path / "model-00001-of-00002.gguf"
    named.write_bytes(target.read_bytes())
    assert to_gguf(path, named, tmp_path / "three.gguf", whole=True).path.read_bytes() == whole.read_bytes()


def test_no_window_takes_memory(target: Path, tmp_path: Path) -> None:
    """The window of a block that is not there, and is longer than any context."""
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    with lt.Model(target) as model, model.context(n_ctx=4096, n_seq_max=4, kv_unified=True) as context:
        spec = lt.SpeculativeContext(context, path)
        assert spec.n_ctx == 4096


def test_the_whole_model_is_that_of_the_formulas(
    target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = MtpCheckpoint(TINY)
    whole = to_gguf(
        source.write(tmp_path / "mtp.safetensors"), target, tmp_path / "whole.gguf", type="f32", whole=True
    )
    weights = mtp.Weights.read(whole.path)
    text = random_text(rng, 30)
    states, _ = mtp.forward(text, weights)
    assert relative(states, states_of(TINY, text)) < 1e-12
    expected = mtp_checkpoint.draft(text, states[-1, :-1], source.block(), 4)
    found = mtp.draft(text, states[-1, :-1], weights, 4)
    assert found[0] == expected[0]
    assert relative(found[1], expected[1]) < 1e-6


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_rewritten_gives_the_same_logits(
    smollm2_path: Path, smollm2: lt.Model, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Q4_1: quantised rows move as they are; the kernels add in another order."""
    tiny = TinyLlama(n_embd=576, n_layer=30, n_vocab=smollm2.n_vocab, n_head=9, n_head_kv=3)
    source = MtpCheckpoint(tiny, n_ff=1536, n_head=9, n_head_kv=3, head_width=64, rope_base=100000.0)
    path = source.write(tmp_path / "mtp.safetensors")
    whole = to_gguf(path, smollm2_path, tmp_path / "whole.gguf", whole=True).path
    tokens = smollm2.tokenize("The capital of France is Paris, and that of Italy is Rome. 1, 2, 3, 4, 5, 6")
    with lt.Model(whole) as new:
        assert new.file_type == smollm2.file_type
        assert new.tokenize("The capital").tolist() == smollm2.tokenize("The capital").tolist()
        message = [{"role": "user", "content": "hello"}]
        assert new.apply_chat_template(message) == smollm2.apply_chat_template(message)
        found, expected = all_logits(new, tokens), all_logits(smollm2, tokens)
    assert relative(found, expected) < 3e-2
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("whole", [False, True])
def test_there_and_back_bit_for_bit(whole: bool, dtype: str, target: Path, tmp_path: Path) -> None:
    source = MtpCheckpoint(TINY, dtype=dtype)
    kind: Any = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    path = source.write(tmp_path / "mtp.safetensors")
    draft = to_gguf(path, target, tmp_path / "draft.gguf", type=kind, whole=whole).path
    back = to_checkpoint(draft, target, tmp_path / "back.safetensors", format="mtp").path
    first, second = read_mtp(path), read_mtp(back)
    assert first.dtype == second.dtype == np.dtype(dtype)
    for name, values in first.tensors.items():
        assert np.array_equal(values, second.tensors[name]), name
    if not whole:
        assert first.config == second.config
        again = to_gguf(back, target, tmp_path / "again.gguf", type=kind).path
        assert again.read_bytes() == draft.read_bytes()


def test_writing(tmp_path: Path) -> None:
    source = MtpCheckpoint(TINY)
    named = {key: value for key, value in source.config.items() if key != "model_type"}
    config = MtpConfig(**named)
    path = write_mtp(tmp_path / "mtp.safetensors", source.tensors, config)
    assert read_mtp(path).config == config == read_mtp(source.write(tmp_path / "other.safetensors")).config
    with pytest.raises(lt.InvalidInputError, match=r"lacks eh_proj\.weight"):
        write_mtp(
            path, {name: one for name, one in source.tensors.items() if name != "eh_proj.weight"}, config
        )
    with pytest.raises(lt.InvalidInputError, match=r"has no other\.weight"):
        write_mtp(path, {**source.tensors, "other.weight": np.ones(3, np.float32)}, config)


Change = Callable[[MtpCheckpoint], object]


def said(**entries: Any) -> Change:
    return lambda source: source.config.update(entries)


#: Blocks that do not fit: the error and its words.
MISFITS: dict[str, tuple[Change, type[lt.Error], str]] = {
    "another width": (
        said(hidden_size=128),
        lt.InvalidInputError,
        r"eh_proj\.weight has the shape \[64, 128\]",
    ),
    "another vocabulary": (said(vocab_size=300), lt.InvalidInputError, "a vocabulary of 300.*has 259"),
    "another architecture": (said(target_architecture="qwen3"), lt.InvalidInputError, "qwen3.*has llama"),
    "another depth": (said(target_num_hidden_layers=5), lt.InvalidInputError, "blocks: 5.*has 4"),
    "post-norm": (said(hidden_state="post-norm"), lt.UnsupportedError, "hidden_state = 'post-norm'"),
    "an activation": (said(hidden_act="gelu"), lt.UnsupportedError, "hidden_act = 'gelu'"),
    "scaled rope": (said(rope_scaling={"factor": 2.0}), lt.UnsupportedError, "rope_scaling"),
    "no base": (lambda one: one.config.pop("rope_theta"), lt.InvalidInputError, "no rope_theta"),
    "a bias": (
        lambda one: one.tensors.update({"self_attn.q_proj.bias": np.ones(64, np.float32)}),
        lt.UnsupportedError,
        r"self_attn\.q_proj\.bias",
    ),
    "a tensor less": (
        lambda one: one.tensors.pop("hnorm.weight"),
        lt.InvalidInputError,
        r"lacks hnorm\.weight",
    ),
    "no block": (said(model_type="llama"), lt.InvalidInputError, "expected an MTP block.*found 'llama'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_block_that_does_not_fit(name: str, target: Path, tmp_path: Path, cache: Path) -> None:
    change, error, words = MISFITS[name]
    source = MtpCheckpoint(TINY)
    change(source)
    path = source.write(tmp_path / "mtp.safetensors")
    with pytest.raises(error, match=words):
        to_gguf(path, target, tmp_path / "draft.gguf")
    with lt.Model(target) as model, model.context(n_ctx=256) as context, pytest.raises(error, match=words):
        lt.load_drafter(context, path)
    assert not cache.exists() or not list(cache.iterdir())


def test_files_that_are_no_blocks(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    draft = tmp_path / "draft.gguf"
    with pytest.raises(lt.ModelNotFoundError, match="no such file"):
        to_gguf(path, target, draft)
    save_file({"a": np.ones(3, np.float32)}, path)
    with pytest.raises(
        lt.InvalidInputError, match=r"says nothing about its shape: expected.*found no metadata"
    ):
        to_gguf(path, target, draft)
    save_file({"a": np.ones(3, np.float32)}, path, metadata={"config": "{"})
    with pytest.raises(lt.ModelLoadError, match="is not JSON"):
        to_gguf(path, target, draft)
    data = MtpCheckpoint(TINY).write(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(lt.ModelLoadError, match="not a readable safetensors file"):
        to_gguf(path, target, draft)
    MtpCheckpoint(TINY).write(path)
    with pytest.raises(lt.InvalidInputError, match="are not for MTP blocks"):
        to_gguf(path, target, draft, target_layers=[1, 2, 3])
    with pytest.raises(lt.InvalidInputError, match="whole is for an MTP block"):
        to_gguf(tmp_path, target, draft, whole=True)
    assert not draft.exists()


def test_models_that_cannot_be_rewritten(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "whole.gguf"

    def refused(
        tiny: TinyLlama, words: str, error: type[lt.Error] = lt.UnsupportedError, **block: Any
    ) -> None:
        model = tiny.write(tmp_path / "target.gguf")
        path = MtpCheckpoint(tiny, **block).write(tmp_path / "mtp.safetensors")
        with pytest.raises(error, match=words):
            to_gguf(path, model, out, whole=True)

    refused(TinyQwen3(), "of architecture qwen3; only llama")
    scaled = TinyLlama()
    scaled.weights["rope_freqs.weight"] = np.full(8, 2, np.float32)
    refused(scaled, r"does not compute with rope_freqs\.weight")
    biased = TinyLlama()
    biased.weights["blk.0.attn_output.bias"] = np.ones(64, np.float32)
    refused(biased, r"does not compute with blk\.0\.attn_output\.bias")

    class Scaled(TinyLlama):
        def add_keys(self, writer: gguf.GGUFWriter) -> None:
            writer.add_float32("llama.attention.scale", 0.5)
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)

    refused(Scaled(), r"llama\.attention\.scale = 0\.5, llama\.rope\.scaling\.factor = 4\.0")
    wrong = lt.InvalidInputError
    refused(TinyLlama(), "feed-forward of 160, wider than 96", wrong, n_ff=160)
    refused(TinyLlama(), r"heads of width 24.*16", wrong, head_width=24)
    refused(TinyLlama(), r"rotary base of 500000\.0", wrong, rope_base=5e5)
    refused(TinyLlama(), r"epsilon of 0\.001", wrong, eps=1e-3)
    assert not out.exists()


def test_the_command(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MtpCheckpoint(TINY).write(tmp_path / "mtp.safetensors")
    whole, back = str(tmp_path / "whole.gguf"), str(tmp_path / "back.safetensors")
    assert main(["convert", str(path), str(target), "--whole", "-o", whole]) == 0
    assert capsys.readouterr().out.startswith(f"{whole}: mtp on H_4, ")
    assert main(["convert", whole, str(target), "--to", "mtp", "-o", back]) == 0
    assert json.loads(json.dumps(read_mtp(Path(back)).config.intermediate_size)) == 96
    assert main(["convert", whole, str(target), "--to", "speculators", "-o", back]) == 1
    assert "is of architecture mimo2; the format speculators is for eagle3" in capsys.readouterr().err
