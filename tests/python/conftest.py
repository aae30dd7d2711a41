from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import architecture_checks
from support.tiny import TinyLlama, write_as_f32

import llamatap as lt
from llamatap.fetch import fetch
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.cache_folder import cache_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that take SmolLM2 from a fixture, and the cases of sampled tests that are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if any(name.startswith("smollm2") for name in getattr(item, "fixturenames", ())):
            item.add_marker("real_model")
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sampled.args[0]:
                item.add_marker("slow")
            seen[test] += 1


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return fetch("smollm2")


@pytest.fixture(scope="session")
def smollm2_f32_path(smollm2_path: Path) -> Path:
    """SmolLM2 dequantised to float32, made once and kept in the cache folder."""
    target = cache_folder() / "tests" / "SmolLM2-135M-Instruct.F32.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as scratch:
            write_as_f32(smollm2_path, scratch)
    return target


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[lt.Model]:
    with lt.Model(smollm2_path) as model:
        yield model


@pytest.fixture(scope="session")
def arch_models() -> Iterator[Path]:
    """The engine's own tiny random models: <arch>-dense.gguf, <arch>-moe.gguf."""
    if not architecture_checks.WRITER.exists():
        pytest.skip("the writer of models is not built; `make test` builds it")
    with architecture_checks.written_models() as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny() -> TinyLlama:
    return TinyLlama()


@pytest.fixture(scope="session")
def tiny_path(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> Iterator[lt.Model]:
    with lt.Model(tiny_path) as model:
        yield model


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


@pytest.fixture
def without_gc() -> Iterator[None]:
    """No garbage collection: over the objects of a whole run it holds the GIL for up to a second."""
    gc.disable()
    yield
    gc.enable()
