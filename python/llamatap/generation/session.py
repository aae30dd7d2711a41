"""Sessions: continuous batching of prompts that are added at any time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from llamatap._closeable import Closeable
from llamatap._options import takes_options
from llamatap._validate import instance, integer
from llamatap.context import Context
from llamatap.drafting.any_drafter import AnyDrafter, as_drafter
from llamatap.errors import BusyError, ClosedError, InvalidInputError
from llamatap.extraction.inputs import Input, prompt_tokens
from llamatap.generation.options import GenerateOptions, new_request, request_capacity, split_options
from llamatap.generation.ownership import cleanup
from llamatap.generation.request import Request
from llamatap.generation.results import Event
from llamatap.generation.scheduler import Scheduler

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Session"]

_logger = logging.getLogger("llamatap")


class Session(Closeable):
    """Continuous batching in one context, for servers: prompts are added at any time, each with its own
    options.

    Prompts wait in order of arrival for a free sequence and room. One thread calls :meth:`step` repeatedly;
    other threads may add and cancel meanwhile.

    :param context: a context with an empty memory, which is empty again afterwards. Until :meth:`close`, or
        until its last reference is gone, the session owns the context and the drafter, as :func:`generate`
        does.
    :param drafter: as in :func:`generate`.
    :raises InvalidInputError: not a context, its memory holds tokens, or the drafter does not fit it.
    :raises BusyError: a generation uses the context or the drafter.
    :raises UnsupportedError: the model generates no text.
    """

    # Closed until the context is reserved.
    _closed = True

    def __init__(self, context: Context, drafter: AnyDrafter = None) -> None:
        instance("context", context, Context)
        self._model = context.model
        self._drafter = as_drafter(drafter)
        self._dropped: tuple[int, ...] = ()
        #: Requests that are not finished, by their numbers.
        self._requests: dict[int, Request] = {}
        self._n_added = 0
        # Held for short work: numbering prompts, and whether more may be added.
        self._adding = threading.Lock()
        # Held for a whole round, which takes long: a second caller gets BusyError instead of waiting.
        self._stepping = threading.Lock()
        self._scheduler = Scheduler(context, self._drafter)
        self._capacity = request_capacity(context)
        self._scheduler.__enter__()
        self._closed = False

    @takes_options(GenerateOptions)
    def add(self, prompt: Input, **options: Unpack[GenerateOptions]) -> int:
        """Queue a prompt. Can be called from any thread, also while another one is in :meth:`step`.

        :param prompt: a str or token ids.
        :param options: the keyword arguments of :func:`generate` except ``stream``, for this prompt only. Its
            text is the same as that of :func:`generate` for this prompt alone with the same ``seed``.
        :returns: its number, the ``index`` of its events: 0 for the first prompt, then 1, 2, ...
        :raises InvalidInputError: the prompt or an option is wrong.
        :raises ContextFullError: the prompt alone does not fit into the context.
        :raises ClosedError: the session, or the model, was closed.
        """
        if self._closed:
            raise _closed_error()
        checked, sampling = split_options(self._model, self._drafter, options, "add()")
        tokens = prompt_tokens(self._model, prompt, None)
        request = new_request(self._model, -1, tokens, self._capacity, checked, sampling)
        with self._adding:
            if self._closed:
                raise _closed_error()
            request.index = self._n_added
            self._n_added += 1
            self._requests[request.index] = request
            self._scheduler.queue.add(request)
        return request.index

    def cancel(self, index: int) -> None:
        """End a prompt's generation, waiting or in flight. Can be called from any thread. The events of its
        current round still come, and from a later :meth:`step` an event with :attr:`Event.final`, whose
        ``finish_reason`` is "cancelled". Cancelling a finished prompt does nothing.

        :raises InvalidInputError: there was no such prompt.
        """
        with self._adding:
            if not 0 <= integer("index", index) < self._n_added:
                raise InvalidInputError(f"there is no prompt {index}; {self._n_added} were added")
            request = self._requests.get(int(index))
        if request is not None:
            self._scheduler.queue.cancel(request)

    def step(self) -> list[Event]:
        """One round: admit prompts that fit; then draft, forward pass, verification for in-flight requests.

        :returns: the events of the round. Empty when idle (:attr:`pending` is 0), or after a round with only
            prefill.
        :raises BusyError: another thread is in :meth:`step`.
        :raises ClosedError: the session was closed.
        :raises InvalidInputError: a tap is open in the context, but states are needed: nothing was done.

        An exception of the engine or the drafter is raised to the caller. It drops all in-flight requests,
        those admitted in this round included, and the round's events; :attr:`dropped` has their numbers.
        Their sequences are free again, and the next step continues with the waiting prompts.
        """
        with self._one_thread("step()"):
            if self._closed:
                raise _closed_error()
            self._dropped = ()
            self._scheduler.check_tap()
            try:
                with contextlib.ExitStack() as undo:
                    undo.push(cleanup(self._scheduler.drop))
                    events = self._scheduler.round()
                    undo.pop_all()
            except BaseException:
                with self._adding:
                    waiting = {request.index for request in self._scheduler.queue.waiting}
                    self._dropped = tuple(index for index in self._requests if index not in waiting)
                    for index in self._dropped:
                        del self._requests[index]
                raise
            with self._adding:
                for event in events:
                    if event.final is not None:
                        del self._requests[event.index]
            return events

    @property
    def pending(self) -> int:
        """The number of unfinished prompts, waiting or in flight."""
        return len(self._requests)

    def __len__(self) -> int:
        """:attr:`pending`."""
        return len(self._requests)

    def __bool__(self) -> bool:
        # True also when idle, where len() is 0.
        return True

    @property
    def dropped(self) -> tuple[int, ...]:
        """The numbers of the prompts that the last :meth:`step` dropped because of an exception. They get no
        further events."""
        return self._dropped

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Drop all prompts, free their sequences, and release the context and the drafter. A second call does
        nothing.

        :raises BusyError: another thread is in :meth:`step`.
        """
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._one_thread("close()"):
            with self._adding:
                if self._closed:
                    return
                self._closed = True
                self._requests.clear()
                self._scheduler.queue.drop_waiting()
            self._scheduler.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Session({'closed' if self._closed else f'pending={self.pending}'})"

    def __del__(self) -> None:
        if self._closed:
            return
        try:
            self.close()
        except Exception as error:
            _logger.warning("closing an abandoned session failed: %r", error)

    @contextlib.contextmanager
    def _one_thread(self, name: str) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise BusyError(f"{name} was called during step(); only one thread at a time may")
        try:
            yield
        finally:
            self._stepping.release()


def _closed_error() -> ClosedError:
    return ClosedError("the session was closed; create another one")
