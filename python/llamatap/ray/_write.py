"""A data set of states, computed by workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llamatap._extras import needs
from llamatap._validate import integer, shown
from llamatap.dataset import Job, Options, Report
from llamatap.dataset._job import Progress
from llamatap.dataset._work import Work, provenance
from llamatap.dataset.rows import Row
from llamatap.errors import EngineError, InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.layers import LayerId
from llamatap.model import Model

__all__ = ["write"]

# Batches of a task at the most: what is computed again where a worker died.
_PART = 32
# Tasks of each worker at the least, where there is that much to do: all come to their end together.
_TASKS = 8


@dataclass(frozen=True)
class _Loading:
    """How a worker loads the model."""

    path: str
    n_gpu_layers: int
    weights: Literal["f32", "f16", "bf16"] | None

    def load(self) -> Model:
        return Model(self.path, n_gpu_layers=self.n_gpu_layers, weights=self.weights)


def write(
    model: str | os.PathLike[str],
    samples: str | os.PathLike[str] | Iterable[Row],
    folder: str | os.PathLike[str],
    options: Options | None = None,
    *,
    concurrency: int = 2,
    num_cpus: float | None = None,
    num_gpus: float = 0,
    n_gpu_layers: int | None = None,
    weights: Literal["f32", "f16", "bf16"] | None = None,
    retries: int = 3,
    progress: Progress | None = None,
) -> Report:
    """Write the states of samples as :func:`llamatap.dataset.write` does, with workers of a Ray cluster.

    The files are those that one process writes with the same options, bit for bit where the workers'
    processors are of one kind. Model and folder are paths that mean the same on all machines (a shared file
    system). The calling process reads and tokenizes the samples and finishes the set; it needs no GPU. Ray is
    started if it is not running (``ray.init``).

    A worker that dies is started again and its batches are given out anew, ``retries`` times each. An error
    in a worker ends the run and is raised here, with the worker's traceback as its cause. What was written
    stays, and ``resume`` goes on, with any number of workers or with none of Ray's.

    :param model: the GGUF file.
    :param samples: as of :class:`llamatap.dataset.Job`.
    :param folder: where the data set is written.
    :param options: all but ``rank`` and ``world_size``. Workers compute with ``num_cpus`` threads unless
        ``context`` has ``n_threads``.
    :param concurrency: the number of workers, each with the model in its memory.
    :param num_cpus: processors of each worker; None for 1, or for Ray's default beside a GPU.
    :param num_gpus: GPUs of each worker, parts of one too. Ray waits until it has them.
    :param n_gpu_layers: layers on the GPU; None for all of them where ``num_gpus`` is more than 0.
    :param weights: as of :class:`llamatap.Model`.
    :param retries: how often a task is tried again whose worker died.
    :param progress: called with the tokens that are there and those that there will be.
    :raises InvalidInputError: the input or an option is wrong, the folder holds something else, or a worker
        has another model file, engine or back end than the others.
    :raises ModelNotFoundError: there is no such file, here or where a worker is.
    :raises UnsupportedError: the model carries no single residual stream, or a package is missing.
    :raises EngineError: workers died more than ``retries`` times over the same samples, or Ray failed.
    :raises BusyError: another run is writing to the folder.
    :raises OSError: files cannot be read or written, or there is no room. What was written stays.
    """
    _ray()
    options = options or Options()
    if options.world_size != 1:
        raise InvalidInputError(
            "Ray shares the work by itself: leave out rank and world_size, give concurrency"
        )
    integer("concurrency", concurrency, 1)
    integer("retries", retries, 0)
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if value is not None and not (isinstance(value, (int, float)) and value >= 0):
            raise InvalidInputError(f"{name} must be a number from 0, not {shown(value)}")
    if num_cpus is None and not num_gpus:
        num_cpus = 1
    if n_gpu_layers is None:
        n_gpu_layers = -1 if num_gpus else 0
    if num_cpus:
        options = replace(options, context={"n_threads": max(1, int(num_cpus)), **options.context})
    asked = {"num_cpus": num_cpus, "num_gpus": num_gpus or None}
    resources = {name: value for name, value in asked.items() if value is not None}
    # The workers have folders of their own.
    loading = _Loading(str(Path(model).absolute()), n_gpu_layers, weights)
    with Model(model) as here:
        job = _RayJob(
            here, samples, Path(folder).absolute(), options, loading, resources, concurrency, retries
        )
        return job.run(progress)


def _ray() -> Any:
    with needs("ray"):
        import ray
        import ray.util
    return ray


class _RayJob(Job):
    """A job whose states are computed elsewhere."""

    def __init__(
        self,
        model: Model,
        samples: str | os.PathLike[str] | Iterable[Row],
        folder: Path,
        options: Options,
        loading: _Loading,
        resources: Mapping[str, float],
        concurrency: int,
        retries: int,
    ) -> None:
        self._loading = loading
        self._resources = resources
        self._concurrency = concurrency
        self._retries = retries
        super().__init__(model, samples, folder, options)

    def _provenance(self, dtype: str) -> dict[str, Any]:
        # A worker may have a back end that this process has not.
        ray = _ray()
        task = ray.remote(max_retries=self._retries, **self._resources)(_provenance_there)
        with _ray_errors():
            answer = ray.get(task.remote(self._loading, self.options, self.columns, dtype))
        found: dict[str, Any] = _received(answer)
        return found

    def _compute(self, work: Work, wrote: Callable[[Sequence[int]], None]) -> None:
        ray = _ray()
        missing = [batch for batch in work.batches if not work.done[list(batch)].all()]
        size = min(_PART, max(1, len(missing) // (_TASKS * self._concurrency)))
        parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        kind = ray.remote(max_restarts=-1, max_task_retries=self._retries, **self._resources)(_Worker)
        # The batches go to the workers by and by.
        shared = ray.put(replace(work, batches=()))
        workers = [
            kind.remote(self._loading, [shared], self._facts)
            for _ in range(min(self._concurrency, len(parts)))
        ]
        try:
            with _ray_errors():
                pool = ray.util.ActorPool(workers)
                for answer in pool.map_unordered(lambda worker, part: worker.compute.remote(part), parts):
                    wrote(_received(answer))
        finally:
            # None of them writes any more once this returns or raises.
            for worker in workers:
                ray.kill(worker)
        # Repair samples that dead workers left half written.
        self._layout.open(range(len(self.samples)))


class _Worker:
    """Ray actor: holds the model, and computes the batches that it is given."""

    def __init__(self, loading: _Loading, shared: Sequence[Any], facts: Mapping[str, Any]) -> None:
        self._loading = loading
        # A reference in a list, which Ray hands on as it is; the caller keeps what it is of.
        self._shared = shared
        self._facts = facts
        self._ready: tuple[Work, Extractor] | None = None

    def compute(self, part: Sequence[Sequence[int]]) -> bytes:
        """Compute and write batches: the samples that were written, or an error, for :func:`_received`."""
        return _answer(self._compute, part)

    def _compute(self, part: Sequence[Sequence[int]]) -> list[int]:
        if self._ready is None:
            # Not in __init__: what that raises comes to the caller as text.
            self._ready = self._begin()
        work, extractor = self._ready
        written: list[int] = []
        work.compute(extractor, part, written.extend)
        # The process that began the set is on another machine, maybe.
        work.layout.sync()
        return written

    def _begin(self) -> tuple[Work, Extractor]:
        work: Work = _ray().get(self._shared[0])
        model = self._loading.load()
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


def _provenance_there(loading: _Loading, options: Options, columns: Sequence[LayerId], dtype: str) -> bytes:
    def found() -> dict[str, Any]:
        with loading.load() as model:
            return provenance(model, options, columns, dtype)

    return _answer(found)


class _WorkerError(Exception):
    """Where an error was raised in a worker, as text: tracebacks cannot be sent."""


def _answer(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickled result or exception of a function, for :func:`_received`: Ray would wrap the exception."""
    try:
        return pickle.dumps((function(*arguments), None))
    except Exception as error:
        where = f"on {socket.gethostname()}, process {os.getpid()}:\n{traceback.format_exc()}"
        try:
            return pickle.dumps((error, where))
        except Exception:
            return pickle.dumps((EngineError(f"a worker failed: {error!r}"), where))


def _received(answer: bytes) -> Any:
    value, where = pickle.loads(answer)
    if where is None:
        return value
    raise value from _WorkerError(where)


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Turns Ray's own failures into an error of this package."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise EngineError(
            f"a worker of Ray died, or Ray failed; what was written stays, and resume goes on: {error}"
        ) from error
