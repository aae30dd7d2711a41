"""Other native packages in the same process, imported before or after ours: `nox -s neighbours`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamatap.fetch import fetch

STATES = """
import hashlib, sys
import llamatap as lt

def states():
    with lt.Model(sys.argv[1]) as model:
        extractor = lt.Extractor(model, n_threads=2)
        array = extractor("The capital of France is", layers=[0, 15, -1, "norm"]).array
        return hashlib.sha256(array.tobytes()).hexdigest()
"""

LLAMA_CPP = """
import sys
import llama_cpp

other = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=2, verbose=False)

def use():
    # The same model and the same kernels: what it answers is no accident.
    answer = other.create_completion("The capital of France is", max_tokens=4, temperature=0.0)
    assert "Paris" in answer["choices"][0]["text"], answer
"""

TORCH = """
import torch

def use():
    a = torch.arange(640_000, dtype=torch.float64).reshape(800, 800) / 640_000
    assert torch.allclose(torch.linalg.inv(a + torch.eye(800, dtype=torch.float64))
                          @ (a + torch.eye(800, dtype=torch.float64)),
                          torch.eye(800, dtype=torch.float64), atol=1e-6)
    # On CPUs that have it, by AMX: its tiles are set for a thread, whoever works on it.
    ones = torch.ones(256, 256, dtype=torch.bfloat16)
    assert torch.equal(ones @ ones, 256 * ones)
"""


def run(code: str, model: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch("smollm2")


@pytest.fixture(scope="module")
def alone(model: Path) -> str:
    return run(STATES + "print(states())", model)


@pytest.mark.parametrize(
    "neighbour", [TORCH, LLAMA_CPP, TORCH + LLAMA_CPP], ids=["torch", "llama_cpp", "both"]
)
def test_neighbours_change_nothing_in_either_order(neighbour: str, model: Path, alone: str) -> None:
    first = run(neighbour + "use()\n" + STATES + "print(states()); use(); print(states())", model)
    assert first.split() == [alone, alone]
    after = run(STATES + "print(states())\n" + neighbour + "use(); print(states())", model)
    assert after.split() == [alone, alone]
