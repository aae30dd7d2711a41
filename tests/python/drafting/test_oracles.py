"""Checks of the oracles themselves, and of the rigged models that follow a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, random_tokens, relative
from support.tiny_models import drafters, rigged
from support.tiny_models.rigged import Round, by_state, by_token, cycle, restricted, simulate, wrong_at

import llamatap as lt
from reference import eagle3, mtp

F = cycle()
SOME_WRONG = wrong_at(F, range(12, 64, 4))
ALL_WRONG = wrong_at(F, range(64))
TEXT = [1, 9, 30, 12, 13]  # ends as a target that follows F goes on
OTHER_TEXT = [1, 9, 30, 12, 40]  # does not


def all_logits(model: lt.Model, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    batch = lt.Batch()
    for position, token in enumerate(tokens):
        batch.add(int(token), position, output=True)
    with model.context(n_ctx=256, **EXACT) as context:
        context.decode(batch)
        return np.stack([context.logits(row) for row in range(len(tokens))])


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": False}, {"n_nextn": 0}, {"n_nextn": 3, "window": 8}, {"n_layer": 1, "seed": 5}],
    ids=str,
)
def test_the_trunk_of_mimo2_is_what_the_formulas_say(
    options: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    path = drafters.write_mimo2(tmp_path / "mimo2.gguf", **options)
    weights = mtp.Weights.read(path)
    with lt.Model(path, load_mtp=True) as model, lt.Extractor(model, **EXACT) as extractor:
        assert model.n_layer == weights.n_layer == options.get("n_layer", 3)
        tokens = random_tokens(rng, model, 40)
        found = extractor(tokens, range(model.n_layer + 1))
        logits = all_logits(model, tokens)
    states, expected = mtp.forward(tokens, weights)
    for layer in range(weights.n_layer + 1):
        assert relative(found[layer], states[layer]) < 1e-5, f"H_{layer}"
        assert 0.5 < states[layer].std() < 3
    assert relative(logits, expected) < 1e-5
    highest = np.sort(expected, axis=1)[:, -2:]
    assert np.diff(highest, axis=1).min() > 1e-3


def test_one_seed_is_one_model_however_it_is_written(tmp_path: Path, rng: np.random.Generator) -> None:
    whole, split, block = (
        mtp.Weights.read(path)
        for path in (
            drafters.write_mimo2(tmp_path / "whole.gguf"),
            drafters.write_mimo2(tmp_path / "split.gguf", fused=False),
            drafters.write_mtp_block(tmp_path / "block.gguf"),
        )
    )
    tokens = rng.integers(3, drafters.N_VOCAB, 20).tolist()
    states, logits = mtp.forward(tokens, whole)
    assert relative(mtp.forward(tokens, split)[1], logits) < 1e-12
    assert mtp.draft(tokens, states[-1, :-1], whole, 3)[0] == mtp.draft(tokens, states[-1, :-1], block, 3)[0]
    assert "blk.0.attn_norm.weight" not in block.tensors


@pytest.mark.parametrize("n_nextn", [1, 3])
def test_files_of_drafters_load(n_nextn: int, tmp_path: Path) -> None:
    blocks = drafters.write_mtp_block(tmp_path / "blocks.gguf", n_layer=4, n_nextn=n_nextn)
    rigged_blocks = rigged.write_rigged_mtp(tmp_path / "rigged.gguf", F, [F] * n_nextn, trunk=False)
    for path in (blocks, rigged_blocks):
        with lt.Model(path, load_mtp=True) as model:
            assert (model.arch, model.n_layer, model.n_embd) == ("mimo2", 4, 64)
    drafter = drafters.write_eagle3(tmp_path / "eagle3.gguf", n_draft_vocab=100)
    with lt.Model(drafter) as model:
        assert (model.arch, model.n_vocab) == ("eagle3", drafters.N_VOCAB)


@pytest.mark.parametrize("half", ["both", "state"])
def test_the_block_of_eagle3_is_one_of_llama_where_token_and_state_are_one(
    half: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Given g = e and one norm for both, W [norm(e), norm(g)] is (W_e + W_g) norm(e)."""
    w = eagle3.Weights.read(drafters.write_eagle3(tmp_path / "eagle3.gguf"))
    assert w.d2t is None
    width = drafters.N_EMBD
    w.tensors["blk.0.attn_norm.weight"] = w.tensors["blk.0.attn_norm_2.weight"]
    for part in "qkv":
        matrix = w.tensors[f"blk.0.attn_{part}.weight"]
        if half == "state":
            matrix[:, :width] = 0
    llama = {**w.tensors}
    for part in "qkv":
        matrix = llama[f"blk.0.attn_{part}.weight"]
        llama[f"blk.0.attn_{part}.weight"] = matrix[:, :width] + matrix[:, width:]
    for name in ("fc.weight", "blk.0.attn_norm_2.weight"):
        del llama[name]
    keys = drafters.decoder_keys(1, width, drafters.N_FF, drafters.N_HEAD_KV, drafters.ROPE_BASE)
    tensors: drafters.Tensors = {name: values.astype(np.float32) for name, values in llama.items()}
    tokens = rng.integers(3, drafters.N_VOCAB, 30)
    logits, after = eagle3.decode(tokens, w.tensors[eagle3.TOKENS][tokens], np.arange(30), w)
    path = drafters.write_file(tmp_path / "llama.gguf", "llama", keys, tensors)
    with lt.Model(path) as model, lt.Extractor(model, **EXACT) as extractor:
        assert relative(extractor(tokens.astype(np.int32), [1])[1], after) < 1e-5
        assert relative(all_logits(model, tokens.astype(np.int32)), logits) < 1e-5


