"""Model worker: the thread that computes with one model, and its interface to the event loop.

The thread takes turns: one batch of extraction, one round of generation. Nothing else touches the contexts,
and the event loop never waits for them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from llamatap.errors import Error, UnsupportedError
from llamatap.extraction.inputs import CheckedPrompt
from llamatap.generation.api import GenerateOptions
from llamatap.generation.results import Event
from llamatap.model import Model
from llamatap.serve.drain_deadline import DrainDeadline, shutting_down
from llamatap.serve.metrics import Metrics
from llamatap.serve.options import ModelOptions
from llamatap.serve.workers.admission import Admission
from llamatap.serve.workers.batch_extractor import BatchExtractor
from llamatap.serve.workers.contexts import new_session, try_contexts
from llamatap.serve.workers.limits import LengthLimits
from llamatap.serve.workers.tasks import ExtractionTask, GenerationTask
from llamatap.serve.workers.text_generator import TextGenerator
from llamatap.states import States
from llamatap.train.cotrain.cotrainer import CoTrainer

__all__ = ["ModelWorker"]

_logger = logging.getLogger("llamatap.serve")


class ModelWorker:
    """A model, its contexts, and the thread that computes with them.

    :param options: the model to load.
    :param max_queue: maximum number of waiting prompts.
    :param drain_deadline: the deadline of in-flight texts when the server stops.
    :raises Error: the model or its drafter cannot be loaded, or nothing can be computed with it.
    """

    def __init__(
        self, options: ModelOptions, max_queue: int, metrics: Metrics, drain_deadline: DrainDeadline
    ) -> None:
        self.options = options
        self.name = options.name
        self.created = int(time.time())
        self.drain_deadline = drain_deadline
        self.model = Model(
            options.path,
            n_gpu_layers=options.n_gpu_layers,
            weights=options.weights,
            load_mtp=options.drafter == "mtp",
        )
        self.limits = LengthLimits(self.model, options)
        self.cotrainer: CoTrainer | None = None
        try:
            self.cotrainer = _cotrainer(self.model, options)
            session = try_contexts(self.model, options, self.limits.n_ctx, self.cotrainer)
        except Error as error:
            self._close_models()
            raise type(error)(f"{options.path.name} cannot be served: {error}") from error
        make_session = functools.partial(new_session, self.model, options, self.limits.n_ctx, self.cotrainer)
        self.extractor = BatchExtractor(self.name, self.model, options.context, metrics)
        self.generator = TextGenerator(self.name, make_session, metrics, session)
        self._admission = Admission(self.name, max_queue)
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"llamatap-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the accepted work, then free the model."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.generator.close()
        self.extractor.close()
        self._close_models()

    def _close_models(self) -> None:
        if self.cotrainer is not None:
            self.cotrainer.close()
        self.model.close()

    @property
    def waiting(self) -> int:
        """The number of queued prompts and of queued and in-flight texts."""
        return len(self.extractor) + len(self.generator)

    @property
    def works(self) -> bool:
        """Whether the thread is alive and takes work."""
        return not self._stopping and self._thread is not None and self._thread.is_alive()

    def summary(self) -> str:
        """One line for the log: the model, its layers and limits."""
        model, options = self.model, self.options
        try:
            model.layer_map  # noqa: B018  raises
            states = f"layers 0..{model.n_layer} of {model.n_embd} numbers"
        except UnsupportedError as error:
            states = f"no hidden states: {error}"
        drafter = "" if options.drafter is None else f"; drafter {options.drafter}"
        if options.cotrain is not None:
            drafter += f", retrained in {options.cotrain.folder}"
        return (
            f"{self.name}: {model.arch}, {model.file_type}; {states}; {options.parallel} texts at once, of "
            f"at "
            f"most {self.limits.text} tokens{drafter}"
        )

    # Called from the event loop.

    async def extract(self, tasks: Sequence[ExtractionTask]) -> list[States]:
        """The states of prompts.

        If cancelled, queued prompts are not computed, and a batch that no other request waits for ends early.

        :raises ApiError: too many prompts are waiting, or the server is shutting down.
        :raises Error: as in :func:`llamatap.extract`.
        """
        self._queue(len(tasks), lambda: self.extractor.add(tasks))
        futures = [asyncio.wrap_future(task.result) for task in tasks]
        try:
            return await asyncio.gather(*futures)
        except BaseException:
            for task in tasks:
                task.abandoned.set()
                task.result.cancel()
            raise

    async def generate(
        self, texts: Sequence[tuple[CheckedPrompt, GenerateOptions]], *, streamed: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Generate texts: their events, each with the number of its text.

        When the iterator is closed early, the texts are cancelled and their sequences freed.

        :param texts: prompts and options.
        :param streamed: whether a client reads the events as they come. If not, a text that fails in a round
            with others is restarted, and its events with it.
        :raises ApiError: too many prompts are waiting, or the server is shutting down.
        :raises Error: as in :func:`llamatap.generate`.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()

        def deliver(number: int, what: Event | BaseException) -> None:
            # The event loop is gone if the server was killed by a third signal.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, (number, what))

        tasks = [
            GenerationTask(prompt, options, functools.partial(deliver, number), streamed=streamed)
            for number, (prompt, options) in enumerate(texts)
        ]
        self._queue(len(tasks), lambda: self.generator.add(tasks))
        left = len(tasks)

        def end() -> None:
            for task in tasks:
                task.abandoned.set()
            queue.put_nowait((0, shutting_down("the server stopped before the text was finished")))

        try:
            with self.drain_deadline.calling(end):
                while left:
                    number, what = await queue.get()
                    if isinstance(what, BaseException):
                        raise what
                    left -= what.final is not None
                    yield number, what
        finally:
            for task in tasks:
                task.abandoned.set()

    def _queue(self, n: int, add: Callable[[], None]) -> None:
        """Queue ``n`` prompts, and wake the thread.

        :raises ApiError: too many prompts are waiting, or the server is shutting down.
        """
        with self._changed:
            if not self.works:
                raise shutting_down()
            self._admission.check(n, self.waiting)
            add()
            self._changed.notify()

    # Run by the thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self.waiting or self._stopping):
                    self._changed.wait()
                if not self.waiting:
                    return
            try:
                self._turn()
            except Exception as error:
                # No request may wait forever, whatever the error; and the thread must survive for the next
                # ones.
                _logger.exception("the thread of %s failed", self.name)
                self.extractor.fail_all(error)
                self.generator.fail_all(error)

    def _turn(self) -> None:
        """One batch of extraction and one round of generation."""
        started = time.perf_counter()
        n_done = self.extractor.turn() + self.generator.turn()
        self._admission.note(time.perf_counter() - started, n_done)


def _cotrainer(model: Model, options: ModelOptions) -> CoTrainer | None:
    """The co-trainer of the model's drafter; None if it is not retrained."""
    chosen = options.cotrain
    if chosen is None or options.drafter is None:
        return None
    return CoTrainer(
        model,
        chosen.folder,
        options.drafter,
        start_trainer=chosen.start_trainer,
        python=chosen.python,
        n_gpu_layers=options.n_gpu_layers,
    )
