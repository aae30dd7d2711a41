"""Heads, their checkpoints, and the tensors that they are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the dtype bfloat16
import numpy as np
import pytest
from safetensors import safe_open
from support import checkpoints
from support.tiny import TinyLlama

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from support.heads import HEADS, LAYERS, draft_vocabulary, head_of  # noqa: E402

import llamatap as lt  # noqa: E402
from llamatap.convert import read_mtp, to_gguf  # noqa: E402
from llamatap.train.drafters.head_checkpoints import write_head  # noqa: E402
from llamatap.train.drafters.heads import Eagle3Head, MtpHead  # noqa: E402
from llamatap.train.drafters.sample_tensors import SampleTensors  # noqa: E402
from llamatap.train.drafters.target_weights import TargetWeights  # noqa: E402

TINY = TinyLlama()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def target(path: Path) -> TargetWeights:
    return TargetWeights.read(path)


def test_a_new_head_starts_from_its_target(target: TargetWeights) -> None:
    tokens = draft_vocabulary(target.n_vocab, 50)
    eagle, mtp = Eagle3Head(target, LAYERS, tokens), MtpHead(target)
    rows = torch.from_numpy(target.head[tokens])
    assert torch.equal(eagle.lm_head.weight, rows)
    assert torch.equal(eagle.target_head, rows)
    for head in (eagle, mtp):
        assert torch.equal(head.norm.weight, torch.from_numpy(target.norm))
        # The target's own weights are neither trained nor saved.
        trained = {name for name, values in head.named_parameters() if values.requires_grad}
        assert trained == set(head.state_dict()) - {"target_norm.weight"}
        assert not {"embedding", "target_head", "draft_tokens"} & set(head.state_dict())
    # Training does not change the target's.
    with torch.no_grad():
        eagle.lm_head.weight += 1
        eagle.norm.weight += 1
        mtp.norm.weight += 1
    assert torch.equal(eagle.target_head, rows)
    assert np.array_equal(target.norm, TINY.weights["output_norm.weight"])
    assert np.array_equal(target.head, TINY.weights["output.weight"])


@pytest.mark.parametrize(
    "tokens", [[5, 4, 9], [4, 4, 9], [-1, 4], [4, 259], [], [[4, 5]]], ids=lambda tokens: str(tokens)
)
def test_draft_vocabularies(tokens: Any, target: TargetWeights) -> None:
    """In another order, t2d would name other rows than d2t."""
    with pytest.raises(lt.InvalidInputError, match="draft_tokens must be ascending token ids from 0 to 258"):
        Eagle3Head(target, LAYERS, np.array(tokens, np.int64))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_checkpoints(name: str, dtype: str, path: Path, target: TargetWeights, tmp_path: Path) -> None:
    """Matrices in the dtype, norms in float32, none of the target's weights, and it converts."""
    head = head_of(name, target)
    written = write_head(tmp_path / "head.safetensors", head, target, dtype=dtype)
    assert written == tmp_path / "head.safetensors"
    if name == "mtp":
        with safe_open(written, framework="np") as file:
            tensors = {one: file.get_tensor(one) for one in file.keys()}  # noqa: SIM118
        assert read_mtp(written).config.target_num_hidden_layers == TINY.n_layer
    else:
        tensors = checkpoints.read(written)
    tokens = head.draft_tokens
    if tokens is not None:
        d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
        assert (d2t + np.arange(len(d2t))).tolist() == np.flatnonzero(t2d).tolist() == tokens.tolist()
    assert len(tensors) == 13
    for one, values in tensors.items():
        assert values.dtype == (np.float32 if values.ndim == 1 else np.dtype(dtype)), one
    assert not {"embed_tokens.weight", "target_norm.weight"} & set(tensors)
    assert ("lm_head.weight" in tensors) == (name != "mtp")
    kind: Any = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    assert to_gguf(written, path, tmp_path / "draft.gguf", type=kind).path.exists()


def samples(rng: np.random.Generator, lengths: tuple[int, ...], n_layers: int) -> list[tuple[Any, Any, Any]]:
    found = []
    for length in lengths:
        states = rng.integers(-100, 100, (length, n_layers, 4)).astype(np.float32)
        found.append((rng.integers(0, 99, length).astype(np.int32), rng.integers(0, 2, length), states))
    return found


@pytest.mark.parametrize("n_columns", [1, 4])
def test_batches_hold_the_samples(n_columns: int, rng: np.random.Generator) -> None:
    given = samples(rng, (3, 1, 7, 5), n_columns)
    store = SampleTensors.empty(20, n_columns, 4)
    for one in given:
        store.add(*one)
    assert (len(store), store.n_tokens) == (4, 16)
    chosen = [2, 1, 0]
    batch = store.batch(chosen)
    assert batch.tokens.shape == (3, 7)
    assert batch.tokens.dtype == torch.int64
    for row, index in enumerate(chosen):
        tokens, mask, states = given[index]
        n = len(tokens)
        assert batch.tokens[row, :n].tolist() == tokens.tolist()
        assert batch.loss_mask[row].tolist() == [*map(bool, mask), *[False] * (7 - n)]
        # Integers below 256 are exact in bfloat16.
        assert np.array_equal(batch.last[row, :n].float().numpy(), states[:, -1])
        features = states[:, :-1].reshape(n, -1) if n_columns > 1 else states[:, -1]
        assert np.array_equal(batch.features[row, :n].float().numpy(), features)
    with pytest.raises(lt.InvalidInputError, match="there is room for 20 tokens; found 21"):
        store.add(np.zeros(5, np.int32), np.zeros(5), np.zeros((5, n_columns, 4), np.float32))
    assert store.n_tokens == 16


def test_batches_are_of_similar_length(rng: np.random.Generator) -> None:
    lengths = (9, 2, 30, 3, 8, 2, 7, 12)
    store = SampleTensors.empty(100, 1, 4)
    for one in samples(rng, lengths, 1):
        store.add(*one)
    chosen = [0, 1, 2, 3, 5, 6, 7]
    ordered = store.batches(chosen, 18)
    assert ordered == [[1, 5, 3], [6, 0], [7], [2]]
    shuffled = [store.batches(chosen, 18, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    for batches in shuffled:
        assert sorted(one for batch in batches for one in batch) == sorted(chosen)
        for batch in batches:
            assert len(batch) * max(lengths[one] for one in batch) <= 18 or len(batch) == 1
    assert store.batches([], 18) == []
