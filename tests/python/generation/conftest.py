from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.generation import CheckedContext, checked_context
from support.sessions import Workload, session_workload
from support.tiny_models import rigged

import llamatap as lt


@pytest.fixture(scope="module")
def checked_of_module(tiny_path: Path) -> Iterator[CheckedContext]:
    with checked_context(tiny_path) as found:
        yield found


@pytest.fixture
def checked(checked_of_module: CheckedContext) -> Iterator[CheckedContext]:
    """A context that is checked after each test: what went wrong must leave nothing behind."""
    yield checked_of_module
    checked_of_module.check()


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workload]:
    with session_workload(tmp_path_factory.mktemp("session")) as found:
        yield found


@pytest.fixture(scope="module")
def rigged_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    """A model that follows the table `rigged.cycle()`."""
    path = rigged.write_rigged_model(tmp_path_factory.mktemp("rigged") / "rigged.gguf", rigged.cycle())
    with lt.Model(path) as model:
        yield model