def test_options_of_eagle3(tmp_path: Path, rng: np.random.Generator) -> None:
    target = drafters.write_mimo2(tmp_path / "target.gguf")
    tokens = rng.integers(3, drafters.N_VOCAB, 20).tolist()
    features = rng.standard_normal((19, 3 * drafters.N_EMBD))

    def read(**options: Any) -> eagle3.Weights:
        return eagle3.Weights.read(drafters.write_eagle3(tmp_path / "eagle3.gguf", **options), target)

    def logits_of(weights: eagle3.Weights) -> NDArray[np.float64]:
        return eagle3.decode(tokens[1:], eagle3.encode(features, weights), np.arange(19), weights)[0]

    plain = logits_of(read())
    some = read(n_draft_vocab=100)
    assert some.d2t is not None
    assert (np.diff(some.d2t) > 0).all()
    reached = np.isfinite(logits_of(some))
    assert (reached.sum(axis=1) == 100).all()
    assert reached[0, some.d2t].all()
    assert set(eagle3.draft(tokens, features, some, 5)[0]) <= set(some.d2t.tolist())
    for options in ({"norm_before_residual": True}, {"norm_before_fc": True}, {"own_embedding": False}):
        assert relative(logits_of(read(**options)), plain) > 0.05, options
    narrow = read(n_embd=48)
    drafted, probabilities = eagle3.draft(tokens, features, narrow, 4)
    assert len(drafted) == len(probabilities) == 4
    inherited = read(own_head=False)
    head = mtp.Weights.read(target).tensors["output.weight"]
    assert np.array_equal(inherited.tensors[eagle3.HEAD], head)


def test_steps_of_drafting_are_pairs_in_one_sequence(tmp_path: Path, rng: np.random.Generator) -> None:
    """The second step, from its formula: what the first gave, one position on."""
    tokens = rng.integers(3, drafters.N_VOCAB, 12).tolist()
    weights = eagle3.Weights.read(drafters.write_eagle3(tmp_path / "eagle3.gguf"))
    features = rng.standard_normal((11, 3 * drafters.N_EMBD))
    (first, second), probabilities = eagle3.draft(tokens, features, weights, 2)
    g = eagle3.encode(features, weights)
    after = eagle3.decode(tokens[1:], g, np.arange(11), weights)[1]
    logits, _ = eagle3.decode([*tokens[1:], first], np.vstack([g, after[-1]]), np.arange(12), weights)
    assert second == logits[-1].argmax()
    assert probabilities[1] == eagle3.softmax(logits)[-1].max()

    hidden = rng.standard_normal((11, drafters.N_EMBD))
    for n_nextn in (1, 3):
        heads = mtp.Weights.read(drafters.write_mimo2(tmp_path / "mtp.gguf", n_nextn=n_nextn))
        drafted, probabilities = mtp.draft(tokens, hidden, heads, 2)
        h = np.vstack([np.zeros(drafters.N_EMBD), hidden])
        after = mtp.decode(tokens, h, np.arange(12), heads)[1]
        pairs = [*tokens, drafted[0]], np.vstack([h, after[-1]])
        logits, _ = mtp.decode(*pairs, np.arange(13), heads, head=1 if n_nextn > 1 else 0)
        assert drafted[1] == logits[-1].argmax()
        assert probabilities[1] == eagle3.softmax(logits)[-1].max()
    assert len(mtp.draft(tokens, hidden, heads, 9)[0]) == 3


