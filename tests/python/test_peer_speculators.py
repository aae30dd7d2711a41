"""The server as the verifier of the speculators library, whose own code asks and reads.

The library has an environment of its own: `make test-peers` makes it, and runs these tests.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from conftest import relative
from serving import running, tiny_options
from tiny import TinyLlama

from llamatap.serve import ServerOptions, VerifierOptions
from reference import decoder

ROOT = Path(__file__).parent.parent.parent
TRAINER = ROOT / ".venv-speculators" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not TRAINER.exists(), reason="needs the speculators library; `make test-peers` installs it"
)

#: As vLLM counts: k is what enters block k. H_n is added as the last.
LAYERS = (1, 2, 3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float32", 1e-5)])
@pytest.mark.parametrize("way", ["requests", "dataset", "offline"])
def test_a_trainer_reads_the_states_of_its_prompts(
    way: str, dtype: Literal["bfloat16", "float32"], tolerance: float, tiny_path: Path, tmp_path: Path
) -> None:
    tiny = TinyLlama()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, tiny.n_vocab, length).tolist() for length in rng.integers(2, 200, 64).tolist()]
    work, folder = tmp_path / "work", tmp_path / "states"
    work.mkdir()
    (work / "prompts.json").write_text(json.dumps(prompts))
    options = ServerOptions(verifier=VerifierOptions(folder=folder, layers=LAYERS, dtype=dtype))
    with running([tiny_options(tiny_path)], options) as server:
        command: list[str | Path] = [
            TRAINER,
            ROOT / "tests" / "peers" / "trainer.py",
            way,
            server.url,
            work,
            tmp_path / "found.npz",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    found = np.load(tmp_path / "found.npz")
    # The data set's loader is told to give float32.
    expected_dtype = "float32" if way == "dataset" else dtype
    assert found["dtypes"].tolist() == [f"torch.{expected_dtype}"]
    for i, tokens in enumerate(prompts):
        streams, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))
        expected = np.stack([streams[k] for k in (*LAYERS, tiny.n_layer)], 1)
        assert found[f"states_{i}"].shape == expected.shape
        for slot in range(len(LAYERS) + 1):
            assert relative(found[f"states_{i}"][:, slot], expected[:, slot]) < tolerance
    # The reader has taken them all, and their locks.
    assert list(folder.iterdir()) == []
