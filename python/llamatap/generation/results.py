"""Results of generation: texts, events, statistics, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.states import States, captured_rows, join_states

__all__ = ["Event", "FinishReason", "Generation", "Stats", "TokenLogprobs", "whole_states"]

#: "stop": an end-of-generation or stop token, or a stop string; "length": max_tokens; "context": no room
#: left; "cancelled": :meth:`Event.cancel`, :meth:`Session.cancel`.
FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the position of a token: a softmax over the target's unmodified logits, before
    ``logit_bias``, penalties and temperature.

    :ivar token: the chosen token, or the prompt's.
    :ivar logprob: its log-probability (natural logarithm).
    :ivar top: the most likely tokens, (token, log-probability), most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Stats:
    """Statistics of one generated text.

    :ivar prompt_tokens: tokens of the prompt.
    :ivar tokens: generated tokens.
    :ivar rounds: target passes after the prefill; each gives a token and the accepted tokens of a draft.
    :ivar drafted: tokens that were drafted and verified; if a text ends inside a draft, not those after it.
    :ivar accepted: drafted tokens that became part of the text.
    :ivar drafted_at: number of verified tokens by position in the draft.
    :ivar accepted_at: number of accepted tokens by position in the draft.
    :ivar target_seconds: seconds of the target's passes and memory operations; a pass of several texts is
        split by their tokens in it.
    :ivar draft_seconds: seconds of the drafter, including its processing of the target's batches; split in
        the same way.
    :ivar sampling_seconds: seconds of sampling and detokenising. Together the three are all the time except
        what the caller spends between events.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    sampling_seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Acceptance length: tokens per round, 1.0 without drafts; nan before the first round."""
        return (self.tokens - 1) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance(self) -> float:
        """accepted / drafted; nan when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance by draft position: the share of drafts at least that long that were accepted up to
        it."""
        return [
            accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)
        ]

    def count(self, drafted: int, accepted: int) -> None:
        """Count a round with ``drafted`` verified tokens, ``accepted`` of them accepted."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = drafted - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for i in range(drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The finished text of a prompt: tokens, text, states and statistics. Fields that were not requested are
    None.

    :ivar index: index of the prompt.
    :ivar prompt: int32 ``(n_prompt,)``: tokens of the prompt.
    :ivar tokens: int32 ``(n,)``: the generated tokens, including a stop token.
    :ivar text: their text, without the stop token or string.
    :ivar finish_reason: why the text ended: "stop", "length", "context" or "cancelled".
    :ivar states: the target's states of the generated tokens, one row each (``"full"``), or of the last one
        (``"last"``). At the end of a full context the last token does not fit, and its row is missing.
    :ivar prompt_states: the target's states of the prompt's tokens, one row each; after a cancellation during
        prefill, only of the tokens that were computed.
    :ivar logprobs: one for each generated token.
    :ivar stats: the statistics.
    :ivar prompt_logprobs: one for each token of the prompt: None for the first one, which has no predecessor;
        after a cancellation during prefill, only of the tokens that were computed.
    """

    index: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    text: str
    finish_reason: FinishReason
    states: States | None
    prompt_states: States | None
    logprobs: list[TokenLogprobs] | None
    stats: Stats
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def whole_states(
    generation: Generation, dtype: np.dtype[Any] | None = None
) -> tuple[States, NDArray[np.float32]]:
    """Join the states of a text: of its prompt (if requested) and of its generated tokens.

    :param dtype: convert the states to it; None keeps theirs.
    :returns: a copy of the states, ``(n, n_layers, n_embd)``, and a mask of the generated tokens: float32
        ``(n,)``, 1 where a token was generated, else 0.
    :raises InvalidInputError: the generation has no state of each generated token.
    """
    states = generation.states
    if states is None or captured_rows(states) != "full":
        raise InvalidInputError(
            "there is no state of each generated token; generate with states='full' (and prompt_states=True)"
        )
    whole = join_states([part for part in (generation.prompt_states, states) if part is not None], dtype)
    generated = np.ones(len(whole), np.float32)
    generated[: len(whole) - len(states)] = 0
    return whole, generated


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A generated token, as soon as it is known. Fields that were not requested are None.

    :ivar index: index of the prompt.
    :ivar token: the token; -1 in an event without one: the last event of a cancelled text whose tokens were
        all reported (or that never had any), and the only event with ``max_tokens=0``.
    :ivar text: the text that the token completes: whole characters, without what may become a stop string.
        The texts of a prompt's events concatenate to :attr:`Generation.text`.
    :ivar states: the target's states of the token, one row (with ``"last"``, only of the last token). They
        are computed in the round after the token, and the event waits for them.
    :ivar logprobs: log-probabilities at the token.
    :ivar final: in a prompt's last event, the whole generation.
    :ivar prompt_logprobs: in a prompt's first event, as in :class:`Generation`.
    """

    index: int
    token: int
    text: str
    states: States | None
    logprobs: TokenLogprobs | None
    final: Generation | None
    _cancel: Callable[[], None] = field(repr=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def cancel(self) -> None:
        """End this prompt's generation. The events of its current round still come, and then one with
        :attr:`final`. Without ``states`` the target makes no further pass for it."""
        self._cancel()
