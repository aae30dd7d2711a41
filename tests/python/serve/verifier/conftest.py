from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import Running, running, tiny_options
from support.verifier_files import serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder in which the server leaves files of states."""
    return tmp_path / "states"


@pytest.fixture
def server(tiny_path: Path, folder: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_path)], serving(folder)) as found:
        yield found
