"""Data sets read by the trainers' own code.

The trainers have environments of their own: `nox -s speculators specforge` makes them, and runs
these tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import random_rows, write_lines
from support.numerics import relative
from support.paths import ROOT, peer_python
from support.tiny import TinyLlama

from reference import decoder

#: Writing SpecForge's files needs PyTorch, which only its own environment has.
WRITER = """
import sys
sys.path += sys.argv[1:2]
from llamatap.__main__ import main
sys.exit(main(["dataset", *sys.argv[2:], "--quiet"]))
"""


def run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float32", 1e-3)])
@pytest.mark.parametrize("name", ["speculators", "specforge"])
def test_a_trainer_reads_it(
    name: str, dtype: str, tolerance: float, tiny: TinyLlama, tiny_path: Path, tmp_path: Path
) -> None:
    python = peer_python(name)
    if not python.exists():
        pytest.skip(f"needs {name}; `nox -s {name}` installs it")
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    rows: list[dict[str, Any]] = random_rows(31, 25, longest=200)
    path = write_lines(tmp_path / "in.jsonl", [{"text": ""}, *rows])
    written, out = tmp_path / "written", tmp_path / "found.npz"
    command: list[str | Path] = [sys.executable, "-c", WRITER, packages, tiny_path, path, "-o", written]
    run([*command, "--layers", "1,2,3", "--layout", name, "--dtype", dtype])
    reader = ROOT / "tests" / "peers" / "dataset_reader.py"
    run([python, reader, name, written, str(tiny.n_embd), "3", out])
    found = np.load(out)
    assert len(found.files) == 4 * len(rows)
    for i, row in enumerate(rows):
        mask = row["loss_mask"]
        if name == "specforge":
            # Its normalisation leaves out the last token, which nothing follows.
            mask = [*mask[:-1], 0]
        assert found[f"ids_{i}"].tolist() == row["input_ids"]
        assert found[f"mask_{i}"].tolist() == mask
        inputs = tiny.entering(np.array(row["input_ids"], np.int32))
        streams, normed, _ = decoder.forward(tiny.shape(), tiny.weights, inputs)
        aux = np.concatenate([streams[k] for k in (1, 2, 3)], 1)
        last = normed if name == "specforge" else streams[tiny.n_layer]
        assert found[f"aux_{i}"].shape == aux.shape
        assert relative(found[f"aux_{i}"], aux) < tolerance
        assert relative(found[f"last_{i}"], last) < tolerance
