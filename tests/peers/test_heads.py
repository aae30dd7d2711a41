"""Our training of EAGLE-3 heads beside speculators' own model class: `nox -s speculators`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import relative
from support.paths import TESTS, peer_python
from support.speculators_verifier import write_verifier
from support.tiny import TinyLlama

PEER = peer_python("speculators")
PROGRAM = TESTS / "peers" / "eagle3_training.py"
LENGTHS = (60, 45, 26)
STEPS = 3
DECAY = 0.7

#: With two tokens to choose from, random heads are often right.
HEADS: dict[str, dict[str, Any]] = {
    "all tokens": {"name": "eagle3", "holes": True},
    "100 tokens": {"name": "eagle3, few tokens", "n_tokens": 100, "holes": True},
    "2 tokens": {"name": "eagle3, few tokens", "n_tokens": 2, "holes": False},
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    for name, settings in HEADS.items():
        folder = work / name
        folder.mkdir()
        TinyLlama().write(folder / "target.gguf")
        write_verifier(folder / "verifier", TinyLlama())
        (folder / "settings.json").write_text(json.dumps(settings))
    packages = next(PEER.parent.parent.glob("lib/python*/site-packages"))
    command: list[str | Path] = [sys.executable, PROGRAM, packages, *(work / name for name in HEADS)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return work


@pytest.mark.parametrize("name", HEADS)
def test_every_step_is_that_of_speculators(name: str, computed: Path) -> None:
    with np.load(computed / name / "found.npz") as file:
        found = dict(file)
    starts = np.cumsum([0, *LENGTHS])
    predicted = [
        (index, entry)
        for index, length in enumerate(LENGTHS)
        for entry in range(length - 2)
        if found["mask"][starts[index] + entry + 2]
    ]
    entropy = 0.0
    for step in range(STEPS):
        ours, theirs, entropies = [], [], []
        for row, (index, entry) in enumerate(predicted):
            # Where the draft begins is their row; a text has one row less than tokens.
            assert entry >= step
            ours.append(found["our_logits"][step, row])
            theirs.append(found["their_logits"][step, starts[index] - index + entry - step])
            entropies.append(found["entropy"][starts[index] + entry + 1])
        assert relative(np.array(ours), np.array(theirs)) < 1e-5
        entropy += DECAY**step * float(np.mean(entropies))
    assert found["our_loss"] - entropy == pytest.approx(float(found["their_loss"]), rel=1e-5)
    assert found["our_predicted"].tolist() == found["their_predicted"].tolist()
    if name == "2 tokens":
        # Theirs go on over holes.
        assert found["our_accepted"].tolist() == found["their_accepted"].tolist()
        assert found["our_accepted"].min() > 5
    # That library trains no head.
    names = [one.removeprefix("our ") for one in found if one.startswith("our ") and "lm_head" not in one]
    assert len(names) == 12
    for one in names:
        assert relative(found[f"our {one}"], found[f"their {one}"]) < 1e-4, one
