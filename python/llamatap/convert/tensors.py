"""The tensors of a checkpoint: each is taken with its expected shape, or named in an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llamatap.convert.checkpoint_files import FLOATS
from llamatap.errors import InvalidInputError

__all__ = ["Tensors", "dtype_of", "narrowed"]


class Tensors:
    """Tensors that are taken one by one.

    :param tensors: by name.
    :param ignored: names of tensors that the caller declares to be without effect.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], *, ignored: Iterable[str] = ()) -> None:
        self._tensors = tensors
        self._taken: set[str] = set(ignored)
        self._absent: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._taken.add(name)
        return self._tensors[name]

    def take(self, name: str, *shape: int) -> NDArray[np.float32] | None:
        """A tensor of weights, as float32. A missing one is recorded for :meth:`check`.

        :returns: None where it is missing.
        :raises InvalidInputError: another shape or type, or values that are not finite.
        """
        if name not in self:
            self._absent.append(name)
            return None
        values = self[name]
        if values.shape != shape:
            raise InvalidInputError(f"{name} has the shape {list(values.shape)}, expected {list(shape)}")
        if values.dtype not in FLOATS:
            known = ", ".join(one.name for one in FLOATS)
            raise InvalidInputError(f"{name} is of type {values.dtype}, expected {known}")
        full = values.astype(np.float32)
        if not np.isfinite(full).all():
            raise InvalidInputError(f"{name} has values that are not finite")
        return full

    def check(self) -> None:
        """Check that all taken tensors were there.

        :raises InvalidInputError: tensors were missing.
        """
        if self._absent:
            raise InvalidInputError(f"the checkpoint lacks {', '.join(self._absent)}")


def dtype_of(kind: str) -> np.dtype[Any]:
    """The dtype of a float type of GGUF; float32 for quantised ones."""
    known = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
    found: np.dtype[Any] = known.get(kind, np.dtype(np.float32))
    return found


def narrowed(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values in this dtype if it holds them exactly, else as they are."""
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    return found if np.array_equal(found.astype(np.float32), values) else values
