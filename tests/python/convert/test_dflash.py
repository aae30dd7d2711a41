from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import DFlashCheckpoint
from support.drafting import EXACT, Oracle, Pair, assert_drafted, opened, random_text, states_of
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.convert import to_checkpoint, to_gguf
from reference import dflash

TINY = TinyLlama()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("target") / "target.gguf")


def features_of(source: DFlashCheckpoint, text: Sequence[int]) -> NDArray[np.float64]:
    states = states_of(TINY, text)
    return np.concatenate([states[layer] for layer in source.layers], axis=1)


def oracle_of(source: DFlashCheckpoint) -> Oracle:
    weights = source.weights(TINY)

    def draft(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        tokens, probabilities = dflash.draft(text, features_of(source, text[:-1]), weights, n)
        return tokens, np.array(probabilities)

    return draft


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash, two layers of the target": {"layers": (1, 4), "n_layer": 3},
    "DFlash of speculators": {"format": "speculators"},
    "DFlash of speculators, d2t": {"format": "speculators", "n_draft_vocab": 100},
    "DFlash of speculators, an embedding": {"format": "speculators", "embedding": True},
    "DSpark": {"markov": 8, "n_head_kv": 1},
    "DSpark of speculators": {"format": "speculators", "markov": 8, "n_draft_vocab": 90},
    "DSpark of speculators, a bonus": {"format": "speculators", "markov": 8, "anchor": False},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_are_those_of_the_checkpoint(
    name: str, target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = DFlashCheckpoint(**CHECKPOINTS[name])
    done = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="f32")
    assert (done.kind, done.target_layers) == ("dflash", source.layers)
    oracle = oracle_of(source)
    with opened(Pair(target, done.path, "dflash", oracle)) as loop:
        loop.start({0: random_text(rng, 40)})
        for _ in range(4):
            drafts = loop.draft()
            assert_drafted(drafts[0], oracle, loop.texts[0], 4)
            loop.verify(drafts, rng)


@pytest.mark.parametrize("with_markov", [False, True])
def test_the_confidence_head(
    with_markov: bool, target: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = DFlashCheckpoint("speculators", markov=8, confidence=True, with_markov=with_markov)
    draft = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf", type="f32").path
    weights = source.weights(TINY)
    lengths = set()
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, draft, **EXACT)
        for _ in range(12):
            text = random_text(rng, 10)
            drafter = lt.DFlashDrafter(spec, n_max=6, p_min=0.5)
            batch = lt.Batch.of(text[:-1])
            with context.tap(spec.target_layers) as tap:
                context.decode(batch)
                drafter.process(batch, tap.states)
            found = drafter.draft({0: lt.DraftRequest(text[-1], 9, 6)}).get(0)
            block = [text[-1], *[weights.mask] * 5]
            sure = dflash.block_logits(block, features_of(source, text[:-1]), weights)[2]
            assert sure is not None
            expected = next((i for i, value in enumerate(sure) if value < 0.5), 6)
            assert (0 if found is None else len(found.tokens)) == expected
            lengths.add(expected)
            context.memory.clear()
            drafter.reset(0)
    assert len(lengths) > 2


def test_keys_and_tensors_of_the_file(target: Path, tmp_path: Path) -> None:
    source = DFlashCheckpoint("speculators", embedding=True, n_layer=1)
    path = to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf").path
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # Without a head the engine would take this embedding for one.
    assert np.array_equal(tensors["output.weight"].data, TINY.weights["output.weight"])
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.F16
    assert reader.fields["tokenizer.ggml.mask_token_id"].contents() == 258
    assert reader.fields["dflash.block_size"].contents() == 6
    with pytest.raises(
        lt.UnsupportedError, match="architecture dflash; the format speculators is for eagle3"
    ):
        to_checkpoint(path, target, tmp_path / "back")


def test_heads_in_a_container(target: Path, tmp_path: Path) -> None:
    source = DFlashCheckpoint(markov=8)
    first = to_gguf(source.write(tmp_path / "one"), target, tmp_path / "one.gguf").path
    source.tensors = {
        f"logit_head.{name}" if "markov" in name else name: one for name, one in source.tensors.items()
    }
    second = to_gguf(source.write(tmp_path / "two"), target, tmp_path / "two.gguf").path
    assert first.read_bytes() == second.read_bytes()


Change = Callable[[DFlashCheckpoint], object]


def said(**entries: Any) -> Change:
    return lambda one: one.config.get("transformer_layer_config", one.config).update(entries)


def told(**entries: Any) -> Change:
    return lambda one: one.config.update(entries)


def inner(**entries: Any) -> Change:
    return lambda one: one.config["dflash_config"].update(entries)


WINDOW = ["sliding_attention", "full_attention"]

#: Options, what is changed, the error and its words.
REFUSED: dict[str, tuple[dict[str, Any], Change, type[lt.Error], str]] = {
    "a bias": (
        {},
        lambda one: one.tensors.update({"layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
        lt.UnsupportedError,
        r"q_proj\.bias",
    ),
    "windows": ({}, said(layer_types=WINDOW, sliding_window=8), lt.UnsupportedError, "layer_types"),
    "an activation": ({}, said(hidden_act="gelu"), lt.UnsupportedError, "hidden_act"),
    "rope": ({}, said(rope_scaling={"rope_type": "yarn", "factor": 2.0}), lt.UnsupportedError, "yarn"),
    "DFlash2": (
        {"format": "speculators"},
        told(speculators_model_type="dflash2"),
        lt.UnsupportedError,
        "no checkpoint of a known drafter.*'dflash2'",
    ),
    "an anchor": ({"format": "speculators"}, told(sample_from_anchor=True), lt.UnsupportedError, "place 0"),
    "a gated head": ({"markov": 8}, inner(markov_head_type="gated"), lt.UnsupportedError, "'gated'"),
    "no Markov head": ({"markov": 8}, inner(markov_rank=0), lt.UnsupportedError, "markov_rank = 0"),
    "another projector": (
        {},
        inner(projector_type="domino"),
        lt.UnsupportedError,
        "projector_type = 'domino'",
    ),
    "shifted labels": ({}, inner(shift_label=True), lt.UnsupportedError, "shift_label"),
    "no layers": ({}, inner(target_layer_ids=None), lt.InvalidInputError, "names no layers"),
    "a layer too many": ({}, inner(target_layer_ids=[1, 4]), lt.InvalidInputError, "4 is not in 0..3"),
    "no mask": ({}, inner(mask_token_id=None), lt.InvalidInputError, r"no dflash_config\.mask_token_id"),
    "a mask beyond": ({}, inner(mask_token_id=259), lt.InvalidInputError, "mask_token_id is 259"),
    "another depth": ({}, told(num_target_layers=5), lt.InvalidInputError, "target of 5 blocks.*has 4"),
    "another width": ({"n_embd": 128}, said(), lt.InvalidInputError, "width 128.*has 64"),
    "another vocabulary": ({}, said(vocab_size=300), lt.InvalidInputError, "vocabulary of 300.*has 259"),
    "no head for d2t": (
        {"format": "speculators", "n_draft_vocab": 100},
        lambda one: one.tensors.pop("lm_head.weight"),
        lt.InvalidInputError,
        r"lacks lm_head\.weight",
    ),
    "a tensor less": (
        {},
        lambda one: one.tensors.pop("hidden_norm.weight"),
        lt.InvalidInputError,
        r"lacks hidden_norm\.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    options, change, error, words = REFUSED[name]
    source = DFlashCheckpoint(**options)
    change(source)
    with pytest.raises(error, match=words):
        to_gguf(source.write(tmp_path / "checkpoint"), target, tmp_path / "draft.gguf")
    assert not (tmp_path / "draft.gguf").exists()
