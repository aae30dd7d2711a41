"""The scheduler of generation: each round a draft, one forward pass of the target, and verification.

Its parts: :mod:`admission` (which requests are in flight), :mod:`drafting_round` (their drafts),
:mod:`target_pass` (the entries and the tap of a pass), :mod:`verification` (accepted tokens),
:mod:`rollback` (rejected tokens), :mod:`time_accounting` (seconds per request).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from llamatap._engine_context import Capture, engine_of
from llamatap._native import flush_log
from llamatap.context import Batch, Context
from llamatap.drafting.drafter import Drafter, reset_all
from llamatap.drafting.model_drafters import draft_contexts
from llamatap.errors import EngineError, InvalidInputError, UnsupportedError
from llamatap.generation.admission import RequestQueue
from llamatap.generation.drafting_round import RoundDrafts
from llamatap.generation.events import new_events
from llamatap.generation.ownership import cleanup, require_unused, reserve
from llamatap.generation.request import Request
from llamatap.generation.results import Event, Generation
from llamatap.generation.rollback import rollback_for
from llamatap.generation.target_pass import TargetPass, assign_entries
from llamatap.generation.time_accounting import PhaseTimer
from llamatap.generation.verification import Verifier
from llamatap.layers import LayerId, normalize
from llamatap.states import States
from llamatap.tap import Tap

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Scheduler"]


class Scheduler:
    """Scheduler: draft, forward pass, verify, for the waiting and in-flight requests of one context. Within a
    ``with`` block it owns the context and the drafter; the end of the block drops the requests in flight.

    :ivar queue: the requests; new ones are added there.
    :raises InvalidInputError: the drafter was made for another context or asks for layers that do not exist,
        or the context holds tokens.
    :raises UnsupportedError: the model generates no text.
    :raises BusyError: another generation uses the context or the drafter.
    """

    def __init__(self, context: Context, drafter: Drafter | None) -> None:
        draft_sides = [] if drafter is None else draft_contexts(drafter)
        if any(one.target is not context for one in draft_sides):
            raise InvalidInputError("the drafter was made for another context; generate in its target")
        engine = engine_of(context)
        if not engine.native.has_memory or not engine.native.causal:
            raise UnsupportedError(f"{engine.model.arch} models do not generate text")
        require_unused(context, drafter)
        self._context = context
        self._engine = engine
        self._drafter = drafter
        self.queue = RequestQueue(context, min([context.n_seq_max, *(one.n_seq_max for one in draft_sides)]))
        self._drafter_layers = () if drafter is None else _target_layers(drafter, engine.n_layer)
        self._timer = PhaseTimer()
        self._rollback = rollback_for(context)
        self._drafts = None if drafter is None else RoundDrafts(engine, drafter, self._rollback, self._timer)
        self._draft_length = None if self._drafts is None else self._drafts.length
        self._verifier = Verifier(context, drafter, self._draft_length, self._timer)

    def __enter__(self) -> Self:
        require_unused(self._context, self._drafter)
        with contextlib.ExitStack() as stack:
            stack.push(cleanup(flush_log))
            stack.enter_context(reserve(self._context, self._drafter, self))
            stack.push(cleanup(self.drop))
            self._reserved = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # At interpreter exit everything is freed anyway, and the engine has been shut down already.
        if not sys.is_finalizing():
            self._reserved.__exit__(kind, error, trace)

    def drop(self) -> None:
        """Drop all in-flight requests and free their sequences, in whatever state they are."""
        seqs = self.queue.drop_in_flight()
        with contextlib.ExitStack() as every_call:
            if self._drafter is not None:
                every_call.callback(reset_all, [self._drafter], seqs)
            for seq in seqs:
                every_call.callback(self._remove, seq)

    def _remove(self, seq: int) -> None:
        # After a failure inside the engine there is nothing left to free.
        with contextlib.suppress(EngineError):
            if not self._engine.closed:
                self._engine.native.memory_remove(seq, -1, -1)

    def check_tap(self) -> None:
        """Check before a round that no open tap blocks it.

        :raises InvalidInputError: a tap is open, and the drafter or a request needs states.
        """
        if self._engine.capture is not None and (
            self._drafter_layers
            or any(one.options.states or one.options.prompt_states for one in self.queue.upcoming())
        ):
            raise InvalidInputError(
                "a tap is open on this context, but the drafter or a prompt needs states; close the tap first"
            )

    def round(self) -> list[Event]:
        """One round: draft, forward pass of the target, verification. Returns the new events. An exception
        leaves the in-flight requests half done: only :meth:`drop` may be called then.

        :raises InvalidInputError: the drafter returns no valid draft, or a tap is open and states are needed.
        """
        started = self._timer.start()
        cancelled = self.queue.take_cancelled()
        for request in cancelled:
            request.finish_reason = "cancelled"
        events = self._new_events(cancelled)
        self._admit()
        in_flight = self.queue.in_flight
        if not in_flight:
            return events
        in_prefill = any(request.in_prefill for request in in_flight)
        n_drafted = 0 if self._drafts is None else self._drafts.ask(in_flight, in_prefill)
        assign_entries(in_flight, self._context, self._rollback.most_rows)
        for requests in self._rollback.passes([one for one in in_flight if one.n_entries > 0]):
            self._pass(requests)
        if self._draft_length is not None and not in_prefill:
            self._draft_length.measure(n_drafted, self._timer.now - started, len(in_flight))
        return events + self._new_events(list(in_flight))

    def _admit(self) -> None:
        """Admit requests, each with a sequence that is empty in the target and the drafter."""
        for request in self.queue.admit():
            if self._engine.native.memory_last(request.seq) >= 0:
                # Left by an error that prevented its removal.
                self._engine.native.memory_remove(request.seq, -1, -1)
            if self._drafter is not None:
                self._drafter.reset(request.seq)

    def _pass(self, requests: Sequence[Request]) -> None:
        """One decode of the target, then drafter, states, log-probabilities, verification and rollback."""
        self._rollback.prepare(requests)
        target_pass = TargetPass(self._engine, requests, self._drafter_layers)
        states = target_pass.decode()
        self._timer.charge("target", requests)
        if self._drafter is not None:
            layers = self._drafter_layers
            needed = states.select(layers) if states is not None and layers else None
            self._drafter.process(target_pass.batch, needed)
            self._timer.charge("draft", requests)
        rejected = []
        for request in requests:
            if not request.tokens:
                self._keep_prompt(request, states)
            if request.in_prefill:
                continue
            if request.options.max_tokens == 0:
                request.finish_reason = "length"
                continue
            n_accepted = self._verifier.verify(request, states)
            if n_accepted < len(request.draft.tokens):
                rejected.append((request, n_accepted))
        # After all are verified: a rollback may decode, which overwrites the logits of this pass.
        for request, n_accepted in rejected:
            if request.finish_reason is None or request.lacks_last_state:
                self._rollback.rollback(request, n_accepted)
                self._timer.charge("target", [request])

    def _keep_prompt(self, request: Request, states: States | None) -> None:
        """Keep the states and the log-probabilities of the prompt's chunk in the pass."""
        if states is not None and request.options.prompt_states:
            end = request.first_row + 1
            request.kept.keep_prompt(states, end - request.n_entries, end, request.n_prefilled)
            self._timer.charge("target", [request])
        if request.scores_prompt:
            self._verifier.score_prompt(request)

    def _new_events(self, requests: Iterable[Request]) -> list[Event]:
        events: list[Event] = []
        finished: list[tuple[Callable[[Generation], object], Generation]] = []
        for request in requests:
            if request.finish_reason is not None:
                self._finish(request)
            for event in new_events(request, self._engine):
                events.append(event)
                if event.final is not None and request.options.on_states is not None:
                    finished.append((request.options.on_states, event.final))
            self._timer.charge("sampling", [request])
        # All finished requests are cleaned up by now, so an exception of the callback does no harm.
        for on_states, generation in finished:
            on_states(generation)
        return events

    def _finish(self, request: Request) -> None:
        """Clean up once the last token is known: last state, held-back text, KV cache, sequence id."""
        if request.lacks_last_state:
            self._compute_last_state(request)
        request.flush_text()
        if request.seq < 0:
            # Cancelled before it was admitted.
            return
        self._engine.native.memory_remove(request.seq, -1, -1)
        self._timer.charge("target", [request])
        if self._drafter is not None:
            self._drafter.reset(request.seq)
            self._timer.charge("draft", [request])
        self.queue.retire(request)

    def _compute_last_state(self, request: Request) -> None:
        """Decode the last token for its state: no pass has computed it yet."""
        if request.position >= request.capacity:
            # The context is full: the last token gets no state.
            request.kept.omit_last()
            return
        batch = Batch()
        batch.add(request.tokens[-1], request.position, request.seq)
        # Not an output: its logits are not needed.
        with Tap(self._engine, Capture(request.options.layers, "all", "float32")) as tap:
            self._engine.decode(batch)
        request.kept.keep_generated(tap.states, 0, 1)


def _target_layers(drafter: Drafter, n_layer: int) -> tuple[LayerId, ...]:
    layers = drafter.target_layers
    return () if isinstance(layers, Sequence) and not len(layers) else normalize(layers, n_layer)
