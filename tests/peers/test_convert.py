"""EAGLE-3 checkpoints by the model class of the speculators library: `nox -s speculators`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import LINEAR, LLAMA3, Eagle3Checkpoint
from support.drafting import EXACT
from support.numerics import relative
from support.paths import TESTS, peer_python
from support.speculators_verifier import write_verifier
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.convert import to_checkpoint, to_gguf

PEER = peer_python("speculators")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True},
    "all tokens": {"n_draft_vocab": None},
    "llama3": {"scaling": LLAMA3, "rope_base": 1e4},
    "linear": {"scaling": LINEAR},
}


#: A checkpoint and the file made of it; or a file, and the checkpoint made of that.
CASES = [(name, back) for name in OPTIONS for back in (False, True)]


def write(folder: Path, source: Eagle3Checkpoint, verifier: Path, back: bool) -> None:
    """The target, the draft, the checkpoint, and what goes into them."""
    folder.mkdir()
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    source.config["speculators_config"] = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
    }
    target = TinyLlama().write(folder / "target.gguf")
    given = source.write(folder / ("given" if back else "checkpoint"))
    draft = to_gguf(given, target, folder / "draft.gguf", type="f32").path
    if back:
        to_checkpoint(draft, target, folder / "checkpoint", verifier=str(verifier))
    rng = np.random.default_rng(0)
    features = rng.standard_normal((128, 3 * source.n_embd_target)).astype(np.float32)
    np.savez(folder / "inputs.npz", features=features, tokens=rng.integers(3, source.n_vocab, 128))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all cases, with the logits that the library's class gave."""
    work = tmp_path_factory.mktemp("work")
    write_verifier(work / "verifier", TinyLlama())
    folders = [work / f"{name} {back}" for name, back in CASES]
    for folder, (name, back) in zip(folders, CASES, strict=True):
        write(folder, Eagle3Checkpoint(**OPTIONS[name]), work / "verifier", back)
    command = [PEER, TESTS / "peers" / "eagle3_logits.py", *folders]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return work


@pytest.mark.parametrize(("name", "back"), CASES)
def test_what_the_class_saves_is_the_same_drafter(
    name: str, back: bool, computed: Path, tmp_path: Path
) -> None:
    folder = computed / f"{name} {back}"
    done = to_gguf(folder / "saved", folder / "target.gguf", tmp_path / "draft.gguf", type="f32")
    assert done.path.read_bytes() == (folder / "draft.gguf").read_bytes()


@pytest.mark.parametrize(("name", "back"), CASES)
def test_logits_are_those_of_speculators_own_class(name: str, back: bool, computed: Path) -> None:
    folder = computed / f"{name} {back}"
    with np.load(folder / "inputs.npz") as given, np.load(folder / "found.npz") as result:
        tokens, features, expected = given["tokens"], given["features"], result["logits"]
    ids = np.arange(expected.shape[2]) + Eagle3Checkpoint(**OPTIONS[name]).tensors.get("d2t", 0)
    with (
        lt.Model(folder / "target.gguf") as model,
        model.context(n_ctx=256, **EXACT) as context,
        lt.SpeculativeContext(context, folder / "draft.gguf", **EXACT) as spec,
    ):
        # The first steps of all rows but the last two, which have no tokens for the others.
        n = 126
        found = spec.decode(tokens[:n], spec.encode(features[:n]), np.arange(n), logits=True)
        assert found.logits is not None
        assert relative(found.logits[:, ids], expected[0, :n]) < 1e-5
        for step in (1, 2):
            assert found.states is not None
            at = np.array([n - 1 + step])
            found = spec.decode(tokens[at], found.states[-1:], at, logits=True)
            assert found.logits is not None
            assert relative(found.logits[0, ids], expected[step, n - 1]) < 1e-5
