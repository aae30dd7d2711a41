"""Contexts whose results do not depend on how work is cut, and distances between results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.worker_cpus import CPUS

import llamatap as lt
from llamatap._native import _core

#: Options under which results do not depend on how work is cut: float32 throughout, one kind of kernel.
EXACT: dict[str, Any] = {
    "type_k": "f32",
    "type_v": "f32",
    "flash_attn": False,
    "n_threads": min(2, len(CPUS)),
}


#: For tests that compute with NaN: the engine of a Debug build asserts that there is none.
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


def random_tokens(rng: np.random.Generator, model: lt.Model, count: int) -> NDArray[np.int32]:
    return rng.integers(3, model.n_vocab, count).astype(np.int32)
