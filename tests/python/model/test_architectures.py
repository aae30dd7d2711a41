"""Every architecture that the engine knows, against the committed snapshot.

`make architectures` takes a new snapshot, with the tables of docs/architectures.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import architecture_checks
from support.architecture_snapshot import OF_THE_ENGINE, SNAPSHOT
from support.paths import ROOT
from support.tiny_models.registry import FILES


def test_all_models_are_in_the_snapshot(arch_models: Path) -> None:
    assert sorted(path.stem for path in arch_models.glob("*.gguf")) == OF_THE_ENGINE
    assert sorted(FILES) == sorted(name for name in SNAPSHOT if name in FILES)


def test_no_architecture_is_left_out() -> None:
    """The engine's writer and ours together cover every architecture name of the loader."""
    source = (ROOT / "vendor" / "llama.cpp" / "src" / "llama-arch.cpp").read_text()
    known = set(re.findall(r"\{\s*LLM_ARCH_\w+,\s*\"([^\"]+)\"", source)) - {"(unknown)"}
    written = {re.sub("-(dense|moe)$", "", name) for name in OF_THE_ENGINE}
    written |= {make().arch for make in FILES.values()}
    assert known == written


@pytest.mark.sampled(35)
@pytest.mark.parametrize("name", OF_THE_ENGINE)
def test_every_layer_every_way(name: str, arch_models: Path, tmp_path: Path) -> None:
    assert (
        architecture_checks.entry(arch_models / f"{name}.gguf", tmp_path / "changed.gguf") == SNAPSHOT[name]
    )


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", sorted(FILES))
def test_files_of_our_own(name: str, tmp_path: Path) -> None:
    path = FILES[name]().write(tmp_path / f"{name}.gguf")
    assert architecture_checks.entry_of_child(path, tmp_path / "changed.gguf") == SNAPSHOT[name]


def test_the_snapshot_leaves_nothing_open() -> None:
    supported = [found for found in SNAPSHOT.values() if "arch" in found]
    assert len({found["arch"] for found in supported}) >= 140
    for found in supported:
        assert "?" not in (found["first"], found["norm"], found["head"])


def test_the_table_is_of_the_snapshot() -> None:
    tool = ROOT / "tools" / "architecture_table.py"
    subprocess.run([sys.executable, tool, "--check"], check=True)