@pytest.mark.parametrize("kind", ["llama", "mimo2", "mimo2 with blocks"])
def test_a_rigged_target_follows_its_table(kind: str, tmp_path: Path) -> None:
    table = wrong_at(F, [20, 21])
    path = tmp_path / "target.gguf"
    if kind == "llama":
        rigged.write_rigged_model(path, table)
    else:
        rigged.write_rigged_mtp(path, table, [F] if "blocks" in kind else [])
    with lt.Model(path, load_mtp=True) as model:
        assert model.n_layer == rigged.N_LAYER
        tokens = np.arange(rigged.N_VOCAB, dtype=np.int32)
        logits = all_logits(model, tokens)
        assert logits.argmax(axis=1).tolist() == table
        highest = np.sort(logits, axis=1)[:, -2:]
        assert np.abs(highest - [0, rigged.MARGIN]).max() < 1e-3
        states = lt.extract(model, tokens, range(rigged.N_LAYER + 1))
        for layer in range(rigged.N_LAYER + 1):
            assert np.array_equal(states[layer], np.eye(rigged.N_VOCAB) * rigged.SIZE)
        text = "Why not, then?\nBecause: it's so."
        assert model.detokenize(model.tokenize(text)[1:]) == text


def one_hot(tokens: list[int]) -> NDArray[np.float64]:
    """H_i of a rigged target: 8 e_t."""
    return np.eye(rigged.N_VOCAB)[tokens] * rigged.SIZE


@pytest.mark.parametrize("text", [TEXT, OTHER_TEXT], ids=["greedy", "other"])
@pytest.mark.parametrize("half", ["token", "state"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True},
        {"draft_vocab": range(5, 60, 2)},
        {"own_embedding": False, "table": None},
    ],
    ids=["plain", "norm_before_residual", "d2t", "inherited"],
)
def test_a_rigged_eagle3_drafts_as_designed(
    options: dict[str, Any], half: rigged.Half, text: list[int], tmp_path: Path
) -> None:
    target = rigged.write_rigged_model(tmp_path / "target.gguf", F)
    given = {"table": SOME_WRONG, **options}
    path = rigged.write_rigged_eagle3(tmp_path / "eagle3.gguf", F, half=half, **given)
    table = F if given["table"] is None else SOME_WRONG
    if "draft_vocab" in options:
        table = restricted(table, options["draft_vocab"])
    expected = by_token(table) if half == "token" else by_state(F, table)
    weights = eagle3.Weights.read(path, target)
    drafted, probabilities = eagle3.draft(text, np.tile(one_hot(text[:-1]), 3), weights, 9)
    assert drafted == expected(text, 9)
    n_vocab = len(options.get("draft_vocab", range(rigged.N_VOCAB)))
    assert np.abs(probabilities - rigged.probability(n_vocab=n_vocab)).max() < 1e-4


