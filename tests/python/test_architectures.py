"""Every architecture that the engine's own program can write, against what was found of it before.

`make architectures` takes a new snapshot, with the table of docs/architectures.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import architectures
import pytest

SNAPSHOT = json.loads(architectures.SNAPSHOT.read_text())


def test_all_models_are_in_the_snapshot(arch_models: Path) -> None:
    assert sorted(path.stem for path in arch_models.glob("*.gguf")) == sorted(SNAPSHOT)


@pytest.mark.parametrize("name", sorted(SNAPSHOT))
def test_every_layer_every_way(name: str, arch_models: Path, tmp_path: Path) -> None:
    assert architectures.entry(arch_models / f"{name}.gguf", tmp_path / "changed.gguf") == SNAPSHOT[name]


def test_the_snapshot_leaves_nothing_open() -> None:
    supported = [found for found in SNAPSHOT.values() if "unsupported" not in found]
    assert len({found["arch"] for found in supported}) >= 118
    for found in supported:
        assert "?" not in (found["first"], found["norm"], found["head"])


def test_the_table_is_of_the_snapshot() -> None:
    tool = architectures.ROOT / "tools" / "architecture_table.py"
    subprocess.run([sys.executable, tool, "--check"], check=True)
