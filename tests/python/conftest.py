from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamatap as lt
from llamatap._native import _core
from llamatap._threads import usable_cpus
from llamatap.fetch import fetch
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.cache_folder import cache_folder

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import TinyLlama, write_as_f32


def _own_cpus() -> None:
    """Give each process of tests CPUs of its own: the engine's threads wait for one another busily."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if share := sorted(usable_cpus())[number::count]:
        os.sched_setaffinity(0, share)


_own_cpus()

#: Options under which results do not depend on how work is cut: float32 throughout, one kind of kernel.
EXACT: dict[str, Any] = {
    "type_k": "f32",
    "type_v": "f32",
    "flash_attn": False,
    "n_threads": min(2, len(usable_cpus())),
}


#: The engine of a Debug build asserts that it meets no NaN, in the middle of its computation.
computes_with_nan = pytest.mark.skipif(
    _core.build_info()["build_type"] == "Debug", reason="a Debug engine asserts that there is no NaN"
)

#: Code for a process of its own: its largest memory, resident (or, of VmPeak, reserved), in MiB. (What
#: getrusage tells of a child is at least what its parent had.)
PEAK_MEMORY = """
def peak_memory(kind="VmHWM"):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind + ":")) / 1024
"""


def relative(found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """Relative L2 distance."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


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
    import architectures

    if not architectures.WRITER.exists():
        pytest.skip("the writer of models is not built; `make test` builds it")
    with architectures.written_models() as folder:
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


def random_tokens(rng: np.random.Generator, model: lt.Model, count: int) -> NDArray[np.int32]:
    return rng.integers(3, model.n_vocab, count).astype(np.int32)
