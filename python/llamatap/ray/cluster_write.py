"""Writing a data set of states with workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from llamatap._validate import integer, shown
from llamatap.dataset.batch_computation import BatchComputation
from llamatap.dataset.job import Job, Progress, Report
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.row_files import Row
from llamatap.errors import EngineError, InvalidInputError
from llamatap.model import Model
from llamatap.ray.worker import ModelLoading, Worker, import_ray, provenance_on_worker, received

__all__ = ["write"]

# Maximum number of batches in a task, which is computed again after a worker died.
_MOST_BATCHES = 32
# Minimum number of tasks per worker, if there are enough batches: all workers then end at about the same
# time.
_LEAST_TASKS = 8


def write(
    model: str | os.PathLike[str],
    samples: str | os.PathLike[str] | Iterable[Row],
    folder: str | os.PathLike[str],
    options: DatasetOptions | None = None,
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

    The files are those that one process writes with the same options, bit for bit if the workers' processors
    are of one kind. The paths of model and folder must be valid on all machines (a shared file system). The
    calling process reads and tokenizes the samples and finishes the files; it needs no GPU. Ray is started if
    it is not running (``ray.init``).

    A worker that dies is restarted and its batches are computed again, up to ``retries`` times. An error in a
    worker ends the run and is raised here, with the worker's traceback as its cause. The written part is
    kept, and ``resume`` continues, with any number of workers or without Ray.

    :param model: the GGUF file.
    :param samples: see :class:`llamatap.dataset.Job`.
    :param folder: the folder to write to.
    :param options: without ``rank`` and ``world_size``. Workers compute with ``num_cpus`` threads unless
        ``context`` has ``n_threads``.
    :param concurrency: the number of workers, each with the model in its memory.
    :param num_cpus: CPUs of each worker; None for 1, or for Ray's default beside a GPU.
    :param num_gpus: GPUs of each worker, possibly a fraction of one. Ray waits until they are free.
    :param n_gpu_layers: layers on the GPU; None for all of them if ``num_gpus`` is more than 0.
    :param weights: see :class:`llamatap.Model`.
    :param retries: number of retries of a task whose worker died.
    :param progress: called with the number of written tokens, and the total.
    :raises InvalidInputError: the input or an option is wrong, the folder holds something else, or a worker
        has another model file, engine or back end than the others.
    :raises ModelNotFoundError: the model file is missing, here or on the machine of a worker.
    :raises UnsupportedError: the model carries no single residual stream, or a package is missing.
    :raises EngineError: workers died more than ``retries`` times over the same samples, or Ray failed.
    :raises BusyError: another run is writing to the folder.
    :raises OSError: files cannot be read or written, or there is no room. The written part is kept.
    """
    import_ray()
    options = options or DatasetOptions()
    if options.world_size != 1:
        raise InvalidInputError("Ray shares the work: leave out rank and world_size, give concurrency")
    integer("concurrency", concurrency, 1)
    integer("retries", retries, 0)
    resources = _resources(num_cpus, num_gpus)
    if n_gpu_layers is None:
        n_gpu_layers = -1 if num_gpus else 0
    if n_cpus := resources.get("num_cpus"):
        options = replace(options, context={"n_threads": max(1, int(n_cpus)), **options.context})
    # Absolute: workers have other working directories.
    loading = ModelLoading(str(Path(model).absolute()), n_gpu_layers, weights)
    with Model(model) as here:
        job = _RayJob(
            here, samples, Path(folder).absolute(), options, loading, resources, concurrency, retries
        )
        return job.run(progress)


def _resources(num_cpus: float | None, num_gpus: float) -> dict[str, float]:
    """Ray's resources of a worker."""
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if value is not None and not (isinstance(value, (int, float)) and value >= 0):
            raise InvalidInputError(f"{name} must be a number of at least 0, not {shown(value)}")
    if num_cpus is None and not num_gpus:
        num_cpus = 1
    found = {"num_cpus": num_cpus, "num_gpus": num_gpus or None}
    return {name: value for name, value in found.items() if value is not None}


class _RayJob(Job):
    """Job whose states are computed by workers of a Ray cluster."""

    def __init__(
        self,
        model: Model,
        samples: str | os.PathLike[str] | Iterable[Row],
        folder: Path,
        options: DatasetOptions,
        loading: ModelLoading,
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
        # A worker may have a back end that this process lacks.
        ray = import_ray()
        task = ray.remote(max_retries=self._retries, **self._resources)(provenance_on_worker)
        with _ray_errors():
            answer = ray.get(task.remote(self._loading, self.options, self.columns, dtype))
        found: dict[str, Any] = received(answer)
        return found

    def _compute(self, work: BatchComputation, wrote: Callable[[Sequence[int]], None]) -> None:
        ray = import_ray()
        missing = [batch for batch in work.batches if not work.done[list(batch)].all()]
        size = min(_MOST_BATCHES, max(1, len(missing) // (_LEAST_TASKS * self._concurrency)))
        parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        kind = ray.remote(max_restarts=-1, max_task_retries=self._retries, **self._resources)(Worker)
        # The batches are sent to the workers one part at a time.
        shared = ray.put(replace(work, batches=()))
        workers = [
            kind.remote(self._loading, [shared], self._facts)
            for _ in range(min(self._concurrency, len(parts)))
        ]
        try:
            with _ray_errors():
                pool = ray.util.ActorPool(workers)
                for answer in pool.map_unordered(lambda worker, part: worker.compute.remote(part), parts):
                    wrote(received(answer))
        finally:
            # No worker may write after this returns or raises.
            for worker in workers:
                ray.kill(worker)
        # Removes samples that dead workers left half written.
        self._layout.open(range(len(self.samples)))


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Turn Ray's own errors into an error of this package."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise EngineError(
            f"a worker of Ray died, or Ray failed; the written part is kept, and resume continues: {error}"
        ) from error
