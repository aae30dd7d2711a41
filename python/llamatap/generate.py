"""Generating text: continuous batches, with or without a drafter, the same tokens either way."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap._check import flag, integer
from llamatap._native import _core, flush_log
from llamatap._prompts import Input, is_single, prompt_tokens
from llamatap._text import TextStream
from llamatap.context import Batch, Context
from llamatap.drafters import Draft, Drafter, DraftRequest, as_drafter, new_length
from llamatap.errors import ContextFullError, EngineError, InvalidInputError, UnsupportedError
from llamatap.generation import Event, FinishReason, Generation, Stats, TokenLogprobs
from llamatap.layers import LayerId
from llamatap.model import Model, token_array
from llamatap.sampler import Sampler
from llamatap.states import States

__all__ = ["generate"]

_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
# The most sequences of a context that is made for a model.
_MOST_SEQUENCES = 8


@dataclass(frozen=True)
class _Options:
    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    states: Literal["last", "full"] | None
    layers: tuple[LayerId, ...]
    rejection: bool


class _Sequence:
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


class _Run:
    """One call of :func:`generate`."""

    def __init__(
        self, context: Context, waiting: Iterable[_Sequence], drafter: Drafter | None, options: _Options
    ) -> None:
        self.context = context
        self.drafter = drafter
        self.options = options
        self.waiting = deque(waiting)
        self.live: list[_Sequence] = []
        self.free = list(range(context.n_seq_max))[::-1]
        self.length = None if drafter is None else new_length(drafter)
        needed = () if drafter is None else drafter.target_layers
        wanted = () if options.states is None else options.layers
        self.layers = tuple(dict.fromkeys((*needed, *wanted)))
        self.columns = [self.layers.index(layer) for layer in wanted]
        model = context._loaded
        #: Whether the memory can give up the end of a sequence: always, for as many tokens, or never.
        self.rewinds: Literal["any", "some", "none"] = "any"
        if model.is_recurrent or model.is_hybrid:
            self.rewinds = "some" if context.n_rs_seq > 0 else "none"
        elif not context.swa_full and model.n_swa > 0:
            self.rewinds = "none"

    def events(self) -> Iterator[Event]:
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
            for sequence in left:
                if self.drafter is not None:
                    self.drafter.reset(sequence.seq)
            flush_log()

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
        longest = self.length.choose() if self.length is not None else 2**31 - 1
        if self.rewinds == "some":
            longest = min(longest, self.context.n_rs_seq)
        requests = {}
        for sequence in self.live:
            room = min(self.options.max_tokens - len(sequence.tokens), sequence.capacity - sequence.position)
            n_max = min(longest, room - 1)
            if n_max > 0 and not sequence.fresh:
                requests[sequence.seq] = DraftRequest(sequence.tokens[-1], sequence.position, n_max)
        if not requests:
            return 0
        started = time.perf_counter()
        drafts = drafter.draft(requests)
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
            distributions = np.ascontiguousarray(distributions[:n_max], np.float32)
        return Draft(tokens, None, distributions)

    def _parts(self) -> list[list[_Sequence]]:
        """The sequences of each pass: all in one."""
        if self.rewinds != "some" or len({len(one.draft.tokens) for one in self.live}) == 1:
            return [self.live]
        # The engine cuts sequences of different length into several ubatches, and takes back in the last
        # alone.
        return [[one] for one in self.live]

    def _pass(self, sequences: Sequence[_Sequence]) -> None:
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

    def _verify(self, sequence: _Sequence, states: States | None) -> int:
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

    def _ends(self, sequence: _Sequence, token: int) -> bool:
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

    def _take_back(self, sequence: _Sequence, n_accepted: int, saved: bytes | None) -> None:
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

    def _finish(self, sequence: _Sequence) -> None:
        """What is left to do when the last token is known."""
        is_computed = sequence.last_is_computed or sequence.finish_reason == "context"
        if self.options.states is not None and not is_computed:
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

    def _states(self, sequence: _Sequence, rows: list[NDArray[np.float32]], tokens: list[int]) -> States:
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

    def _generation(self, sequence: _Sequence) -> Generation:
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

    def _new_events(self, sequence: _Sequence) -> Iterator[Event]:
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


def _in_order(events: Iterator[Event], n_prompts: int) -> Iterator[Generation]:
    done: dict[int, Generation] = {}
    upcoming = 0
    for event in events:
        if event.final is not None:
            done[event.index] = event.final
        while upcoming in done:
            yield done.pop(upcoming)
            upcoming += 1
    assert upcoming == n_prompts


def _strings(name: str, values: str | Iterable[str]) -> tuple[str, ...]:
    found = (values,) if isinstance(values, str) else tuple(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise InvalidInputError(f"{name} must be a str or a list of them, none empty; found {value!r}")
    return found


def _pieces(model: Model) -> Callable[[int], bytes]:
    native = model.native
    try:
        native.piece(0, False)
    except UnsupportedError:
        return lambda token: b""
    return lambda token: native.piece(token, False)


def _context_for(model: Model, prompts: Sequence[NDArray[np.int32]], max_tokens: int) -> Context:
    n_seq_max = min(len(prompts), _MOST_SEQUENCES) if model.native.batches_sequences else 1
    longest = sorted((len(prompt) for prompt in prompts), reverse=True)[:n_seq_max]
    return model.context(n_ctx=sum(longest) + n_seq_max * max_tokens, n_seq_max=n_seq_max)


@overload
def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: object = None,
    *,
    max_tokens: int = ...,
    temperature: float = ...,
    top_k: int = ...,
    top_p: float = ...,
    min_p: float = ...,
    repeat_penalty: float = ...,
    frequency_penalty: float = ...,
    presence_penalty: float = ...,
    penalty_last_n: int = ...,
    seed: int | None = ...,
    stop: str | Iterable[str] = ...,
    stop_tokens: Iterable[int] = ...,
    ignore_eos: bool = ...,
    logprobs: int | None = ...,
    states: Literal["last", "full"] | None = ...,
    layers: Iterable[LayerId] | LayerId = ...,
    rejection: bool = ...,
    stream: Literal[False] = ...,
) -> Iterator[Generation]: ...


@overload
def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: object = None,
    *,
    max_tokens: int = ...,
    temperature: float = ...,
    top_k: int = ...,
    top_p: float = ...,
    min_p: float = ...,
    repeat_penalty: float = ...,
    frequency_penalty: float = ...,
    presence_penalty: float = ...,
    penalty_last_n: int = ...,
    seed: int | None = ...,
    stop: str | Iterable[str] = ...,
    stop_tokens: Iterable[int] = ...,
    ignore_eos: bool = ...,
    logprobs: int | None = ...,
    states: Literal["last", "full"] | None = ...,
    layers: Iterable[LayerId] | LayerId = ...,
    rejection: bool = ...,
    stream: Literal[True],
) -> Iterator[Event]: ...


def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: object = None,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    penalty_last_n: int = 64,
    seed: int | None = None,
    stop: str | Iterable[str] = (),
    stop_tokens: Iterable[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    states: Literal["last", "full"] | None = None,
    layers: Iterable[LayerId] | LayerId = (-1,),
    rejection: bool = False,
    stream: bool = False,
) -> Iterator[Generation] | Iterator[Event]:
    """Generate text after prompts, all at once: prompts enter as others end, and one decode of the target
    serves all of them.

    :param model_or_context: a context with an empty memory, which is empty again afterwards; or a model,
        which gets a context of its own, sized to the work.
    :param prompts: a str, token ids, or a list of either.
    :param drafter: a :class:`Drafter` (several in a list are asked in turn), or a function from token ids to
        those that may follow, such as llama-cpp-python's draft models. The tokens are the same without one:
        the target chooses every token itself, and a draft is used as far as it is equal. That is exact where
        the engine's results do not depend on how many tokens it computes at once (float32 weights on a CPU);
        elsewhere near-ties may fall the other way.
    :param max_tokens: of each prompt, a stop token included.
    :param temperature: 0 takes the most likely token. This and the others up to ``penalty_last_n``: as of
        :class:`Sampler`; penalties see the prompt too.
    :param seed: of the random numbers; each prompt has its own, from this and its index. None draws one.
    :param stop: strings that end a text; they are not part of it.
    :param stop_tokens: tokens that end a text, besides the model's own end-of-generation tokens.
    :param ignore_eos: go on after end-of-generation tokens.
    :param logprobs: how many of the most likely tokens to report at each; None for no log-probabilities.
    :param states: the target's states of the generated tokens, from the same passes: of each (``"full"``), or
        of the last (``"last"``). Only the final token, which no pass has computed, costs one more decode.
        None at the end of a full context.
    :param layers: which states, as of :meth:`Context.tap`.
    :param rejection: accept drafted tokens by rejection sampling, for drafters that draw their tokens
        (``temperature`` of theirs above 0): the same distribution, other tokens, more of them accepted.
    :param stream: give an :class:`Event` for each token as it comes, rather than a :class:`Generation` for
        each prompt, in the order of the prompts.
    :raises InvalidInputError: an argument is wrong, the context holds tokens, or a drafter gives what is
        none.
    :raises ContextFullError: a prompt is longer than the context.
    :raises UnsupportedError: the model generates no text.

    A generation ends with the iterator: ``close()``, or leaving a loop, frees the memory. What a drafter
    raises comes out, and the context can be used again.
    """
    chosen = as_drafter(drafter)
    if not isinstance(model_or_context, (Model, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, Model) else model_or_context.model
    if states not in (None, "last", "full"):
        raise InvalidInputError(f"states must be 'last', 'full' or None, not {states!r}")
    options = _Options(
        integer("max_tokens", max_tokens, 1),
        _strings("stop", stop),
        tuple(integer("a stop token", token, 0) for token in stop_tokens),
        flag("ignore_eos", ignore_eos),
        None if logprobs is None else integer("logprobs", logprobs, 0, 1024),
        states,
        layer_ids.normalize(layers, model.n_layer),
        flag("rejection", rejection),
    )
    flag("stream", stream)
    inputs = cast("Sequence[Input]", [prompts] if is_single(prompts) else prompts)
    texts = [prompt_tokens(model, prompt, None) for prompt in inputs]
    if isinstance(model_or_context, Context):
        context = model_or_context
    else:
        context = _context_for(model, texts, options.max_tokens)
    spec = getattr(chosen, "spec", None)
    if spec is not None and spec.target is not context:
        raise InvalidInputError("the drafter was made for another context; give generate() its target")
    native = context.native
    if not native.has_memory or not native.causal:
        raise UnsupportedError(f"{model.arch} models do not generate text")
    for seq in range(context.n_seq_max):
        if native.memory_last(seq) >= 0:
            raise InvalidInputError(
                f"sequence {seq} of the context holds tokens; generation needs an empty memory "
                "(memory.clear())"
            )
    room = min(native.n_ctx_seq, native.position_limit)
    base = secrets.randbits(31) if seed is None else integer("seed", seed, 0, 2**32 - 2)
    piece = _pieces(model)
    sequences = []
    for index, tokens in enumerate(texts):
        if len(tokens) > room:
            raise ContextFullError(
                f"prompt {index} has {len(tokens)} tokens; the context has room for {room} (n_ctx)"
            )
        sampler = Sampler(
            model,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=penalty_last_n,
            # Far apart, so that no prompt has the numbers of another one's with a seed nearby.
            seed=(base + index * 0x9E3779B1) % (2**32 - 1),
        )
        if (repeat_penalty, frequency_penalty, presence_penalty) != (1.0, 0.0, 0.0):
            for token in tokens[-penalty_last_n:].tolist():
                sampler.accept(token)
        capacity = min(len(tokens) + options.max_tokens, room)
        sequences.append(_Sequence(index, tokens, sampler, TextStream(piece, options.stop), capacity))
    events = _Run(context, sequences, chosen, options).events()
    return events if stream else _in_order(events, len(sequences))
