"""A request: its prompt, its progress, and its generated tokens and text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap.drafting.drafter import Draft
from llamatap.generation.kept_states import KeptStates
from llamatap.generation.results import FinishReason, Generation, Stats, TokenLogprobs
from llamatap.generation.text_stream import TextStream
from llamatap.layers import LayerId
from llamatap.sampler import Sampler

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
    """A request: a prompt and the tokens generated after it.

    :param index: number of the prompt in results and events.
    :param prompt: int32 ``(n,)``.
    :param text: the text of the generated tokens.
    :param capacity: positions in the target's memory that it may take.
    """

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
        self.capacity = capacity
        # Progress.
        #: Its sequence id while it is in flight, else -1.
        self.seq = -1
        #: Number of prompt tokens that the target has decoded.
        self.n_prefilled = 0
        #: Position of the newest token. The target has decoded all tokens before it.
        self.position = 0
        #: Whether a pass of the target has seen the newest token.
        self.newest_is_decoded = False
        self.finish_reason: FinishReason | None = None
        # Events refer to it, so it must not refer to the context.
        self.cancelled = threading.Event()
        # Results.
        self.tokens: list[int] = []
        self.text = text
        #: The text that each token completes.
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        #: One for each decoded token of the prompt; None for the first, which has no predecessor.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.kept = KeptStates(options.states, options.layers, len(prompt))
        self.stats = Stats(prompt_tokens=len(prompt))
        #: Number of tokens reported in events.
        self.n_given = 0
        # The current round.
        self.draft = NO_DRAFT
        #: Number of its entries in the next pass: a chunk of the prompt, or the newest token and the draft.
        self.n_entries = 0
        #: Entry of its first output in the pass: the newest token, or the last token of the prompt's chunk.
        self.first_row = 0
        #: Row of that entry among the pass's states.
        self.first_state = 0

    @property
    def in_prefill(self) -> bool:
        """Whether a part of the prompt is not decoded yet."""
        return self.n_prefilled < len(self.prompt)

    @property
    def n_prompt_left(self) -> int:
        """Number of prompt tokens not decoded yet."""
        return len(self.prompt) - self.n_prefilled

    @property
    def scores_prompt(self) -> bool:
        """Whether all prompt tokens are outputs, for their log-probabilities."""
        return self.options.prompt_logprobs is not None

    @property
    def wants_states(self) -> bool:
        """Whether the request needs states of the next pass."""
        return self.options.prompt_states if self.in_prefill else self.options.states is not None

    @property
    def lacks_last_state(self) -> bool:
        """Whether states were requested, and no pass has seen the newest token."""
        return self.options.states is not None and len(self.tokens) > 0 and not self.newest_is_decoded

    def flush_text(self) -> None:
        """Release the held-back text, as part of the newest token if its event was not reported yet."""
        held_back = self.text.finish()
        if self.n_given < len(self.tokens):
            self.pieces[-1] += held_back
        else:
            self.pieces.append(held_back)
