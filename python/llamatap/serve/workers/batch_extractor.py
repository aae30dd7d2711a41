"""Extraction for all clients of a model: a queue of prompts, computed in shared batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from llamatap.context_options import ContextOptions
from llamatap.errors import CancelledError, EngineError
from llamatap.extraction.extractor import Extractor
from llamatap.model import Model
from llamatap.serve.metrics import Metrics
from llamatap.serve.workers.batching import MOST_TOKENS, take_batch
from llamatap.serve.workers.tasks import ExtractionTask
from llamatap.states import States

__all__ = ["BatchExtractor"]


class BatchExtractor:
    """Extracts the states of queued prompts, several prompts in one batch.

    Any thread may :meth:`add`; the worker's thread does the rest.

    :param name: name of the model in the metrics.
    :param options: options of the extraction context.
    """

    def __init__(self, name: str, model: Model, options: ContextOptions, metrics: Metrics) -> None:
        self.name = name
        self.metrics = metrics
        self.extractor = Extractor(model, **options)
        self.queue: deque[ExtractionTask] = deque()
        self._most_tokens = options.get("n_ubatch", MOST_TOKENS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of queued prompts."""
        return len(self.queue)

    def add(self, tasks: Sequence[ExtractionTask]) -> None:
        """Queue prompts."""
        with self._lock:
            self.queue += tasks

    def turn(self) -> int:
        """Extract one batch.

        :returns: the number of prompts that it finished.
        """
        with self._lock:
            tasks, self.queue = take_batch(self.queue, self._most_tokens)
        if not tasks:
            return 0
        self.metrics.batch.labels(self.name).observe(len(tasks))
        try:
            found = self._states(tasks)
        except CancelledError as error:
            for task in tasks:
                task.result.set_exception(error)
        except Exception:
            # One of them fails; the others may succeed.
            for task in tasks:
                self._extract_alone(task)
        else:
            for task, states in zip(tasks, found, strict=True):
                self._finish(task, states)
        return len(tasks)

    def fail_all(self, error: Exception) -> None:
        """Empty the queue and fail every prompt in it with the error."""
        with self._lock:
            tasks, self.queue = self.queue, deque()
        for task in tasks:
            if task.result.set_running_or_notify_cancel():
                task.result.set_exception(error)

    def close(self) -> None:
        """Free the extraction context."""
        self.extractor.close()

    def _extract_alone(self, task: ExtractionTask) -> None:
        try:
            (states,) = self._states([task])
        except Exception as error:
            task.result.set_exception(error)
        else:
            self._finish(task, states)

    def _finish(self, task: ExtractionTask, states: States) -> None:
        self.metrics.tokens.labels(self.name, "extracted").inc(len(task.prompt))
        task.result.set_result(states)

    def _states(self, tasks: Sequence[ExtractionTask]) -> list[States]:
        shared = tasks[0].wanted
        try:
            found = self.extractor(
                [task.prompt for task in tasks],
                tuple(dict.fromkeys(layer for task in tasks for layer in task.wanted.layers)),
                dtype=shared.dtype,
                window=[task.wanted.window for task in tasks],
                pool=shared.pooling,
                cancelled=lambda: all(task.abandoned.is_set() for task in tasks),
            )
        except EngineError:
            # The context may be unusable; the next prompt gets a new one.
            self.extractor.close()
            raise
        return [states.select(task.wanted.layers) for task, states in zip(tasks, found, strict=True)]
