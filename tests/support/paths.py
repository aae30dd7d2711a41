"""Folders of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
#: Chat templates and vocabularies that the engine's source brings.
ENGINE_MODELS = ROOT / "vendor" / "llama.cpp" / "models"
SMOLLM2_GOLDEN = DATA / "smollm2_golden.npz"
