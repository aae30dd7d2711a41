"""Model workers: a thread for each model, which owns its contexts and batches the requests of all clients.

The thread takes turns: a batch of extraction, a round of generation. Nothing else touches the contexts, and
the event loop never waits for them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._native import flush_log, native_of
from llamatap.context import Context, ContextOptions
from llamatap.drafting.model_drafters import DraftOptions, named_drafter
from llamatap.errors import CancelledError, EngineError, Error, NotFiniteError, UnsupportedError
from llamatap.extraction.extractor import Extractor
from llamatap.generation.api import GenerateOptions
from llamatap.generation.results import Event
from llamatap.generation.session import Session
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.serve.errors import ApiError
from llamatap.serve.metrics import Metrics
from llamatap.serve.options import ModelOptions
from llamatap.serve.shutdown import Ending, shutting_down
from llamatap.states import States

__all__ = ["Extraction", "ModelWorker"]

_logger = logging.getLogger("llamatap.serve")

# Limits of one turn: one pass of the engine, so that generation gets its rounds and clients that went away
# cost no more than that. A longer prompt has a turn of its own.
_MOST_TOKENS = 512
_MOST_PROMPTS = 64

# Layers that a batch may compute for the sake of others, whose memory nobody has asked for.
_MOST_FOREIGN_LAYERS = 4

Pooling = Literal["mean", "last", "max"]
Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(eq=False)
class Extraction:
    """A prompt whose states are wanted.

    :ivar tokens: int32 ``(n,)``.
    :ivar n_prompt: how many the prompt had before it was cut.
    :ivar layers: normalised ids of llamatap.
    :ivar depth: the slot of the deepest of them: nothing beyond it is computed.
    :ivar window: the positions that are wanted, as of :func:`llamatap.extract`.
    """

    tokens: NDArray[np.int32]
    n_prompt: int
    layers: tuple[LayerId, ...]
    depth: int
    dtype: Dtype = "float32"
    pooling: Pooling | None = None
    window: tuple[int | None, int | None] | None = None
    result: Future[States] = field(default_factory=Future)
    #: Set when nobody waits for the result any more, also while it is being computed.
    gone: threading.Event = field(default_factory=threading.Event)

    def shares_with(self, layers: frozenset[LayerId]) -> bool:
        """Whether a batch of these layers costs it little more memory than its own."""
        return len(layers | set(self.layers)) <= len(self.layers) + _MOST_FOREIGN_LAYERS


@dataclass(eq=False)
class _Text:
    """A prompt that is continued, and where its events go."""

    tokens: NDArray[np.int32]
    options: GenerateOptions
    deliver: Callable[[Event | BaseException], None]
    gone: threading.Event = field(default_factory=threading.Event)
    #: Whether its events are sent as they come, so that it cannot begin again.
    streamed: bool = False
    #: Whether an event of it was delivered since it was let in.
    begun: bool = False
    #: Rounds of it that failed while others were under way.
    failures: int = 0

    @property
    def on_trial(self) -> bool:
        """Whether it may be what makes others fail: once it has failed beside them until it goes on alone,
        and after a second time to its end."""
        return self.failures > 1 or (self.failures == 1 and not self.begun)


class ModelWorker:
    """A model, its contexts, and the thread that computes with them.

    :param options: what to load.
    :param max_queue: prompts that may wait.
    :param ending: when texts must end.
    :raises Error: the model, or its drafter, cannot be loaded, or nothing can be computed with it.
    """

    def __init__(self, options: ModelOptions, max_queue: int, metrics: Metrics, ending: Ending) -> None:
        self.options = options
        self.name = options.name
        self.max_queue = max_queue
        self.metrics = metrics
        self.ending = ending
        self.model = Model(
            options.path,
            n_gpu_layers=options.n_gpu_layers,
            weights=options.weights,
            load_mtp=options.drafter == "mtp",
        )
        self.created = int(time.time())
        self._session: Session | None = None
        try:
            self._try_contexts()
        except Error as error:
            self.model.close()
            raise type(error)(f"{options.path.name} cannot be served: {error}") from error
        self._extractor = Extractor(self.model, **options.context)
        self._extractions: deque[Extraction] = deque()
        self._texts: deque[_Text] = deque()
        self._live: dict[int, _Text] = {}
        self._suspects: deque[_Text] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        #: Seconds that a prompt took lately, as a moving average, and those since the last one was done.
        self._pace = 0.1
        self._spent = 0.0

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name=f"llamatap-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what was accepted, then free the model."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._session is not None:
            self._session.close()
        self._extractor.close()
        self.model.close()

    @property
    def longest(self) -> int:
        """The most tokens of a prompt whose states are wanted; 0 where there is no limit."""
        return self.model.n_ctx_train

    @property
    def n_ctx(self) -> int:
        """Tokens that fit into the context of texts; the engine makes them a multiple of 256."""
        wanted = self.options.n_ctx or self.options.parallel * min(self.model.n_ctx_train, 4096)
        return -(-wanted // 256) * 256

    @property
    def text_limit(self) -> int:
        """The most tokens of a text, its prompt included: what fits, and what the model was trained with."""
        return min(self.n_ctx, self.model.n_ctx_train or self.n_ctx)

    @property
    def text_room(self) -> int:
        """Tokens that a text may take when all others take as many."""
        return self.n_ctx // self.options.parallel

    @property
    def waiting(self) -> int:
        """Prompts that wait, and texts that are being generated."""
        return len(self._extractions) + len(self._texts) + len(self._suspects) + len(self._live)

    @property
    def works(self) -> bool:
        """Whether the thread is alive and takes work."""
        return not self._stopping and self._thread is not None and self._thread.is_alive()

    def summary(self) -> str:
        """A line that describes the model, its layers and limits, for the log."""
        model, options = self.model, self.options
        try:
            model.layer_map  # noqa: B018  raises
            states = f"layers 0..{model.n_layer} of {model.n_embd} numbers"
        except UnsupportedError as error:
            states = f"no hidden states: {error}"
        drafter = "" if options.drafter is None else f"; drafter {options.drafter}"
        return (
            f"{self.name}: {model.arch}, {model.file_type}; {states}; {options.parallel} texts at once, of "
            f"{self.text_limit} tokens at most{drafter}"
        )

    # From the event loop.

    def _check_room(self, n: int) -> None:
        if not self.works:
            raise shutting_down()
        if n > self.max_queue:
            # No time is right for it.
            raise ApiError.invalid(
                f"{n} prompts in a request; {self.name} takes {self.max_queue} at most", "too_many_inputs"
            )
        waiting = self.waiting
        if waiting + n > self.max_queue:
            seconds = min(max(math.ceil(waiting * self._pace), 1), 60)
            raise ApiError(
                429,
                "rate_limit_error",
                "queue_full",
                f"{waiting} prompts are waiting for {self.name}, of {self.max_queue} at most; try again in "
                f"{seconds} s",
                retry_after=seconds,
            )

    async def extract(self, jobs: Sequence[Extraction]) -> list[States]:
        """The states of prompts; cancelled, those that were not begun are not computed, and a batch in which
        nobody else has a prompt ends.

        :raises ApiError: too many are waiting, or the server is being closed.
        :raises Error: as of :func:`llamatap.extract`.
        """
        with self._changed:
            self._check_room(len(jobs))
            self._extractions += jobs
            self._changed.notify()
        futures = [asyncio.wrap_future(job.result) for job in jobs]
        try:
            return await asyncio.gather(*futures)
        except BaseException:
            for job in jobs:
                job.gone.set()
                job.result.cancel()
            raise

    async def generate(
        self, texts: Sequence[tuple[NDArray[np.int32], GenerateOptions]], *, streamed: bool = False
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of texts, each with its text's number; closed before their end, they are cancelled and
        their places freed.

        :param texts: token ids and options.
        :param streamed: whether somebody reads the events as they come. If not, a text that fails beside
            others begins again by itself, and its events with it.
        :raises ApiError: too many are waiting, or the server is being closed.
        :raises Error: as of :func:`llamatap.generate`.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()

        def deliver(number: int, what: Event | BaseException) -> None:
            # The loop may be gone when a server is ended by force.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, (number, what))

        jobs = [
            _Text(tokens, options, functools.partial(deliver, number), streamed=streamed)
            for number, (tokens, options) in enumerate(texts)
        ]
        with self._changed:
            self._check_room(len(jobs))
            self._texts += jobs
            self._changed.notify()
        left = len(jobs)

        def end() -> None:
            for job in jobs:
                job.gone.set()
            queue.put_nowait((0, shutting_down("the server stopped before the text was finished")))

        try:
            with self.ending.telling(end):
                while left:
                    number, what = await queue.get()
                    if isinstance(what, BaseException):
                        raise what
                    left -= what.final is not None
                    yield number, what
        finally:
            for job in jobs:
                job.gone.set()

    # In the thread.

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
                # Whatever it is, nobody must wait for ever, and the next requests find it working.
                _logger.exception("the thread of %s failed", self.name)
                self._give_up(error)

    def _turn(self) -> None:
        """A batch of extraction, and a round of all texts."""
        started = time.perf_counter()
        done = self._extract_some() + self._generate_some()
        self._spent += time.perf_counter() - started
        if done:
            self._pace += 0.1 * (self._spent / done - self._pace)
            self._spent = 0.0

    def _give_up(self, error: Exception) -> None:
        """Tell all that wait or are under way that the thread failed."""
        with self._changed:
            jobs, self._extractions = self._extractions, deque()
            texts = [*self._live.values(), *self._suspects, *self._texts]
            self._live.clear()
            self._suspects.clear()
            self._texts.clear()
        for job in jobs:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(error)
        for text in texts:
            text.deliver(error)
        if self._session is not None:
            self._forget_session(self._session)

    def _next_extractions(self) -> list[Extraction]:
        """The prompt that waits longest, and others that can share its batch: of its deepest layer (so that
        none costs more layers than it asks for), dtype and pooling."""
        chosen: list[Extraction] = []
        with self._changed:
            most = self.options.context.get("n_ubatch", _MOST_TOKENS)
            left: deque[Extraction] = deque()
            n_tokens = 0
            layers: frozenset[LayerId] = frozenset()
            for job in self._extractions:
                if job.result.cancelled():
                    continue
                if chosen:
                    first = chosen[0]
                    alike = (job.depth, job.dtype, job.pooling) == (first.depth, first.dtype, first.pooling)
                    union = layers.union(job.layers)
                    sharing = (job,) if union == layers else (*chosen, job)
                    if (
                        not alike
                        or len(chosen) == _MOST_PROMPTS
                        or n_tokens + len(job.tokens) > most
                        or not all(one.shares_with(union) for one in sharing)
                    ):
                        left.append(job)
                        continue
                if job.result.set_running_or_notify_cancel():
                    n_tokens += len(job.tokens)
                    layers = layers.union(job.layers)
                    chosen.append(job)
            self._extractions = left
        return chosen

    def _extract_some(self) -> int:
        jobs = self._next_extractions()
        if not jobs:
            return 0
        self.metrics.batch.labels(self.name).observe(len(jobs))
        try:
            found = self._states(jobs)
        except CancelledError as error:
            for job in jobs:
                job.result.set_exception(error)
        except Exception:
            # One of them fails: the others need not.
            for job in jobs:
                self._extract_alone(job)
        else:
            for job, states in zip(jobs, found, strict=True):
                self._give(job, states)
        return len(jobs)

    def _give(self, job: Extraction, states: States) -> None:
        self.metrics.tokens.labels(self.name, "extracted").inc(len(job.tokens))
        job.result.set_result(states)

    def _extract_alone(self, job: Extraction) -> None:
        try:
            (states,) = self._states([job])
        except Exception as error:
            job.result.set_exception(error)
        else:
            self._give(job, states)

    def _states(self, jobs: Sequence[Extraction]) -> list[States]:
        layers = tuple(dict.fromkeys(layer for job in jobs for layer in job.layers))
        try:
            found = self._extractor(
                [job.tokens for job in jobs],
                layers,
                dtype=jobs[0].dtype,
                window=[job.window for job in jobs],
                pool=jobs[0].pooling,
                cancelled=lambda: all(job.gone.is_set() for job in jobs),
            )
        except EngineError:
            # Its context may be of no more use; the next prompt gets another.
            self._extractor.close()
            raise
        return [
            states.select(job.layers).cut_from(job.n_prompt) for job, states in zip(jobs, found, strict=True)
        ]

    def _try_contexts(self) -> None:
        """Make the contexts once, so that options, a drafter or memory that cannot serve refuse the start.

        The context of texts is freed again, for many servers give states alone; with a drafter it is kept.
        """
        # A drafter's file has no context of its own.
        sizes: ContextOptions = {**self.options.context, "n_ctx": 256, "n_batch": 1, "n_ubatch": 1}
        with Context(self.model, **sizes) as context:
            generates = native_of(context).has_memory and native_of(context).causal
        if self.options.drafter is not None:
            self._session = self._new_session()
        elif generates:
            self._text_context().close()

    def _text_context(self) -> Context:
        options, model = self.options, self.model
        parallel = options.parallel if native_of(model).batches_sequences else 1
        sizes: ContextOptions = {**options.context, "n_ctx": self.n_ctx, "n_seq_max": parallel}
        return Context(model, **sizes)

    def _new_session(self) -> Session:
        options = self.options
        context = self._text_context()
        drafter = None
        if options.drafter is not None:
            chosen: DraftOptions = {} if options.n_max is None else {"n_max": options.n_max}
            n_gpu_layers = options.n_gpu_layers
            drafter = named_drafter(context, options.drafter, n_gpu_layers=n_gpu_layers, **chosen)
        return Session(context, drafter)

    def _generate_some(self) -> int:
        """Let waiting texts in, and do a round of all. How many texts it ended."""
        while (queue := self._suspects or self._texts) and self._may_enter(queue[0]):
            # It waits until it is let in: a context may have to be made first.
            self._admit(queue[0])
            queue.popleft()
        for index, text in self._live.items():
            if text.gone.is_set():
                assert self._session is not None
                self._session.cancel(index)
        if not self._live or self._session is None:
            return 0
        ended = 0
        events = self._step(self._session)
        for event in events:
            self._live[event.index].begun = True
            self._live[event.index].deliver(event)
            if event.token >= 0:
                self.metrics.tokens.labels(self.name, "generated").inc()
            if event.final is not None:
                del self._live[event.index]
                stats = event.final.stats
                self.metrics.tokens.labels(self.name, "prompt").inc(stats.prompt_tokens)
                self.metrics.tokens.labels(self.name, "drafted").inc(stats.drafted)
                self.metrics.tokens.labels(self.name, "accepted").inc(stats.accepted)
                ended += 1
        return ended

    def _may_enter(self, text: _Text) -> bool:
        """Whether a text may be let in: one on trial is the only one on trial, and takes no stream along that
        could not begin again."""
        live = self._live.values()
        if any(one.on_trial for one in live):
            return False
        if text.failures > 1:
            return not live
        return text.failures == 0 or not any(one.streamed and one.begun for one in live)

    def _step(self, session: Session) -> list[Event]:
        """A round; of one that fails no events."""
        try:
            return session.step()
        except Exception as error:
            _logger.exception("generation with %s failed", self.name)
            dropped = session.dropped
            self._fail([self._live.pop(index) for index in dropped or tuple(self._live)], error)
            lost = isinstance(error, EngineError) or not dropped
        if lost:
            self._forget_session(session)
        return []

    def _fail(self, texts: Sequence[_Text], error: Exception) -> None:
        """Tell texts that a round of theirs failed; those that failed beside others, and that nobody has read
        of yet, begin again."""
        # Whatever it is, it is not the request's fault.
        failure: Exception = ApiError(
            500, "internal_error", "generation_failed", f"generation failed: {error}"
        )
        if isinstance(error, NotFiniteError):
            # But the model's.
            failure = error
        # If one of them is on trial, those that went on before it came are not the cause.
        suspected = [text for text in texts if text.on_trial] or texts
        for text in texts:
            if len(texts) > 1 and not (text.streamed and text.begun):
                text.failures += text in suspected
                text.begun = False
                self._suspects.append(text)
            else:
                text.deliver(failure)

    def _forget_session(self, session: Session) -> None:
        """After a failure inside of the engine a context is of no more use: those that wait get another."""
        with suppress(Exception):
            session.close()
        self._session = None
        with self._changed:
            self._texts.extendleft(reversed(self._live.values()))
            self._live.clear()

    def _admit(self, text: _Text) -> None:
        if text.gone.is_set():
            return
        try:
            if self._session is None:
                self._session = self._new_session()
            self._live[self._session.add(text.tokens, **text.options)] = text
        except Exception as error:
            text.deliver(error)
        finally:
            flush_log()
