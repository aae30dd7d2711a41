"""Worker process of a Ray cluster: loads the model, computes batches, sends results or errors back."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llamatap._extras import needs
from llamatap._validate import shown
from llamatap.dataset.batch_computation import BatchComputation
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.plan import provenance
from llamatap.errors import EngineError, InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.layers import LayerId
from llamatap.model import Model

__all__ = ["ModelLoading", "Worker", "import_ray", "provenance_on_worker", "received"]


def import_ray() -> Any:
    """The ray package.

    :raises MissingPackageError: it is not installed.
    """
    with needs("ray"):
        import ray
        import ray.util
    return ray


@dataclass(frozen=True)
class ModelLoading:
    """Arguments with which a worker loads the model."""

    path: str
    n_gpu_layers: int
    weights: Literal["f32", "f16", "bf16"] | None

    def load(self) -> Model:
        """Load the model."""
        return Model(self.path, n_gpu_layers=self.n_gpu_layers, weights=self.weights)


class Worker:
    """Ray actor: holds the model, and computes the batches that it is given.

    :param shared: a reference to the :class:`BatchComputation`, in a list so that Ray does not resolve it.
        The caller keeps the object alive.
    :param facts: the provenance that the states must have.
    """

    def __init__(self, loading: ModelLoading, shared: Sequence[Any], facts: Mapping[str, Any]) -> None:
        self.loading = loading
        self._shared = shared
        self._facts = facts
        self._ready: tuple[BatchComputation, Extractor] | None = None

    def compute(self, part: Sequence[Sequence[int]]) -> bytes:
        """Compute and write batches. Returns the samples written, or an error, for :func:`received`."""
        return _answer(self._compute, part)

    def _compute(self, part: Sequence[Sequence[int]]) -> list[int]:
        if self._ready is None:
            # Not in __init__, whose errors reach the caller as text.
            self._ready = self._begin()
        work, extractor = self._ready
        written: list[int] = []
        work.compute(extractor, part, written.extend)
        # The process that finishes the data set may be on another machine.
        work.layout.sync()
        return written

    def _begin(self) -> tuple[BatchComputation, Extractor]:
        work: BatchComputation = import_ray().get(self._shared[0])
        model = self.loading.load()
        here = provenance(model, work.options, work.layout.columns, work.layout.dtype)
        differs = [
            f"{name} is {here.get(name)!r}, not {shown(value)}"
            for name, value in self._facts.items()
            if here.get(name) != value
        ]
        if differs:
            raise InvalidInputError(
                f"the worker on {socket.gethostname()} would compute other states: {'; '.join(differs)}. "
                "Give all machines the same model file, llamatap and kind of GPU"
            )
        return work, Extractor(model, **work.extraction)


def provenance_on_worker(
    loading: ModelLoading, options: DatasetOptions, layers: Sequence[LayerId], dtype: str
) -> bytes:
    """Ray task: the provenance of the states that a worker computes, for :func:`received`."""

    def found() -> dict[str, Any]:
        with loading.load() as model:
            return provenance(model, options, layers, dtype)

    return _answer(found)


class _WorkerError(Exception):
    """Traceback of an error in a worker, as text: tracebacks cannot be pickled."""


def _answer(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickled result or exception of a function. Pickled here because Ray would wrap the exception."""
    try:
        return pickle.dumps((function(*arguments), None))
    except Exception as error:
        where = f"on {socket.gethostname()}, process {os.getpid()}:\n{traceback.format_exc()}"
        try:
            return pickle.dumps((error, where))
        except Exception:
            return pickle.dumps((EngineError(f"a worker failed: {error!r}"), where))


def received(answer: bytes) -> Any:
    """The result of a worker's function; raises its exception, with the worker's traceback as the cause."""
    value, where = pickle.loads(answer)
    if where is None:
        return value
    raise value from _WorkerError(where)
