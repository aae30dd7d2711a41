"""Results of generation: texts, events, statistics."""

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
    """Log-probabilities at the place of a token: of a softmax over the target's logits as they are, before
    ``logit_bias``, penalties, temperature and the rest.

    :ivar token: the token that was chosen, or is in the prompt.
    :ivar logprob: its own (natural logarithm).
    :ivar top: the most likely ones, (token, log-probability), falling.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Stats:
    """How a text came about.

    :ivar prompt_tokens: tokens of the prompt.
    :ivar tokens: tokens that were generated.
    :ivar rounds: target passes after the prompt's own; each gives a token and what is accepted of a draft.
    :ivar drafted: tokens that were drafted and verified; not those after the end of a text inside of a draft.
    :ivar accepted: those that became part of the text.
    :ivar drafted_at: by position in the draft: how often one was verified there.
    :ivar accepted_at: by position: how often one was accepted.
    :ivar target_seconds: in the target's passes and with its memory; what several texts share is split by
        their tokens in it.
    :ivar draft_seconds: in the drafter, its processing of the target's batches included; split in the same
        way.
    :ivar sampling_seconds: choosing tokens from logits, and making texts of them. All time is in one of the
        three, but for what the caller takes between events.
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
        """Acceptance length: tokens a round, 1.0 without a draft; nan before the first round."""
        return (self.tokens - 1) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance(self) -> float:
        """accepted / drafted; nan when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """By position in the draft: of the drafts at least that long, the share accepted up to there."""
        return [
            accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)
        ]

    def count(self, drafted: int, accepted: int) -> None:
        """Note a round in which so many drafted tokens were verified."""
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
    """A text generated after a prompt, finished: tokens, text, and how it came about.

    :ivar index: which prompt.
    :ivar prompt: int32 ``(n_prompt,)``: its tokens.
    :ivar tokens: int32 ``(n,)``: what was generated, a stop token included.
    :ivar text: its text, without the stop token or string.
    :ivar finish_reason: why it ended: "stop", "length", "context" or "cancelled".
    :ivar states: where asked for: the target's states of the generated tokens, one row each (``"full"``), or
        of the last one (``"last"``). At the end of a full context there is no place for the last token, and
        its row is missing.
    :ivar prompt_states: where asked for: the target's states of the prompt's tokens, one row each; of a
        prompt that was cancelled before all of it was computed, of those that were.
    :ivar logprobs: where asked for, one for each token.
    :ivar stats: how it came about.
    :ivar prompt_logprobs: where asked for, one for each token of the prompt: None for the first one, which
        follows nothing; of a prompt that was cancelled before all of it was computed, of those that were.
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
    """The states of a text in one piece, of its prompt (where they were asked for) and of what was generated.

    :param dtype: what the states are converted to; None keeps them.
    :returns: a copy of the states, ``(n, n_layers, n_embd)``, and for each of their tokens 1 where it was
        generated, else 0: float32 ``(n,)``.
    :raises InvalidInputError: the generation has no state of each generated token.
    """
    states = generation.states
    if states is None or captured_rows(states) != "full":
        raise InvalidInputError(
            "there is no state of each generated token; generate with states='full' (and prompt_states=True)"
        )
    parts = [one for one in (generation.prompt_states, states) if one is not None]
    whole = join_states(parts, dtype)
    generated = np.ones(len(whole), np.float32)
    generated[: len(whole) - len(states)] = 0
    return whole, generated


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A generated token, as it comes.

    :ivar index: which prompt.
    :ivar token: the token; -1 in the last event of a cancelled text whose tokens were all given out (or that
        never had any), and in the only one with ``max_tokens=0``, which have none.
    :ivar text: the text that it completes: whole characters, and nothing that may yet turn out to be a stop
        string. The texts of a prompt's events join to :attr:`Generation.text`.
    :ivar states: the target's states of the token, one row, where asked for (with ``"last"``, of the last
        token alone). They are computed a round after the token, and the event waits for them.
    :ivar logprobs: where asked for.
    :ivar final: of a prompt's last event: all of its generation.
    :ivar prompt_logprobs: in a prompt's first event, where asked for: as of :class:`Generation`.
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
        """End this prompt's generation: what its last round gave still comes, and then an event with
        :attr:`final`. Without ``states`` no pass of the target is made for it any more."""
        self._cancel()
