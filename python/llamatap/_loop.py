"""The loop of :func:`llamatap.generate`: rounds of drafting, one decode of the target, and verification."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._native import _core, flush_log
from llamatap._text import TextStream
from llamatap.context import Batch, Context
from llamatap.drafters import Draft, Drafter, DraftRequest, most_tokens, new_length, reset_all
from llamatap.errors import BusyError, EngineError, InvalidInputError
from llamatap.generation import Event, FinishReason, Generation, Stats, TokenLogprobs
from llamatap.layers import LayerId
from llamatap.model import token_array
from llamatap.sampler import Sampler
from llamatap.states import States

__all__ = ["Loop", "Options", "Prompt", "check_empty"]

_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Options:
    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    states: Literal["last", "full"] | None
    layers: tuple[LayerId, ...]
    rejection: bool


class Prompt:
    """A prompt and what was generated after it."""

    def __init__(
        self, index: int, prompt: NDArray[np.int32], sampler: Sampler, text: TextStream, capacity: int
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.sampler = sampler
        self.text = text
        #: Places in the target's memory that it may take.
        self.capacity = capacity
        self.seq = -1
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.rows: list[NDArray[np.float32]] = []
        self.stats = Stats(prompt_tokens=len(prompt))
        #: Where the newest token is, or will be: the target has decoded all before it.
        self.position = 0
        self.draft = Draft(_NO_TOKENS)
        self.first_row = 0
        self.n_rows = 0
        self.n_given = 0  # events
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        #: Whether a pass of the target has seen the newest token.
        self.last_is_computed = False

    @property
    def fresh(self) -> bool:
        return self.position == 0

    def cancel(self) -> None:
        self.cancelled = True


def check_empty(context: Context) -> None:
    """The context's memory holds nothing, and no generation has it for itself.

    :raises InvalidInputError: it holds tokens.
    :raises BusyError: a generation is going on.
    """
    if context.generation is not None:
        raise BusyError("another generation is going on in this context; it must end first")
    for seq in range(context.n_seq_max):
        if context.native.memory_last(seq) >= 0:
            raise InvalidInputError(
                f"sequence {seq} of the context holds tokens; generation needs an empty memory "
                "(memory.clear())"
            )


class Loop:
    """One call of :func:`generate`."""

    def __init__(
        self,
        context: Context,
        room: int,
        waiting: Iterable[Prompt],
        drafter: Drafter | None,
        options: Options,
    ) -> None:
        self.context = context
        self.drafter = drafter
        self.options = options
        self.waiting = deque(waiting)
        self.room = room
        self.live: list[Prompt] = []
        self.free = list(range(context.n_seq_max))[::-1]
        self.length = None if drafter is None else new_length(drafter)
        self.n_max = 0 if drafter is None else most_tokens(drafter)
        needed = () if drafter is None else drafter.target_layers
        wanted = () if options.states is None else options.layers
        self.layers = tuple(dict.fromkeys((*needed, *wanted)))
        self.columns = [self.layers.index(layer) for layer in wanted]
        model = context._loaded
        self.n_swa = model.n_swa
        #: Whether the memory can give up the end of a sequence: always, for as many tokens, or never.
        self.rewinds: Literal["any", "some", "none"] = "any"
        if model.is_recurrent or model.is_hybrid:
            self.rewinds = "some" if context.n_rs_seq > 0 else "none"
        elif not context.swa_full and self.n_swa > 0:
            self.rewinds = "none"

    def events(self) -> Generator[Event, None, None]:
        check_empty(self.context)
        with self.context.lock:
            if self.context.generation is not None:
                raise BusyError("another generation is going on in this context; it must end first")
            self.context.generation = self
        try:
            if not self.layers:
                yield from self._rounds()
            else:
                with self.context.tap(self.layers, rows="all"):
                    yield from self._rounds()
        finally:
            left, self.live = self.live, []
            for sequence in left:
                if not self.context.closed:
                    # After a failure inside of the engine there is nothing left to tidy.
                    with contextlib.suppress(EngineError):
                        self.context.native.memory_remove(sequence.seq, -1, -1)
            self.context.generation = None
            flush_log()
            if self.drafter is not None:
                reset_all([self.drafter], [one.seq for one in left])

    def _rounds(self) -> Iterator[Event]:
        while self.waiting or self.live:
            self._admit()
            started = time.perf_counter()
            n_drafted = self._draft()
            for part in self._parts():
                self._pass(part)
            if self.length is not None and not any(one.stats.rounds == 0 for one in self.live):
                self.length.measure(n_drafted, time.perf_counter() - started)
            for sequence in list(self.live):
                if sequence.finish_reason is None and sequence.cancelled:
                    sequence.finish_reason = "cancelled"
                if sequence.finish_reason is not None:
                    self._finish(sequence)
                yield from self._new_events(sequence)

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

    def _draft(self) -> int:
        """Ask for drafts. Returns how many tokens a sequence got, on average."""
        drafter = self.drafter
        for sequence in self.live:
            sequence.draft = Draft(_NO_TOKENS)
        if drafter is None:
            return 0
        rooms = {
            one.seq: min(self.options.max_tokens - len(one.tokens), one.capacity - one.position) - 1
            for one in self.live
            if not one.fresh
        }
        if not any(room > 0 for room in rooms.values()):
            return 0
        longest = self.length.choose() if self.length is not None else self.n_max
        if self.rewinds == "some":
            longest = min(longest, self.context.n_rs_seq, self._most_rows - 1)
        requests = {
            one.seq: DraftRequest(
                one.tokens[-1], one.position, min(longest, rooms[one.seq]), one.sampler.seed
            )
            for one in self.live
            if min(longest, rooms.get(one.seq, 0)) > 0
        }
        if not requests:
            return 0
        started = time.perf_counter()
        drafts = drafter.draft(requests)
        if not isinstance(drafts, Mapping):
            raise InvalidInputError(
                f"a drafter gives a dict of drafts by sequence id, not {type(drafts).__name__}"
            )
        seconds = time.perf_counter() - started
        drafting = [one for one in self.live if one.seq in requests]
        total = 0
        for sequence in drafting:
            sequence.stats.draft_seconds += seconds / len(drafting)
            draft = drafts.get(sequence.seq)
            if draft is None:
                continue
            sequence.draft = self._checked(draft, requests[sequence.seq].n_max)
            total += len(sequence.draft.tokens)
        return round(total / len(drafting))

    def _checked(self, draft: object, n_max: int) -> Draft:
        if not isinstance(draft, Draft):
            raise InvalidInputError(f"a drafter gives llamatap.Draft objects, not {type(draft).__name__}")
        tokens = token_array(draft.tokens)[:n_max]
        n_vocab = self.context._loaded.n_vocab
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < n_vocab):
            raise InvalidInputError(f"drafted token ids must be in 0..{n_vocab - 1}; found {tokens.tolist()}")
        distributions = draft.distributions
        if not self.options.rejection:
            return Draft(tokens)
        if len(tokens) and distributions is None:
            raise InvalidInputError(
                "rejection=True needs drafts with the distributions that they were drawn from; make the "
                "drafter with a temperature above 0"
            )
        if distributions is not None:
            try:
                distributions = np.ascontiguousarray(distributions, np.float32)[:n_max]
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"distributions must be a float32 matrix: {error}") from None
        return Draft(tokens, None, distributions)

    @property
    def _most_rows(self) -> int:
        """The most rows that the engine computes in one go."""
        return min(self.context.n_ubatch, self.context.n_outputs_max or self.context.n_ubatch)

    def _parts(self) -> list[list[Prompt]]:
        """The sequences of each pass: all in one, but where the memory gives up only what the last ubatch
        brought. The engine cuts sequences of different length, or many of them, into several."""
        if self.context.kv_unified and self.n_swa > 0 and self.rewinds == "any":
            return self._parts_of_windows()
        if self.rewinds != "some":
            return [self.live]
        lengths = {len(one.draft.tokens) for one in self.live}
        n_rows = (1 + max(lengths)) * len(self.live)
        if lengths == {0} or (len(lengths) == 1 and n_rows <= self._most_rows):
            return [self.live]
        return [[one] for one in self.live]

    def _parts_of_windows(self) -> list[list[Prompt]]:
        """A ubatch may take the places of tokens that no window reaches any more, of any sequence: what
        stands of a draft must be known before the next ubatch."""
        parts: list[list[Prompt]] = []
        n_rows = 0
        for one in sorted(self.live, key=lambda one: one.fresh):
            n_own = len(one.prompt) if one.fresh else 1 + len(one.draft.tokens)
            is_same = parts and one.fresh == parts[-1][0].fresh and n_rows + n_own <= self._most_rows
            if not is_same:
                parts.append([])
                n_rows = 0
            parts[-1].append(one)
            n_rows += n_own
        return parts

    def _pass(self, sequences: Sequence[Prompt]) -> None:
        """One decode of the target, and what follows from it."""
        batch = Batch()
        saved: dict[int, bytes] = {}
        for sequence in sequences:
            if sequence.fresh:
                for position, token in enumerate(sequence.prompt.tolist()):
                    batch.add(token, position, sequence.seq, position + 1 == len(sequence.prompt))
                sequence.first_row = len(batch) - 1
                sequence.n_rows = len(sequence.prompt)
                continue
            sequence.first_row = len(batch)
            sequence.n_rows = 1 + len(sequence.draft.tokens)
            batch.add(sequence.tokens[-1], sequence.position, sequence.seq, True)
            for i, token in enumerate(sequence.draft.tokens.tolist(), 1):
                batch.add(token, sequence.position + i, sequence.seq, True)
            if self.rewinds == "none" and sequence.n_rows > 1:
                saved[sequence.seq] = self.context.native.save(sequence.seq)
        started = time.perf_counter()
        self.context.decode(batch)
        decoded = time.perf_counter()
        if self.drafter is not None:
            self.drafter.process(batch)
        processed = time.perf_counter()
        for sequence in sequences:
            share = sequence.n_rows / len(batch)
            sequence.stats.target_seconds += (decoded - started) * share
            sequence.stats.draft_seconds += (processed - decoded) * share
        states = self.context.tapped
        taken_back = []
        for sequence in sequences:
            n_accepted = self._verify(sequence, states)
            if n_accepted < len(sequence.draft.tokens):
                taken_back.append((sequence, n_accepted))
        for sequence, n_accepted in taken_back:
            self._take_back(sequence, n_accepted, saved.get(sequence.seq))

    def _verify(self, sequence: Prompt, states: States | None) -> int:
        """Choose the next tokens. Returns how many drafted ones the target has as it should."""
        started = time.perf_counter()
        was_fresh = sequence.fresh
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
        if was_fresh:
            sequence.position = len(sequence.prompt)
        else:
            sequence.position += len(tokens) if len(tokens) == n_accepted else n_accepted + 1
        before = len(sequence.tokens)
        for i, token in enumerate(tokens):
            sequence.tokens.append(token)
            if self.options.logprobs is not None:
                sequence.logprobs.append(self._logprobs(sequence.first_row + i, token))
            if self._ends(sequence, token):
                break
        n_new = len(sequence.tokens) - before
        sequence.stats.tokens = len(sequence.tokens)
        sequence.stats.sampling_seconds += time.perf_counter() - started
        if not was_fresh:
            n_stood = min(n_accepted, n_new)
            sequence.last_is_computed = n_new <= n_accepted
            sequence.stats.count(len(draft), n_stood)
            if self.length is not None and len(draft):
                self.length.observe(len(draft), n_stood)
            if self.options.states is not None and states is not None:
                # The rows of this pass are of the newest token before it, and of what was accepted.
                first = sequence.first_row
                rows = states.array[first : first + n_stood + 1, self.columns].copy()
                keep = slice(None) if self.options.states == "full" else slice(-1, None)
                sequence.rows = [*(sequence.rows if self.options.states == "full" else []), *rows[keep]]
            if self.drafter is not None:
                self.drafter.accept(sequence.seq, n_accepted)
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

    def _take_back(self, sequence: Prompt, n_accepted: int, saved: bytes | None) -> None:
        if sequence.finish_reason is not None and (self.options.states is None or sequence.last_is_computed):
            return
        native, seq = self.context.native, sequence.seq
        if self.rewinds != "none":
            native.memory_remove(seq, sequence.position, -1)
            return
        assert saved is not None
        started = time.perf_counter()
        native.restore(seq, saved)
        batch = Batch()
        position = sequence.position - n_accepted - 1
        again = sequence.tokens[-n_accepted - 2 : -1]
        for i, token in enumerate(again):
            batch.add(token, position + i, seq)
        # Not through a tap: these rows were seen.
        native.decode(batch)
        sequence.stats.target_seconds += time.perf_counter() - started

    def _logprobs(self, row: int, token: int) -> TokenLogprobs:
        logits = self.context.logits(row).astype(np.float64)
        highest = logits.max()
        log_sum = highest + np.log(np.exp(logits - highest).sum())
        n = self.options.logprobs or 0
        top = np.argsort(-logits, kind="stable")[:n]
        return TokenLogprobs(
            token,
            float(logits[token] - log_sum),
            tuple((int(one), float(logits[one] - log_sum)) for one in top),
        )

    def _finish(self, sequence: Prompt) -> None:
        """What is left to do when the last token is known."""
        if self.options.states is None or sequence.last_is_computed:
            pass
        elif sequence.position >= self.room:
            # There is no place for it, so it has no state.
            sequence.rows = sequence.rows if self.options.states == "full" else []
        else:
            batch = Batch()
            batch.add(sequence.tokens[-1], sequence.position, sequence.seq)
            started = time.perf_counter()
            self.context.decode(batch)
            sequence.stats.target_seconds += time.perf_counter() - started
            states = self.context.tapped
            assert states is not None
            row = states.array[0, self.columns].copy()
            sequence.rows = [*(sequence.rows if self.options.states == "full" else []), row]
        held = sequence.text.finish()
        if sequence.pieces:
            sequence.pieces[-1] += held
        self.context.native.memory_remove(sequence.seq, -1, -1)
        if self.drafter is not None:
            self.drafter.reset(sequence.seq)
        self.live.remove(sequence)
        self.free.append(sequence.seq)

    def _states(self, sequence: Prompt, rows: list[NDArray[np.float32]], tokens: list[int]) -> States:
        shape = (len(rows), len(self.columns), self.context._loaded.n_embd)
        array = np.stack(rows) if rows else np.zeros(shape, np.float32)
        array.flags.writeable = False
        ids = np.array(tokens, np.int32)
        ids.flags.writeable = False
        return States(
            array,
            ids,
            self.options.layers,
            n_layer=self.context._loaded.n_layer,
            source=self.context.source,
            details={"rows": self.options.states},
        )

    def _generation(self, sequence: Prompt) -> Generation:
        assert sequence.finish_reason is not None
        states = None
        if self.options.states is not None:
            tokens = sequence.tokens[-1:] if self.options.states == "last" else sequence.tokens
            states = self._states(sequence, sequence.rows, tokens[: len(sequence.rows)])
        return Generation(
            sequence.index,
            sequence.prompt,
            np.array(sequence.tokens, np.int32),
            sequence.text.text,
            sequence.finish_reason,
            states,
            sequence.logprobs if self.options.logprobs is not None else None,
            sequence.stats,
        )

    def _new_events(self, sequence: Prompt) -> Iterator[Event]:
        """Events of tokens that were not given out yet: those whose states are there, where asked for."""
        done = sequence.finish_reason is not None
        full = self.options.states == "full"
        known = len(sequence.rows) if full and not done else len(sequence.tokens)
        while sequence.n_given < known:
            i = sequence.n_given
            sequence.n_given += 1
            last = done and i + 1 == len(sequence.tokens)
            states = None
            if full and i < len(sequence.rows):
                states = self._states(sequence, [sequence.rows[i]], [sequence.tokens[i]])
            elif last and self.options.states == "last" and sequence.rows:
                states = self._states(sequence, sequence.rows, sequence.tokens[-1:])
            yield Event(
                sequence.index,
                sequence.tokens[i],
                sequence.pieces[i],
                states,
                sequence.logprobs[i] if self.options.logprobs is not None else None,
                self._generation(sequence) if last else None,
                sequence.cancel,
            )
