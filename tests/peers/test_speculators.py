"""`llamatap serve` as the verifier of the speculators library, whose own code asks, reads and trains.

The library has an environment of its own: `nox -t peers` makes it, and runs these tests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.numerics import relative
from support.paths import ROOT, peer_python
from support.servers import FLAGS, served
from support.speculators_verifier import write_verifier
from support.tiny import TinyLlama

from reference import decoder

TRAINER = peer_python("speculators")

#: As vLLM counts: k is what enters block k. H_n is added as the last.
LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def tiny() -> TinyLlama:
    return TinyLlama()


@pytest.fixture
def work(tiny: TinyLlama, tmp_path: Path) -> Path:
    """A trainer's folder: rows of tokens, and the verifier as transformers has it."""
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, tiny.n_vocab, length).tolist() for length in rng.integers(3, 120, 32).tolist()]
    work = tmp_path / "work"
    work.mkdir()
    (work / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"input_ids": one, "loss_mask": [0, *[1] * (len(one) - 1)]}) + "\n" for one in rows
        )
    )
    write_verifier(work / "verifier", tiny)
    return work


def trained(what: str, work: Path, tiny: TinyLlama, dtype: str) -> None:
    """Run the trainer against a server of the model."""
    path = tiny.write(work / "tiny.gguf")
    command: list[str | Path] = [
        "--model",
        f"{work / 'verifier'}={path}",
        "--hidden-states-path",
        work / "states",
    ]
    command += ["--verifier-layers", ",".join(map(str, LAYERS)), "--verifier-dtype", dtype]
    with served(*command, *FLAGS) as (_, url):
        done = subprocess.run(
            [TRAINER, ROOT / "tests" / "peers" / "trainer.py", what, url, work],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # The reader has taken them all, and their locks.
        assert list((work / "states").iterdir()) == []


def checked(found: Iterator[tuple[list[int], np.ndarray]], tiny: TinyLlama, tolerance: float) -> int:
    """Compare states with the formula. Returns how many there were."""
    n = 0
    for tokens, states in found:
        streams, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))
        expected = np.stack([streams[k] for k in (*LAYERS, tiny.n_layer)], 1)
        assert states.shape == expected.shape
        for slot in range(len(LAYERS) + 1):
            assert relative(states[:, slot], expected[:, slot]) < tolerance
        n += 1
    return n


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float32", 1e-5)])
def test_a_trainer_reads_the_states_of_its_prompts(
    dtype: str, tolerance: float, work: Path, tiny: TinyLlama
) -> None:
    trained("states", work, tiny, dtype)
    found = np.load(work / "found.npz")
    for way in ("requests", "dataset", "offline"):
        # The data set's loader is told to give float32.
        kind = f"{way} torch.{'float32' if way == 'dataset' else dtype}"
        pairs = ((found[f"{kind} tokens {i}"].tolist(), found[f"{kind} states {i}"]) for i in range(32))
        assert checked(pairs, tiny, tolerance) == 32
    assert len(found.files) == 3 * 2 * 32


def test_a_drafter_learns_from_states_made_on_demand(work: Path, tiny: TinyLlama) -> None:
    trained("train", work, tiny, "bfloat16")
    found = json.loads((work / "losses.json").read_text())
    losses = found["losses"]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert all(found["changed"].values())
    assert len(found["changed"]) > 10
