"""Generation for all clients of a model: a queue of texts, and the session in which they are in flight."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from llamatap._native import flush_log
from llamatap.errors import EngineError, NotFiniteError
from llamatap.generation.results import Event, Stats
from llamatap.generation.session import Session
from llamatap.serve.errors import ApiError
from llamatap.serve.metrics import Metrics
from llamatap.serve.workers.recovery import may_enter, restart
from llamatap.serve.workers.tasks import GenerationTask

__all__ = ["TextGenerator"]

_logger = logging.getLogger("llamatap.serve")


class TextGenerator:
    """Generates queued texts in one session, which is created for the first text and after a failure.

    Any thread may :meth:`add`; the worker's thread does the rest.

    :param name: name of the model in messages and metrics.
    :param new_session: makes a session.
    :param session: the first session, if there is one already.
    """

    def __init__(
        self, name: str, new_session: Callable[[], Session], metrics: Metrics, session: Session | None = None
    ) -> None:
        self.name = name
        self.metrics = metrics
        self.session = session
        self._new_session = new_session
        self._lock = threading.Lock()
        self._queue: deque[GenerationTask] = deque()
        #: Texts of failed rounds, which restart before those in the queue start.
        self._restarted: deque[GenerationTask] = deque()
        #: By the session's numbers.
        self._in_flight: dict[int, GenerationTask] = {}

    def __len__(self) -> int:
        """The number of queued and in-flight texts."""
        return len(self._queue) + len(self._restarted) + len(self._in_flight)

    def add(self, tasks: Sequence[GenerationTask]) -> None:
        """Queue texts."""
        with self._lock:
            self._queue += tasks

    def turn(self) -> int:
        """Admit queued texts and run one round of all that are in flight.

        :returns: the number of texts that ended.
        """
        while (queue := self._restarted or self._queue) and may_enter(queue[0], self._in_flight.values()):
            # It stays in the queue, and is counted, until it is admitted: a context may have to be created
            # first.
            self._admit(queue[0])
            queue.popleft()
        if not self._in_flight or self.session is None:
            return 0
        for index, task in self._in_flight.items():
            if task.abandoned.is_set():
                self.session.cancel(index)
        ended = 0
        for event in self._step(self.session):
            task = self._in_flight[event.index]
            task.begun = True
            task.deliver(event)
            if event.token >= 0:
                self.metrics.tokens.labels(self.name, "generated").inc()
            if event.final is not None:
                del self._in_flight[event.index]
                self._count(event.final.stats)
                ended += 1
        return ended

    def fail_all(self, error: Exception) -> None:
        """Fail all texts, queued and in flight, with the error, and close the session."""
        with self._lock:
            tasks = [*self._in_flight.values(), *self._restarted, *self._queue]
            self._in_flight.clear()
            self._restarted.clear()
            self._queue.clear()
        for task in tasks:
            task.deliver(error)
        if self.session is not None:
            self._drop_session(self.session)

    def close(self) -> None:
        """Close the session."""
        if self.session is not None:
            self.session.close()

    def _admit(self, task: GenerationTask) -> None:
        if task.abandoned.is_set():
            return
        try:
            if self.session is None:
                self.session = self._new_session()
            self._in_flight[self.session.add(task.prompt, **task.options)] = task
        except Exception as error:
            task.deliver(error)
        finally:
            flush_log()

    def _step(self, session: Session) -> list[Event]:
        """Run one round; a failed one has no events."""
        try:
            return session.step()
        except Exception as error:
            _logger.exception("generation with %s failed", self.name)
            dropped = session.dropped
            self._recover([self._in_flight.pop(index) for index in dropped or tuple(self._in_flight)], error)
            unusable = isinstance(error, EngineError) or not dropped
        if unusable:
            self._drop_session(session)
        return []

    def _recover(self, failed: Sequence[GenerationTask], error: Exception) -> None:
        """Restart or fail the texts of a failed round."""
        failure: Exception = error
        # NaN or infinity is the model's fault. Any other error is the server's, never the request's.
        if not isinstance(error, NotFiniteError):
            message = f"generation failed: {error}"
            failure = ApiError(500, "internal_error", "generation_failed", message)
        restarted = restart(failed)
        self._restarted += restarted
        for task in failed:
            if task not in restarted:
                task.deliver(failure)

    def _drop_session(self, session: Session) -> None:
        """Close a session whose context is unusable after a failure; its texts are queued for a new one."""
        with suppress(Exception):
            session.close()
        self.session = None
        with self._lock:
            self._queue.extendleft(reversed(self._in_flight.values()))
            self._in_flight.clear()

    def _count(self, stats: Stats) -> None:
        for kind, n in (
            ("prompt", stats.prompt_tokens),
            ("drafted", stats.drafted),
            ("accepted", stats.accepted),
        ):
            self.metrics.tokens.labels(self.name, kind).inc(n)
