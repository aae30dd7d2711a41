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
    """Log-probabilities at the position of a token, by a softmax over the target's logits as they are, before
    ``logit_bias``, penalties, temperature and the rest.

    :ivar token: the token that was chosen, or is in the prompt.
    :ivar logprob: its log-probability (natural logarithm).
    :ivar top: the most likely tokens, (token, log-probability), most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Stats:
    """Statistics of the generation of a text.

    :ivar prompt_tokens: tokens of the prompt.
    :ivar tokens: tokens that were generated.
    :ivar rounds: target passes after the prefill; each gives a token and the accepted tokens of a draft.
    :ivar drafted: tokens that were drafted and verified; where a text ends inside a draft, not those after.
    :ivar accepted: drafted tokens that became part of the text.
    :ivar drafted_at: by position in the draft, how many tokens were verified there.
    :ivar accepted_at: by position in the draft, how many tokens were accepted there.
    :ivar target_seconds: seconds of the target's passes and of work on its memory; a pass of several texts is
        split by their tokens in it.
    :ivar draft_seconds: seconds of the drafter, its processing of the target's batches included; split in the
        same way.
    :ivar sampling_seconds: seconds of choosing tokens from logits and making text of them. Together the three
        are all the time but what the caller spends between events.
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
        """Acceptance by position: of the drafts at least that long, the share accepted up to there."""
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
    """The finished text of a prompt: tokens, text, states, and statistics. Fields that were not asked for are
    None.

    :ivar index: index of the prompt.
    :ivar prompt: int32 ``(n_prompt,)``: tokens of the prompt.
    :ivar tokens: int32 ``(n,)``: the generated tokens, a stop token included.
    :ivar text: their text, without the stop token or string.
    :ivar finish_reason: why the text ended: "stop", "length", "context" or "cancelled".
    :ivar states: the target's states of the generated tokens, one row each (``"full"``), or of the last one
        (``"last"``). At the end of a full context there is no place for the last token, and its row is
        missing.
    :ivar prompt_states: the target's states of the prompt's tokens, one row each; after a cancellation during
        prefill, only of the tokens that were computed.
    :ivar logprobs: one for each generated token.
    :ivar stats: the statistics.
    :ivar prompt_logprobs: one for each token of the prompt: None for the first one, which follows nothing;
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
    """Join the states of a text: those of its prompt (where they were asked for) and of its generated tokens.

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
    """A generated token, as it comes. Fields that were not asked for are None.

    :ivar index: index of the prompt.
    :ivar token: the token; -1 in an event without one: the last event of a cancelled text whose tokens were
        all given out (or that never had any), and the only event with ``max_tokens=0``.
    :ivar text: the text that the token completes: whole characters, and nothing that may yet turn out to be a
        stop string. The texts of a prompt's events join to :attr:`Generation.text`.
    :ivar states: the target's states of the token, one row (with ``"last"``, only of the last token). They
        are computed a round after the token, and the event waits for them.
    :ivar logprobs: log-probabilities at the token.
    :ivar final: in a prompt's last event, the whole generation.
    :ivar prompt_logprobs: in a prompt's first event, as of :class:`Generation`.
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
        """End this prompt's generation. The events of its last round still come, and then one with
        :attr:`final`. Without ``states`` the target makes no further pass for it."""
        self._cancel()
