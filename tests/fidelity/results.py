"""Results of measuring a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Distance:
    """How far states are from others, by layer: arrays of (layers,)."""

    #: Relative L2 distance of a row, root mean square over rows: each counts alike, whatever its size.
    l2: NDArray[np.float64]
    #: Cosine, mean over rows.
    cosine: NDArray[np.float64]

    @classmethod
    def of(cls, found: NDArray[np.float32], expected: NDArray[np.float32]) -> Distance:
        a, b = found.astype(np.float64), expected.astype(np.float64)
        size_a, size_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        rows = np.linalg.norm(a - b, axis=-1) / size_b
        cosine = (a * b).sum(-1) / (size_a * size_b)
        return cls(np.sqrt((rows**2).mean(0)), cosine.mean(0))


@dataclass
class Measured:
    """One file type of one model."""

    file_type: str
    matrices: dict[str, int]
    #: Ours against transformers on the float32 weights.
    truth: Distance
    #: Ours against transformers on the weights of the same file.
    same: Distance
    #: The same with the default options: flash attention, float16 KV cache.
    defaults: Distance
    #: transformers, with the kernels' rounding, against itself without.
    rounding: Distance
    #: Ours against what single blocks in transformers, with the kernels' rounding, make of our states.
    blocks: Distance


@dataclass
class MeasuredModel:
    name: str
    arch: str
    n_layer: int
    lengths: list[int]
    types: list[Measured]
    versions: dict[str, str]