@pytest.mark.parametrize("text", [TEXT, OTHER_TEXT], ids=["greedy", "other"])
@pytest.mark.parametrize("half", ["token", "state"])
@pytest.mark.parametrize("n_heads", [1, 3])
@pytest.mark.parametrize("trunk", [True, False])
def test_rigged_blocks_of_mtp_draft_as_designed(
    trunk: bool, n_heads: int, half: rigged.Half, text: list[int], tmp_path: Path
) -> None:
    tables = [SOME_WRONG, ALL_WRONG, F][:n_heads]
    path = rigged.write_rigged_mtp(tmp_path / "mtp.gguf", F, tables, half=half, trunk=trunk, margin=4.0)
    expected = by_token(*tables) if half == "token" else by_state(F, *tables)
    drafted, probabilities = mtp.draft(text, one_hot(text[:-1]), mtp.Weights.read(path), 7)
    assert drafted == expected(text, 7)
    assert len(drafted) == (7 if n_heads == 1 else 3)
    assert np.abs(probabilities - rigged.probability(4.0)).max() < 1e-4


def test_what_rigged_drafters_draft() -> None:
    assert F[12:15] == [13, 14, 15]
    assert F[63] == 3
    assert SOME_WRONG[12:17] == [20, 14, 15, 16, 24]
    assert by_token(SOME_WRONG)([5, 11], 4) == [12, 20, 28, 36]
    assert by_state(F, SOME_WRONG)([10, 11], 4) == [12, 20, 14, 15]
    assert by_state(F, SOME_WRONG)([10, 55], 2) == [12, 20]
    assert by_token(F, ALL_WRONG)([11], 4) == [12, 20]
    assert by_state(F, F, ALL_WRONG)([10, 11], 4) == [12, 20]
    assert restricted(F, [14, 16])[13:16] == [14, 14, 16]


def test_simulated_rounds_where_all_is_accepted() -> None:
    for draft in (by_token(F), by_state(F, F)):
        found = simulate(F, draft, [1, 10], n_max=3, max_tokens=10)
        assert found.first == 11
        assert found.rounds == (
            Round((12, 13, 14), 3, (12, 13, 14, 15)),
            Round((16, 17, 18), 3, (16, 17, 18, 19)),
            Round((), 0, (20,)),
        )
        assert found.tokens == list(range(11, 21))
        assert (found.n_drafted, found.n_accepted) == (6, 6)
    # Room for two more tokens after the first is room for a draft of one.
    assert simulate(F, by_token(F), [10], 3, 3).rounds == (Round((12,), 1, (12, 13)),)
    assert simulate(F, by_token(F), [10], 3, 1).rounds == ()


def test_simulated_rounds_where_nothing_is_accepted() -> None:
    by_tokens = simulate(F, by_token(ALL_WRONG), [10], n_max=2, max_tokens=4)
    assert by_tokens.rounds == (Round((19, 27), 0, (12,)), Round((20,), 0, (13,)), Round((), 0, (14,)))
    by_states = simulate(F, by_state(F, ALL_WRONG), [10], n_max=2, max_tokens=4)
    assert by_states.rounds == (Round((19, 20), 0, (12,)), Round((20,), 0, (13,)), Round((), 0, (14,)))
    assert by_tokens.tokens == by_states.tokens == [11, 12, 13, 14]
    assert simulate(F, by_token(F), [10], n_max=0, max_tokens=3).rounds == (
        Round((), 0, (12,)),
        Round((), 0, (13,)),
    )


def test_simulated_rounds_where_some_are_accepted() -> None:
    """Wrong after 12, 16 and 20."""
    found = simulate(F, by_state(F, SOME_WRONG), [10], n_max=3, max_tokens=9)
    assert found.rounds == (
        Round((12, 20, 14), 1, (12, 13)),
        Round((14, 15, 16), 3, (14, 15, 16, 17)),
        Round((18,), 1, (18, 19)),
    )
    assert simulate(F, by_token(SOME_WRONG), [10], 3, 9).rounds[0] == Round((12, 20, 28), 1, (12, 13))
    assert found.tokens == list(range(11, 20))


def test_tables_of_rigged_files_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    assert len(rigged.VOCABULARY.tokens) == len(set(rigged.VOCABULARY.tokens)) == rigged.N_VOCAB
    path = rigged.write_rigged_eagle3(tmp_path / "eagle3.gguf", F, F, draft_vocab=[4, 9])
    reader = gguf.GGUFReader(path)
    (d2t,) = (tensor for tensor in reader.tensors if tensor.name == "d2t")
    assert d2t.tensor_type == gguf.GGMLQuantizationType.I64
    assert d2t.data.tolist() == [4, 9]
