"""A request: its prompt, generated tokens, text, states and statistics, and its events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._engine_context import engine_of
from llamatap.context import Context
from llamatap.drafting.drafter import Draft
from llamatap.generation.results import Event, FinishReason, Generation, Stats, TokenLogprobs
from llamatap.generation.text_stream import TextStream
from llamatap.layers import LayerId
from llamatap.sampler import Sampler
from llamatap.states import States

__all__ = ["NO_DRAFT", "Request", "RequestOptions"]

NO_DRAFT = Draft(np.zeros(0, np.int32))


@dataclass(frozen=True)
class RequestOptions:
    """Checked options of one request, without those of its sampler."""

    max_tokens: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    states: Literal["last", "full"] | None
    prompt_states: bool
    layers: tuple[LayerId, ...]
    on_states: Callable[[Generation], object] | None
    rejection: bool


class Request:
    """A request: a prompt and the tokens generated after it."""

    def __init__(
        self,
        index: int,
        prompt: NDArray[np.int32],
        options: RequestOptions,
        sampler: Sampler,
        text: TextStream,
        capacity: int,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.options = options
        self.sampler = sampler
        self.text = text
        #: Positions in the target's memory that it may take.
        self.capacity = capacity
        self.seq = -1
        #: How many tokens of the prompt the target has decoded.
        self.fed = 0
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        #: One for each token that was fed; None for the first, which follows nothing.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        #: States of generated tokens.
        self.rows: list[NDArray[np.float32]] = []
        #: States of the prompt tokens; only the first ``fed`` rows are filled.
        self.prompt_rows: NDArray[np.float32] | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        #: Position of the newest token. The target has decoded all tokens before it.
        self.position = 0
        self.draft = NO_DRAFT
        #: Number of its entries in the next pass: a piece of the prompt, or the newest token and the draft.
        self.n_rows = 0
        #: Index of its first output in the pass: among all entries, among outputs, and among rows of states.
        self.first_row = 0
        self.first_output = 0
        self.first_state = 0
        self.n_given = 0  # events
        self.finish_reason: FinishReason | None = None
        # Events refer to it, so it must not refer to the context.
        self.cancelled = threading.Event()
        #: Whether a pass of the target has seen the newest token.
        self.last_is_computed = False

    @property
    def feeding(self) -> bool:
        """Whether the request is in prefill: a part of the prompt is still to be decoded."""
        return self.fed < len(self.prompt)

    @property
    def scored(self) -> bool:
        """Whether all prompt tokens are outputs, for their log-probabilities."""
        return self.options.prompt_logprobs is not None

    @property
    def wants_states(self) -> bool:
        """Whether the request wants states of the next pass."""
        return self.options.prompt_states if self.feeding else self.options.states is not None

    def keep_rows(self, states: States, begin: int, end: int) -> None:
        """Keep rows ``[begin, end)`` of a pass, states of the newest tokens: all of them, or the last one."""
        rows = np.take(states.array[begin:end], self._columns(states), axis=1)
        if self.options.states == "full":
            self.rows += list(rows)
        else:
            self.rows = [rows[-1].copy()]

    def keep_prompt_rows(self, states: States, begin: int, end: int) -> None:
        """Keep the states of the newest piece of the prompt, rows ``[begin, end)`` of a pass."""
        columns = self._columns(states)
        n, (n_rows, n_columns, n_embd) = end - begin, states.array.shape
        if n == n_rows == len(self.prompt) and columns == list(range(n_columns)):
            # One pass had the whole prompt and exactly these layers: no copy.
            self.prompt_rows = states.array
            return
        if self.prompt_rows is None:
            self.prompt_rows = np.empty((len(self.prompt), len(columns), n_embd), np.float32)
        piece = self.prompt_rows[self.fed - n : self.fed]
        # Column by column: selecting all at once would make a second copy.
        for i, column in enumerate(columns):
            piece[:, i] = states.array[begin:end, column]

    def _columns(self, states: States) -> list[int]:
        return [states.layers.index(layer) for layer in self.options.layers]

    def flush_text(self) -> None:
        """Release the text that was held back, as part of the newest token if its event was not given yet."""
        held = self.text.finish()
        if self.n_given < len(self.tokens):
            self.pieces[-1] += held
        else:
            self.pieces.append(held)

    def _states(
        self, context: Context, array: NDArray[np.float32], tokens: Sequence[int], rows: str
    ) -> States:
        ids = np.array(tokens, np.int32)
        array.flags.writeable = ids.flags.writeable = False
        return engine_of(context).states(array, ids, self.options.layers, {"rows": rows})

    def _text_states(
        self, context: Context, rows: list[NDArray[np.float32]], tokens: Sequence[int]
    ) -> States | None:
        kind = self.options.states
        if kind is None:
            return None
        array = np.stack(rows) if rows else self._no_rows(context)
        return self._states(context, array, tokens, kind)

    def _no_rows(self, context: Context) -> NDArray[np.float32]:
        return np.zeros((0, len(self.options.layers), engine_of(context).model.n_embd), np.float32)

    def _generation(self, context: Context) -> Generation:
        assert self.finish_reason is not None
        tokens = self.tokens[-1:] if self.options.states == "last" else self.tokens
        prompt_states = None
        if self.options.prompt_states:
            n = self.fed
            array = self._no_rows(context) if self.prompt_rows is None else self.prompt_rows[:n]
            prompt_states = self._states(context, array, self.prompt[:n].tolist(), "prompt")
        return Generation(
            self.index,
            self.prompt,
            np.array(self.tokens, np.int32),
            self.text.text,
            self.finish_reason,
            self._text_states(context, self.rows, tokens[: len(self.rows)]),
            prompt_states,
            self.logprobs if self.options.logprobs is not None else None,
            self.stats,
            self._all_prompt_logprobs(),
        )

    def _all_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        return None if self.options.prompt_logprobs is None else self.prompt_logprobs

    def new_events(self, context: Context) -> Iterator[Event]:
        """Events of tokens that were not given yet; where states were asked for, of those that have them. A
        text that ends without a new token (cancelled, ``max_tokens=0``) gives one event without a token."""
        done = self.finish_reason is not None
        full = self.options.states == "full"
        known = len(self.rows) if full and not done else len(self.tokens)
        if done and self.n_given == known:
            final = self._generation(context)
            first = self._all_prompt_logprobs() if known == 0 else None
            yield Event(self.index, -1, self.pieces[-1], None, None, final, self.cancelled.set, first)
        while self.n_given < known:
            i = self.n_given
            self.n_given += 1
            last = done and i + 1 == len(self.tokens)
            states = None
            if full and i < len(self.rows):
                states = self._text_states(context, [self.rows[i]], [self.tokens[i]])
            elif last and not full and self.rows:
                states = self._text_states(context, self.rows, self.tokens[-1:])
            yield Event(
                self.index,
                self.tokens[i],
                self.pieces[i],
                states,
                self.logprobs[i] if self.options.logprobs is not None else None,
                self._generation(context) if last else None,
                self.cancelled.set,
                self._all_prompt_logprobs() if i == 0 else None,
            )
