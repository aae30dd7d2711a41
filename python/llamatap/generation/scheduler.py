"""The scheduler of generation: each round a draft, one forward pass of the target, and verification."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._engine_context import Capture, engine_of
from llamatap._native import _core, flush_log, native_of
from llamatap.context import Batch, Context
from llamatap.drafting.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    checked_drafts,
    most_tokens,
    new_length,
    reset_all,
    specs_of,
)
from llamatap.errors import EngineError, InvalidInputError, NotFiniteError, UnsupportedError
from llamatap.generation import logprobs
from llamatap.generation.ownership import check_free, held, tidying
from llamatap.generation.request import NO_DRAFT, Request
from llamatap.generation.results import Event, Generation
from llamatap.generation.rollback import rollback_of
from llamatap.layers import LayerId, normalize
from llamatap.states import States
from llamatap.tap import Tap

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Scheduler"]


class Scheduler:
    """Scheduler: draft, forward pass, verify, for the waiting and in-flight requests of one context. Within a
    ``with`` block it has the context and the drafter for itself; the end of the block drops the requests in
    flight.

    :raises InvalidInputError: the drafter is another context's or asks for what is not there, or the context
        holds tokens.
    :raises UnsupportedError: the model generates no text.
    :raises BusyError: a generation is going on.
    """

    def __init__(self, context: Context, drafter: Drafter | None) -> None:
        specs = [] if drafter is None else specs_of(drafter)
        if any(spec.target is not context for spec in specs):
            raise InvalidInputError("the drafter was made for another context; generate in its target")
        native = native_of(context)
        if not native.has_memory or not native.causal:
            raise UnsupportedError(f"{engine_of(context).model.arch} models do not generate text")
        check_free(context, drafter)
        self.context = context
        self.drafter = drafter
        #: Other threads may append to it.
        self.waiting: deque[Request] = deque()
        self.live: list[Request] = []
        #: Set after a request was cancelled that may still be waiting.
        self.cancelling = False
        self.n_seqs = min([context.n_seq_max, *(spec.n_seq_max for spec in specs)])
        self.free = list(range(self.n_seqs))[::-1]
        self.length = None if drafter is None else new_length(drafter)
        self.n_max = 0 if drafter is None else most_tokens(drafter)
        #: The layers whose states the drafter needs of every token.
        self.layers = () if drafter is None else _layers(drafter, engine_of(context).model.n_layer)
        self.rollback = rollback_of(context)
        self.now = 0.0

    def __enter__(self) -> Self:
        check_free(self.context, self.drafter)
        with contextlib.ExitStack() as stack:
            stack.push(tidying(flush_log))
            stack.enter_context(held(self.context, self.drafter, self))
            stack.push(tidying(self.drop))
            self._held = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # At interpreter exit everything is freed anyway, and the engine has been shut down already.
        if not sys.is_finalizing():
            self._held.__exit__(kind, error, trace)

    def drop(self) -> None:
        """Drop all in-flight requests and free their sequences, in whatever state they are."""
        seqs = [one.seq for one in self.live]
        self.live = []
        self.free = list(range(self.n_seqs))[::-1]
        with contextlib.ExitStack() as all_of_them:
            if self.drafter is not None:
                all_of_them.callback(reset_all, [self.drafter], seqs)
            for seq in seqs:
                all_of_them.callback(self._remove, seq)

    def _remove(self, seq: int) -> None:
        # After a failure inside the engine there is nothing left to free.
        with contextlib.suppress(EngineError):
            if not self.context.closed:
                native_of(self.context).memory_remove(seq, -1, -1)

    def _spent(self, phase: Literal["target", "draft", "sampling"], *sequences: Request) -> None:
        """Charge the seconds since the last call to these sequences, split by their entries in the pass."""
        before, self.now = self.now, time.perf_counter()
        n_rows = sum(one.n_rows for one in sequences)
        for one in sequences:
            seconds = (self.now - before) * (one.n_rows / n_rows if n_rows else 1 / len(sequences))
            name = f"{phase}_seconds"
            setattr(one.stats, name, getattr(one.stats, name) + seconds)

    def round(self) -> list[Event]:
        """One round: draft, forward pass of the target, verification. Returns the new events. An exception
        leaves the in-flight requests half done: only :meth:`drop` may be called then.

        :raises InvalidInputError: the drafter returns no valid draft, or a tap is open and states are needed.
        """
        # The time since the last round was spent by the caller.
        self.now = started = time.perf_counter()
        cancelled = self._cancelled()
        for sequence in cancelled:
            sequence.finish_reason = "cancelled"
        ended = self._new_events(cancelled)
        self._admit()
        if not self.live:
            return ended
        feeding = any(one.feeding for one in self.live)
        n_drafted = self._draft(feeding)
        self._feed()
        for part in self.rollback.parts([one for one in self.live if one.n_rows > 0]):
            self._pass(part)
        if self.length is not None and not feeding:
            self.length.measure(n_drafted, self.now - started, len(self.live))
        return ended + self._new_events(list(self.live))

    def check_tap(self) -> None:
        """Check before a round that no open tap stands in its way.

        :raises InvalidInputError: a tap is open, and the drafter or a text needs states.
        """
        if engine_of(self.context).capture is not None and (
            self.layers or any(one.options.states or one.options.prompt_states for one in self._coming())
        ):
            raise InvalidInputError(
                "a tap is open on this context, and the drafter or a prompt needs states; close it first"
            )

    def _coming(self) -> list[Request]:
        return [*self.live, *list(self.waiting)[: len(self.free)]]

    def _cancelled(self) -> list[Request]:
        """The cancelled requests, in flight or waiting; the latter leave the queue."""
        found = [one for one in self.live if one.cancelled.is_set()]
        if self.cancelling:
            # Reset before the scan, so that a request cancelled during it is found in the next round.
            self.cancelling = False
            for one in list(self.waiting):
                if one.cancelled.is_set():
                    self.waiting.remove(one)
                    found.append(one)
        return found

    def _new_events(self, sequences: Iterable[Request]) -> list[Event]:
        events: list[Event] = []
        finished: list[tuple[Callable[[Generation], object], Generation]] = []
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._finish(sequence)
            for event in sequence.new_events(self.context):
                events.append(event)
                if event.final is not None and sequence.options.on_states is not None:
                    finished.append((sequence.options.on_states, event.final))
            self._spent("sampling", sequence)
        # All finished requests are cleaned up by now: an exception of the callback leaves nothing half done.
        for on_states, generation in finished:
            on_states(generation)
        return events

    def _admit(self) -> None:
        """Admit waiting prompts while a sequence id is free and the memory has room for their whole texts."""
        while self.waiting and self.free:
            sequence = self.waiting[0]
            if self.context.kv_unified:
                taken = sum(one.capacity for one in self.live)
                if self.live and taken + sequence.capacity > self.context.n_ctx:
                    return
            self.waiting.popleft()
            sequence.seq = self.free.pop()
            self.live.append(sequence)
            if native_of(self.context).memory_last(sequence.seq) >= 0:
                # Left there after an error: it could not be removed then.
                native_of(self.context).memory_remove(sequence.seq, -1, -1)
            if self.drafter is not None:
                # The drafter may still know an earlier text under this id.
                self.drafter.reset(sequence.seq)

    def _draft(self, feeding: bool) -> int:
        """Ask for drafts. Returns how many tokens a sequence got, on average."""
        drafter = self.drafter
        for sequence in self.live:
            sequence.draft = NO_DRAFT
        if drafter is None:
            return 0
        rooms = {
            one.seq: min(one.options.max_tokens - len(one.tokens), one.capacity - one.position) - 1
            for one in self.live
            if not one.feeding
        }
        if not any(room > 0 for room in rooms.values()):
            return 0
        if self.length is None:
            longest = self.n_max
        elif feeding:
            # Rounds with prefill are not measured, so they try no other length.
            longest = self.length.best(len(self.live))
        else:
            longest = self.length.choose(len(self.live))
        longest = self.rollback.longest(longest)
        requests = {
            one.seq: DraftRequest(
                one.tokens[-1], one.position, min(longest, rooms[one.seq]), one.sampler.seed
            )
            for one in self.live
            if min(longest, rooms.get(one.seq, 0)) > 0
        }
        if not requests:
            return 0
        drafting = [one for one in self.live if one.seq in requests]
        for sequence in drafting:
            sequence.n_rows = 1
        self._spent("target", *drafting)
        drafts = checked_drafts(drafter, requests)
        total = 0
        for sequence in drafting:
            if draft := drafts.get(sequence.seq):
                sequence.draft = self._usable(draft, sequence.options.rejection)
                total += len(draft.tokens)
        self._spent("draft", *drafting)
        return round(total / len(drafting))

    def _usable(self, draft: Draft, rejection: bool) -> Draft:
        tokens = draft.tokens
        n_vocab = engine_of(self.context).model.n_vocab
        if not (tokens.min() >= 0 and tokens.max() < n_vocab):
            raise InvalidInputError(f"drafted token ids must be in 0..{n_vocab - 1}; found {tokens.tolist()}")
        return Draft(tokens, None, _distributions(draft, n_vocab) if rejection else None)

    def _feed(self) -> None:
        """Choose the entries of the next pass: drafts and newest tokens first, then as much of the prompts as
        the engine call has room for."""
        for sequence in self.live:
            sequence.n_rows = 0 if sequence.feeding else 1 + len(sequence.draft.tokens)
        n_batch = self.context.n_batch
        left = max(n_batch - sum(one.n_rows for one in self.live), min(self.context.n_ubatch, n_batch))
        feeding = [one for one in self.live if one.feeding]
        # Rows that are outputs have logits each: no more than those of one ubatch at a time.
        left_scored = min(left, self.rollback.most_rows)

        def feed(sequence: Request, parts: int) -> None:
            nonlocal left, left_scored
            room = min(left, left_scored) if sequence.scored else left
            n_more = min(len(sequence.prompt) - sequence.fed - sequence.n_rows, -(-room // parts))
            sequence.n_rows += n_more
            left -= n_more
            left_scored -= n_more if sequence.scored else 0

        for sequence in feeding[:1]:
            # The oldest prompt gets at least half of the room, so that its prefill ends too.
            feed(sequence, 2)
        # Shortest remainder first: short prompts do not wait for a long one.
        for sequence in sorted(feeding, key=lambda one: len(one.prompt) - one.fed):
            feed(sequence, 1)

    def _pass(self, sequences: Sequence[Request]) -> None:
        """One decode of the target, then drafter, states, log-probabilities, verification and rollback."""
        batch = Batch()
        n_outputs = 0
        tap = self._tap(sequences)
        self.rollback.before(sequences)
        for sequence in sequences:
            sequence.first_row, sequence.first_output = len(batch), n_outputs
            if sequence.feeding:
                begin, last = sequence.fed, len(sequence.prompt) - 1
                sequence.fed += sequence.n_rows
                for position, token in enumerate(sequence.prompt[begin : sequence.fed].tolist(), begin):
                    output = sequence.options.max_tokens > 0 if position == last else sequence.scored
                    batch.add(token, position, sequence.seq, output)
                    n_outputs += output
                sequence.first_row = len(batch) - 1
                continue
            batch.add(sequence.tokens[-1], sequence.position, sequence.seq, True)
            for i, token in enumerate(sequence.draft.tokens.tolist(), 1):
                batch.add(token, sequence.position + i, sequence.seq, True)
            n_outputs += sequence.n_rows
        with tap or contextlib.nullcontext():
            engine_of(self.context).decode(batch)
            self._spent("target", *sequences)
            if self.drafter is not None:
                self.drafter.process(batch)
                self._spent("draft", *sequences)
        states = None if tap is None else tap.states
        taken_back = []
        for sequence in sequences:
            if states is not None and sequence.options.prompt_states and not sequence.tokens:
                end = sequence.first_row + 1
                sequence.keep_prompt_rows(states, end - sequence.n_rows, end)
                self._spent("target", sequence)
            if sequence.scored and not sequence.tokens:
                self._score(sequence)
            if sequence.feeding:
                continue
            if sequence.options.max_tokens == 0:
                sequence.finish_reason = "length"
                continue
            if tap is not None:
                sequence.first_state = sequence.first_row if tap.rows == "all" else sequence.first_output
            n_accepted = self._verify(sequence, states)
            if n_accepted < len(sequence.draft.tokens):
                taken_back.append((sequence, n_accepted))
        for sequence, n_accepted in taken_back:
            self._take_back(sequence, n_accepted)

    def _tap(self, sequences: Iterable[Request]) -> Tap | None:
        """The tap for a pass of these sequences: layers that the drafter or they want. None without any."""
        wanting = [one for one in sequences if one.wants_states]
        layers = dict.fromkeys(self.layers)
        for sequence in wanting:
            layers |= dict.fromkeys(sequence.options.layers)
        if not layers:
            return None
        # After prefill all wanted rows are outputs.
        every = len(self.layers) > 0 or any(one.feeding for one in wanting)
        return Tap(engine_of(self.context), Capture(tuple(layers), "all" if every else "outputs", "float32"))

    def _score(self, sequence: Request) -> None:
        """Record the log-probabilities of prompt tokens, each from the logits of the token before it."""
        n_top = sequence.options.prompt_logprobs
        assert n_top is not None
        begin = sequence.fed - sequence.n_rows
        tokens = sequence.prompt[begin + 1 : sequence.fed + 1].tolist()
        first_row = sequence.first_row + 1 - sequence.n_rows
        sequence.prompt_logprobs += logprobs.at_outputs(self.context, first_row, tokens, n_top)
        self._spent("sampling", sequence)

    def _verify(self, sequence: Request, states: States | None) -> int:
        """Verify the draft and append the chosen tokens. Returns the number of accepted drafted tokens."""
        options = sequence.options
        was_prompt = not sequence.tokens
        draft = sequence.draft.tokens
        try:
            tokens, n_accepted = _core.verify(
                native_of(self.context),
                native_of(sequence.sampler),
                sequence.first_row,
                draft,
                sequence.draft.distributions,
                not options.ignore_eos,
                list(options.stop_tokens),
            )
        except InvalidInputError as error:
            rows = range(sequence.first_row, sequence.first_row + len(draft) + 1)
            # -infinity rules a token out.
            if all((self.context.logits(row) < np.inf).all() for row in rows):
                raise
            raise NotFiniteError(str(error)) from None
        if was_prompt:
            sequence.position = len(sequence.prompt)
        else:
            sequence.position += len(tokens) if len(tokens) == n_accepted else n_accepted + 1
        before = len(sequence.tokens)
        for token in tokens:
            sequence.tokens.append(token)
            if self._ends(sequence, token):
                break
        n_new = len(sequence.tokens) - before
        if options.logprobs is not None:
            sequence.logprobs += logprobs.at_outputs(
                self.context, sequence.first_row, sequence.tokens[before:], options.logprobs
            )
        sequence.stats.tokens = len(sequence.tokens)
        self._spent("sampling", sequence)
        if not was_prompt:
            n_stood = min(n_accepted, n_new)
            sequence.last_is_computed = n_new <= n_accepted
            # Drafted tokens after the end of the text were not tried.
            n_tried = n_stood if sequence.last_is_computed else len(draft)
            sequence.stats.count(n_tried, n_stood)
            if self.length is not None and n_tried:
                self.length.observe(n_tried, n_stood)
            if options.states is not None and states is not None:
                # The rows kept of this pass: the newest token before the draft, and the accepted tokens.
                first = sequence.first_state
                sequence.keep_rows(states, first, first + n_stood + 1)
                self._spent("target", sequence)
            if self.drafter is not None:
                self.drafter.accept(sequence.seq, n_accepted)
                self._spent("draft", sequence)
        if sequence.finish_reason is None and sequence.position >= sequence.capacity:
            sequence.finish_reason = "context"
        return n_accepted

    def _ends(self, sequence: Request, token: int) -> bool:
        """Append the text of the newest token. Returns whether the token ends the generation."""
        is_stop = token in sequence.options.stop_tokens or (
            not sequence.options.ignore_eos and engine_of(self.context).model.is_end_of_generation(token)
        )
        sequence.pieces.append("" if is_stop else sequence.text.push(token))
        if is_stop or sequence.text.stopped:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.options.max_tokens:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None

    def _take_back(self, sequence: Request, n_accepted: int) -> None:
        if sequence.finish_reason is None or not (
            sequence.options.states is None or sequence.last_is_computed
        ):
            self.rollback.back(sequence, n_accepted)
            self._spent("target", sequence)

    def _finish(self, sequence: Request) -> None:
        """Clean up once the last token is known: last state, held-back text, KV cache, sequence id."""
        states = sequence.options.states
        if states is not None and sequence.tokens and not sequence.last_is_computed:
            self._compute_last(sequence)
        sequence.flush_text()
        if sequence.seq < 0:
            # Cancelled before it was admitted.
            return
        native_of(self.context).memory_remove(sequence.seq, -1, -1)
        self._spent("target", sequence)
        if self.drafter is not None:
            self.drafter.reset(sequence.seq)
            self._spent("draft", sequence)
        self.live.remove(sequence)
        self.free.append(sequence.seq)

    def _compute_last(self, sequence: Request) -> None:
        """Decode the last token for its state: no pass has computed it yet."""
        if sequence.position >= sequence.capacity:
            # The context is full: the last token gets no state.
            sequence.rows = sequence.rows if sequence.options.states == "full" else []
            return
        batch = Batch()
        batch.add(sequence.tokens[-1], sequence.position, sequence.seq)
        # It is no output: nobody wants its logits.
        engine = engine_of(self.context)
        with Tap(engine, Capture(sequence.options.layers, "all", "float32")) as tap:
            engine.decode(batch)
        sequence.keep_rows(tap.states, 0, 1)


def _layers(drafter: Drafter, n_layer: int) -> tuple[LayerId, ...]:
    layers = drafter.target_layers
    return () if isinstance(layers, Sequence) and not len(layers) else normalize(layers, n_layer)


def _distributions(draft: Draft, n_vocab: int) -> NDArray[np.float32]:
    """A draft's distributions, float32 ``(n, n_vocab)``.

    :raises InvalidInputError: they are missing, of the wrong shape, or not probabilities that sum to 1.
    """
    if draft.distributions is None:
        raise InvalidInputError(
            "rejection=True needs drafts with the distributions that they were drawn from; drafters with a "
            "file have them with a temperature above 0"
        )
    found, n = draft.distributions, len(draft.tokens)
    if found.shape != (n, n_vocab):
        raise InvalidInputError(
            f"distributions must have a row of n_vocab={n_vocab} for each of the {n} drafted tokens; "
            f"found the shape {found.shape}"
        )
    sums = found.sum(axis=1)
    # NaN fails either comparison, and infinity the second.
    if not (found.min() >= 0 and np.abs(sums - 1).max() <= 1e-3):
        raise InvalidInputError(
            "distributions must hold probabilities that add up to 1, none negative; found sums of "
            f"{sums.tolist()} and values from {found.min()}"
        )
    return found
