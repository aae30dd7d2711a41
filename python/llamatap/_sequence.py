"""A prompt of a generation on its way: its tokens, text, states and statistics, and the events it gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._text import TextStream
from llamatap.context import Context
from llamatap.drafters import Draft
from llamatap.generation import Event, FinishReason, Generation, Stats, TokenLogprobs
from llamatap.layers import LayerId
from llamatap.sampler import Sampler
from llamatap.states import States

__all__ = ["NO_DRAFT", "Options", "Prompt"]

NO_DRAFT = Draft(np.zeros(0, np.int32))


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
        #: How many tokens of the prompt the target has decoded.
        self.fed = 0
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.rows: list[NDArray[np.float32]] = []
        self.stats = Stats(prompt_tokens=len(prompt))
        #: Where the newest token is, or will be: the target has decoded all before it.
        self.position = 0
        self.draft = NO_DRAFT
        #: Its entries in the next pass: of the prompt, or the newest token and the draft.
        self.n_rows = 0
        #: Of its first output in the pass, the number among all entries, and among outputs.
        self.first_row = 0
        self.first_output = 0
        self.n_given = 0  # events
        self.finish_reason: FinishReason | None = None
        # Events keep it: it must not keep the context.
        self.cancelled = threading.Event()
        #: Whether a pass of the target has seen the newest token.
        self.last_is_computed = False

    @property
    def feeding(self) -> bool:
        """Whether a part of the prompt is still to be decoded."""
        return self.fed < len(self.prompt)

    def keep_rows(self, rows: NDArray[np.float32], options: Options) -> None:
        """Take note of states ``(n, n_layers, n_embd)`` of the newest tokens: of all, or of the last one."""
        if options.states == "full":
            self.rows += list(rows)
        else:
            self.rows = list(rows[-1:])

    def flush_text(self) -> None:
        """Let out the text that was held back, with the newest token if nobody has it yet."""
        held = self.text.finish()
        if self.n_given < len(self.tokens):
            self.pieces[-1] += held
        else:
            self.pieces.append(held)

    def _states(
        self, context: Context, options: Options, rows: list[NDArray[np.float32]], tokens: list[int]
    ) -> States:
        shape = (len(rows), len(options.layers), context._loaded.n_embd)
        array = np.stack(rows) if rows else np.zeros(shape, np.float32)
        array.flags.writeable = False
        ids = np.array(tokens, np.int32)
        ids.flags.writeable = False
        return States(
            array,
            ids,
            options.layers,
            n_layer=context._loaded.n_layer,
            source=context.source,
            details={"rows": options.states},
        )

    def _generation(self, context: Context, options: Options) -> Generation:
        assert self.finish_reason is not None
        states = None
        if options.states is not None:
            tokens = self.tokens[-1:] if options.states == "last" else self.tokens
            states = self._states(context, options, self.rows, tokens[: len(self.rows)])
        return Generation(
            self.index,
            self.prompt,
            np.array(self.tokens, np.int32),
            self.text.text,
            self.finish_reason,
            states,
            self.logprobs if options.logprobs is not None else None,
            self.stats,
        )

    def new_events(self, context: Context, options: Options) -> Iterator[Event]:
        """Events of tokens that were not given out yet: those whose states are there, where asked for. Of a
        cancelled text whose tokens are all out, one without a token."""
        done = self.finish_reason is not None
        full = options.states == "full"
        known = len(self.rows) if full and not done else len(self.tokens)
        if done and self.n_given == known:
            final = self._generation(context, options)
            yield Event(self.index, -1, self.pieces[-1], None, None, final, self.cancelled.set)
        while self.n_given < known:
            i = self.n_given
            self.n_given += 1
            last = done and i + 1 == len(self.tokens)
            states = None
            if full and i < len(self.rows):
                states = self._states(context, options, [self.rows[i]], [self.tokens[i]])
            elif last and options.states == "last" and self.rows:
                states = self._states(context, options, self.rows, self.tokens[-1:])
            yield Event(
                self.index,
                self.tokens[i],
                self.pieces[i],
                states,
                self.logprobs[i] if options.logprobs is not None else None,
                self._generation(context, options) if last else None,
                self.cancelled.set,
            )
