"""Folders of the repository that tests read."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
#: Chat templates and vocabularies that the engine's source brings.
ENGINE_MODELS = ROOT / "vendor" / "llama.cpp" / "models"
SMOLLM2_GOLDEN = DATA / "smollm2_golden.npz"


def peer_python(name: str) -> Path:
    """The interpreter of a peer's own environment, which ``nox -s NAME`` makes."""
    return Path(os.environ.get("PEER_PYTHON", ROOT / ".nox" / name / "bin" / "python"))
