"""The loop of :func:`llamatap.generate`: rounds of drafting, one decode of the target, and verification."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._native import _core, flush_log
from llamatap._rewind import rewind_of
from llamatap._sequence import NO_DRAFT, Options, Prompt
from llamatap.context import Batch, Context
from llamatap.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    checked_drafts,
    leaves,
    most_tokens,
    new_length,
    reset_all,
    specs_of,
)
from llamatap.errors import BusyError, EngineError, InvalidInputError
from llamatap.generation import Event, TokenLogprobs
from llamatap.layers import LayerId, normalize
from llamatap.states import States

__all__ = ["Loop", "check_free"]

_logger = logging.getLogger("llamatap")

#: The loop that a drafter is in use by, by the drafter's id.
_loops: dict[int, object] = {}


def check_free(context: Context, drafter: Drafter | None) -> None:
    """The context's memory holds nothing, and no generation has it or the drafter for itself.

    :raises InvalidInputError: it holds tokens.
    :raises BusyError: a generation is going on.
    """
    if context.generation is not None:
        raise BusyError("another generation is going on in this context; it must end first")
    if drafter is not None and any(id(one) in _loops for one in leaves(drafter)):
        raise BusyError("the drafter is in use by another generation; give each one of its own")
    for seq in range(context.n_seq_max):
        if context.native.memory_last(seq) >= 0:
            raise InvalidInputError(
                f"sequence {seq} of the context holds tokens; generation needs an empty memory "
                "(memory.clear())"
            )


def _tidying(
    action: Callable[[], object],
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    """`action` for the end of a ``with`` block. What it raises does not replace what ended the block."""

    def tidy(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            action()
        except Exception as other:
            if error is None or isinstance(error, GeneratorExit):
                raise
            _logger.warning("after %r a generation could not be tidied up: %r", error, other)

    return tidy


class Loop:
    """One call of :func:`generate`."""

    def __init__(
        self,
        context: Context,
        waiting: Iterable[Prompt],
        drafter: Drafter | None,
        options: Options,
    ) -> None:
        self.context = context
        self.drafter = drafter
        self.options = options
        self.waiting = deque(waiting)
        self.live: list[Prompt] = []
        specs = [] if drafter is None else specs_of(drafter)
        n_seqs = min([context.n_seq_max, *(spec.n_seq_max for spec in specs)])
        self.free = list(range(n_seqs))[::-1]
        self.length = None if drafter is None else new_length(drafter)
        self.n_max = 0 if drafter is None else most_tokens(drafter)
        needed = () if drafter is None else _layers(drafter, context._loaded.n_layer)
        wanted = () if options.states is None else options.layers
        self.layers = tuple(dict.fromkeys((*needed, *wanted)))
        self.columns = [self.layers.index(layer) for layer in wanted]
        #: Drafters need the states of all entries; states of the text are those of outputs.
        self.rows: Literal["all", "outputs"] = "all" if needed else "outputs"
        self.rewind = rewind_of(context)
        self.now = 0.0

    def events(self) -> Generator[Event, None, None]:
        check_free(self.context, self.drafter)
        events: Sequence[Event] = ()
        with self._held():
            for events in self._rounds():
                # The last ones come when all is given back.
                if not self.live and not self.waiting:
                    break
                yield from events
        yield from events

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Have the context and the drafter for oneself, and a tap open where states are needed."""
        with contextlib.ExitStack() as held:
            held.push(_tidying(flush_log))
            held.callback(self._let_go)
            with self.context.lock:
                if self.context.generation is not None:
                    raise BusyError("another generation is going on in this context; it must end first")
                self.context.generation = self
            for one in () if self.drafter is None else leaves(self.drafter):
                if _loops.setdefault(id(one), self) is not self:
                    raise BusyError("the drafter is in use by another generation; give each one of its own")
            held.push(_tidying(self._forget))
            held.push(_tidying(self._clear))
            if self.layers:
                held.enter_context(self.context.tap(self.layers, rows=self.rows))
            yield

    def _let_go(self) -> None:
        if self.context.generation is self:
            self.context.generation = None
        for one in () if self.drafter is None else leaves(self.drafter):
            if _loops.get(id(one)) is self:
                del _loops[id(one)]

    def _clear(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for sequence in self.live:
                all_of_them.callback(self._remove, sequence.seq)

    def _remove(self, seq: int) -> None:
        # After a failure inside of the engine there is nothing left to tidy.
        with contextlib.suppress(EngineError):
            if not self.context.closed:
                self.context.native.memory_remove(seq, -1, -1)

    def _forget(self) -> None:
        if self.drafter is not None:
            reset_all([self.drafter], [one.seq for one in self.live])

    def _spent(self, phase: Literal["target", "draft", "sampling"], *sequences: Prompt) -> None:
        """The seconds since the last call were spent on these sequences, by their entries in the pass."""
        before, self.now = self.now, time.perf_counter()
        n_rows = sum(one.n_rows for one in sequences)
        for one in sequences:
            seconds = (self.now - before) * (one.n_rows / n_rows if n_rows else 1 / len(sequences))
            name = f"{phase}_seconds"
            setattr(one.stats, name, getattr(one.stats, name) + seconds)

    def _rounds(self) -> Iterator[list[Event]]:
        """The events of each round."""
        while self.waiting or self.live:
            # Since the last round the time was the caller's.
            self.now = started = time.perf_counter()
            cancelled = [one for one in self.live if one.cancelled.is_set()]
            if cancelled:
                for sequence in cancelled:
                    sequence.finish_reason = "cancelled"
                yield self._new_events(cancelled)
                continue
            self._admit()
            feeding = any(one.feeding for one in self.live)
            n_drafted = self._draft(feeding)
            self._feed()
            for part in self.rewind.parts([one for one in self.live if one.n_rows > 0]):
                self._pass(part)
            if self.length is not None and not feeding:
                self.length.measure(n_drafted, self.now - started, len(self.live))
            yield self._new_events(list(self.live))

    def _new_events(self, sequences: Iterable[Prompt]) -> list[Event]:
        events: list[Event] = []
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._finish(sequence)
            events += sequence.new_events(self.context, self.options)
            self._spent("sampling", sequence)
        return events

    def _admit(self) -> None:
        """Let prompts in while there are sequence ids and room for all that they may become."""
        while self.waiting and self.free:
            sequence = self.waiting[0]
            if self.context.kv_unified:
                taken = sum(one.capacity for one in self.live)
                if self.live and taken + sequence.capacity > self.context.n_ctx:
                    return
            self.waiting.popleft()
            sequence.seq = self.free.pop()
            self.live.append(sequence)
            if self.drafter is not None:
                # It may know something of the sequence from before.
                self.drafter.reset(sequence.seq)

    def _draft(self, feeding: bool) -> int:
        """Ask for drafts. Returns how many tokens a sequence got, on average."""
        drafter = self.drafter
        for sequence in self.live:
            sequence.draft = NO_DRAFT
        if drafter is None:
            return 0
        rooms = {
            one.seq: min(self.options.max_tokens - len(one.tokens), one.capacity - one.position) - 1
            for one in self.live
            if not one.feeding
        }
        if not any(room > 0 for room in rooms.values()):
            return 0
        if self.length is None:
            longest = self.n_max
        elif feeding:
            # A round that is not measured is none to try another length in.
            longest = self.length.best(len(self.live))
        else:
            longest = self.length.choose(len(self.live))
        longest = self.rewind.longest(longest)
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
                sequence.draft = self._usable(draft)
                total += len(draft.tokens)
        self._spent("draft", *drafting)
        return round(total / len(drafting))

    def _usable(self, draft: Draft) -> Draft:
        tokens = draft.tokens
        n_vocab = self.context._loaded.n_vocab
        if not (tokens.min() >= 0 and tokens.max() < n_vocab):
            raise InvalidInputError(f"drafted token ids must be in 0..{n_vocab - 1}; found {tokens.tolist()}")
        rejection = self.options.rejection
        return Draft(tokens, None, _distributions(draft, n_vocab) if rejection else None)

    def _feed(self) -> None:
        """What enters the next pass: of prompts, as much as one engine call takes with all others' tokens."""
        for sequence in self.live:
            sequence.n_rows = 0 if sequence.feeding else 1 + len(sequence.draft.tokens)
        n_batch = self.context.n_batch
        left = max(n_batch - sum(one.n_rows for one in self.live), min(self.context.n_ubatch, n_batch))
        for sequence in self.live:
            if sequence.feeding:
                sequence.n_rows = min(len(sequence.prompt) - sequence.fed, left)
                left -= sequence.n_rows

    def _pass(self, sequences: Sequence[Prompt]) -> None:
        """One decode of the target, and what follows from it."""
        batch = Batch()
        n_outputs = 0
        self.rewind.before(sequences)
        for sequence in sequences:
            sequence.first_row, sequence.first_output = len(batch), n_outputs
            if sequence.feeding:
                begin, n_prompt = sequence.fed, len(sequence.prompt)
                sequence.fed += sequence.n_rows
                for position, token in enumerate(sequence.prompt[begin : sequence.fed].tolist(), begin):
                    batch.add(token, position, sequence.seq, position + 1 == n_prompt)
                sequence.first_row = len(batch) - 1
                n_outputs += not sequence.feeding
                continue
            batch.add(sequence.tokens[-1], sequence.position, sequence.seq, True)
            for i, token in enumerate(sequence.draft.tokens.tolist(), 1):
                batch.add(token, sequence.position + i, sequence.seq, True)
            n_outputs += sequence.n_rows
        self.context._decode(batch)
        self._spent("target", *sequences)
        if self.drafter is not None:
            self.drafter.process(batch)
            self._spent("draft", *sequences)
        states = self.context.tapped
        taken_back = []
        for sequence in sequences:
            if sequence.feeding:
                continue
            n_accepted = self._verify(sequence, states)
            if n_accepted < len(sequence.draft.tokens):
                taken_back.append((sequence, n_accepted))
        for sequence, n_accepted in taken_back:
            self._take_back(sequence, n_accepted)

    def _verify(self, sequence: Prompt, states: States | None) -> int:
        """Choose the next tokens. Returns how many drafted ones the target has as it should."""
        was_prompt = not sequence.tokens
        draft = sequence.draft.tokens
        tokens, n_accepted = _core.verify(
            self.context.native,
            sequence.sampler.native,
            sequence.first_row,
            draft,
            sequence.draft.distributions,
            not self.options.ignore_eos,
            list(self.options.stop_tokens),
        )
        if was_prompt:
            sequence.position = len(sequence.prompt)
        else:
            sequence.position += len(tokens) if len(tokens) == n_accepted else n_accepted + 1
        before = len(sequence.tokens)
        for i, token in enumerate(tokens):
            sequence.tokens.append(token)
            if self.options.logprobs is not None:
                logits = self.context.logits(sequence.first_row + i)
                sequence.logprobs.append(_logprobs(logits, token, self.options.logprobs))
            if self._ends(sequence, token):
                break
        n_new = len(sequence.tokens) - before
        sequence.stats.tokens = len(sequence.tokens)
        self._spent("sampling", sequence)
        if not was_prompt:
            n_stood = min(n_accepted, n_new)
            sequence.last_is_computed = n_new <= n_accepted
            # A text that ends inside of a draft says nothing of the tokens after.
            n_tried = n_stood if sequence.last_is_computed else len(draft)
            sequence.stats.count(n_tried, n_stood)
            if self.length is not None and n_tried:
                self.length.observe(n_tried, n_stood)
            if self.options.states is not None and states is not None:
                # The rows of this pass are of the newest token before it, and of what was accepted.
                first = sequence.first_row if self.rows == "all" else sequence.first_output
                rows = states.array[first : first + n_stood + 1, self.columns].copy()
                sequence.keep_rows(rows, self.options)
                self._spent("target", sequence)
            if self.drafter is not None:
                self.drafter.accept(sequence.seq, n_accepted)
                self._spent("draft", sequence)
        if sequence.finish_reason is None and sequence.position >= sequence.capacity:
            sequence.finish_reason = "context"
        return n_accepted

    def _ends(self, sequence: Prompt, token: int) -> bool:
        """Take the text of the newest token; whether it is the last one."""
        is_stop = token in self.options.stop_tokens or (
            not self.options.ignore_eos and self.context._loaded.is_end_of_generation(token)
        )
        sequence.pieces.append("" if is_stop else sequence.text.push(token))
        if is_stop or sequence.text.stopped:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= self.options.max_tokens:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None

    def _take_back(self, sequence: Prompt, n_accepted: int) -> None:
        if sequence.finish_reason is None or not (self.options.states is None or sequence.last_is_computed):
            self.rewind.back(sequence, n_accepted)
            self._spent("target", sequence)

    def _finish(self, sequence: Prompt) -> None:
        """What is left to do when the last token is known."""
        if self.options.states is None or sequence.last_is_computed:
            pass
        elif sequence.position >= sequence.capacity:
            # There is no place for it, so it has no state.
            sequence.rows = sequence.rows if self.options.states == "full" else []
        else:
            batch = Batch()
            batch.add(sequence.tokens[-1], sequence.position, sequence.seq, self.rows == "outputs")
            self.context._decode(batch)
            states = self.context.tapped
            assert states is not None
            sequence.keep_rows(states.array[:, self.columns].copy(), self.options)
        sequence.flush_text()
        self.context.native.memory_remove(sequence.seq, -1, -1)
        self._spent("target", sequence)
        if self.drafter is not None:
            self.drafter.reset(sequence.seq)
            self._spent("draft", sequence)
        self.live.remove(sequence)
        self.free.append(sequence.seq)


def _layers(drafter: Drafter, n_layer: int) -> tuple[LayerId, ...]:
    layers = drafter.target_layers
    return () if isinstance(layers, Sequence) and not len(layers) else normalize(layers, n_layer)


def _distributions(draft: Draft, n_vocab: int) -> NDArray[np.float32]:
    """A draft's distributions, float32 ``(n, n_vocab)``.

    :raises InvalidInputError: there are none, or one is none.
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


def _logprobs(logits: NDArray[np.float32], token: int, n: int) -> TokenLogprobs:
    values = logits.astype(np.float64)
    highest = values.max()
    log_sum = highest + np.log(np.exp(values - highest).sum())
    top: NDArray[np.intp] = np.zeros(0, np.intp)
    if n > 0:
        # Sorting all of a large vocabulary would take longer than many a pass.
        at = max(len(logits) - n, 0)
        known = np.flatnonzero(logits >= np.partition(logits, at)[at])
        top = known[np.argsort(-logits[known], kind="stable")][:n]
    return TokenLogprobs(
        token,
        float(values[token] - log_sum),
        tuple((int(one), float(values[one] - log_sum)) for one in top),
    )
