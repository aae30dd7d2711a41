"""The drafts of a round: which requests get one, its length limit, and whether it is valid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamatap._engine_context import EngineContext
from llamatap.drafting.draft_length import measured_length, request_limit
from llamatap.drafting.drafter import Draft, Drafter, DraftRequest, checked_drafts
from llamatap.errors import InvalidInputError
from llamatap.generation.request import NO_DRAFT, Request
from llamatap.generation.rollback import Rollback
from llamatap.generation.time_accounting import PhaseTimer

__all__ = ["RoundDrafts"]


class RoundDrafts:
    """Asks the drafter for the drafts of each round.

    :ivar length: the measured length for ``n_max="auto"``, else None.
    """

    def __init__(
        self, engine: EngineContext, drafter: Drafter, rollback: Rollback, timer: PhaseTimer
    ) -> None:
        self._drafter = drafter
        self._rollback = rollback
        self._timer = timer
        self._n_vocab = engine.model.n_vocab
        self._request_limit = request_limit(drafter.n_max)
        self.length = measured_length(drafter.n_max)

    def ask(self, in_flight: Sequence[Request], in_prefill: bool) -> int:
        """Give each request its draft.

        :param in_prefill: whether a request of the round is in prefill.
        :returns: the average number of drafted tokens per request.
        :raises InvalidInputError: the drafter returns no valid draft.
        """
        for request in in_flight:
            request.draft = NO_DRAFT
        asked = self._requests(in_flight, in_prefill)
        if not asked:
            return 0
        drafting = [request for request in in_flight if request.seq in asked]
        for request in drafting:
            request.n_entries = 1
        self._timer.charge("target", drafting)
        drafts = checked_drafts(self._drafter, asked)
        n_drafted = 0
        for request in drafting:
            if draft := drafts.get(request.seq):
                request.draft = self._usable(draft, request.options.rejection)
                n_drafted += len(draft.tokens)
        self._timer.charge("draft", drafting)
        return round(n_drafted / len(drafting))

    def _requests(self, in_flight: Sequence[Request], in_prefill: bool) -> dict[int, DraftRequest]:
        """Draft requests for the texts that may continue after the next token."""
        usable = {
            request.seq: min(
                request.options.max_tokens - len(request.tokens), request.capacity - request.position
            )
            - 1
            for request in in_flight
            if not request.in_prefill
        }
        if not any(n > 0 for n in usable.values()):
            return {}
        limit = self._round_limit(len(in_flight), in_prefill)
        return {
            request.seq: DraftRequest(
                request.tokens[-1],
                request.position,
                min(limit, usable[request.seq]),
                request.sampler.seed,
            )
            for request in in_flight
            if min(limit, usable.get(request.seq, 0)) > 0
        }

    def _round_limit(self, n_in_flight: int, in_prefill: bool) -> int:
        """Limit on the drafts of this round, whatever room a request has."""
        if self.length is None:
            limit = self._request_limit
        elif in_prefill:
            # Rounds with prefill are not measured, so they try no other length.
            limit = self.length.best(n_in_flight)
        else:
            limit = self.length.choose(n_in_flight)
        return self._rollback.cap_draft(limit)

    def _usable(self, draft: Draft, rejection: bool) -> Draft:
        tokens = draft.tokens
        if not (tokens.min() >= 0 and tokens.max() < self._n_vocab):
            raise InvalidInputError(
                f"drafted token ids must be in 0..{self._n_vocab - 1}; found {tokens.tolist()}"
            )
        return Draft(tokens, None, _distributions(draft, self._n_vocab) if rejection else None)


def _distributions(draft: Draft, n_vocab: int) -> NDArray[np.float32]:
    """A draft's distributions, float32 ``(n, n_vocab)``.

    :raises InvalidInputError: they are missing, of the wrong shape, or not probabilities that sum to 1.
    """
    if draft.distributions is None:
        raise InvalidInputError(
            "rejection=True needs drafts with their sampling distributions; drafters with a file give them "
            "at "
            "a temperature above 0"
        )
    found, n = draft.distributions, len(draft.tokens)
    if found.shape != (n, n_vocab):
        raise InvalidInputError(
            f"distributions must have a row of n_vocab={n_vocab} for each of the {n} drafted tokens; "
            f"found the shape {found.shape}"
        )
    sums = found.sum(axis=1)
    # NaN fails both comparisons, infinity the second.
    if not (found.min() >= 0 and np.abs(sums - 1).max() <= 1e-3):
        raise InvalidInputError(
            "distributions must hold probabilities that add up to 1, none negative; found sums of "
            f"{sums.tolist()} and values from {found.min()}"
        )
    return found
