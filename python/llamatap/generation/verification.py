"""Verification: the target's own tokens, and how many drafted tokens match them."""

from __future__ import annotations

import numpy as np

from llamatap._engine_context import engine_of
from llamatap._native import _core, native_of
from llamatap.context import Context
from llamatap.drafting.draft_length import DraftLength
from llamatap.drafting.drafter import Drafter
from llamatap.errors import InvalidInputError, NotFiniteError
from llamatap.generation import logprobs
from llamatap.generation.request import Request
from llamatap.generation.time_accounting import PhaseTimer
from llamatap.states import States

__all__ = ["Verifier"]


class Verifier:
    """Verifies the drafts of a pass: samples the target's tokens, and appends them to the requests.

    :param length: is told of each draft's acceptance.
    """

    def __init__(
        self, context: Context, drafter: Drafter | None, length: DraftLength | None, timer: PhaseTimer
    ) -> None:
        self._context = context
        self._engine = engine_of(context)
        self._drafter = drafter
        self._length = length
        self._timer = timer

    def verify(self, request: Request, states: States | None) -> int:
        """Verify the request's draft in the last pass and append the chosen tokens.

        :param states: the states that were tapped in the pass.
        :returns: the number of accepted drafted tokens.
        :raises NotFiniteError: the logits hold NaN or infinity.
        """
        was_prompt = not request.tokens
        tokens, n_accepted = self._sample(request)
        if was_prompt:
            request.position = len(request.prompt)
        else:
            request.position += len(tokens) if len(tokens) == n_accepted else n_accepted + 1
        n_new = self._append(request, tokens)
        self._timer.charge("sampling", [request])
        if not was_prompt:
            self._settle(request, states, n_accepted, n_new)
        if request.finish_reason is None and request.position >= request.capacity:
            request.finish_reason = "context"
        return n_accepted

    def score_prompt(self, request: Request) -> None:
        """Record the log-probabilities of prompt tokens, each from the logits of the token before it."""
        n_top = request.options.prompt_logprobs
        assert n_top is not None
        begin = request.n_prefilled - request.n_entries
        tokens = request.prompt[begin + 1 : request.n_prefilled + 1].tolist()
        first_row = request.first_row + 1 - request.n_entries
        request.prompt_logprobs += logprobs.at_outputs(self._context, first_row, tokens, n_top)
        self._timer.charge("sampling", [request])

    def _sample(self, request: Request) -> tuple[list[int], int]:
        """The target's tokens, and how many of them are accepted drafted ones."""
        options, draft = request.options, request.draft
        try:
            return _core.verify(
                self._engine.native,
                native_of(request.sampler),
                request.first_row,
                draft.tokens,
                draft.distributions,
                not options.ignore_eos,
                list(options.stop_tokens),
            )
        except InvalidInputError as error:
            rows = range(request.first_row, request.first_row + len(draft.tokens) + 1)
            # -infinity excludes a token.
            if all((self._context.logits(row) < np.inf).all() for row in rows):
                raise
            raise NotFiniteError(str(error)) from None

    def _append(self, request: Request, tokens: list[int]) -> int:
        """Append tokens up to the end of the text, with their text and log-probabilities. Returns their
        number."""
        before = len(request.tokens)
        for token in tokens:
            request.tokens.append(token)
            if self._ends(request, token):
                break
        if request.options.logprobs is not None:
            request.logprobs += logprobs.at_outputs(
                self._context, request.first_row, request.tokens[before:], request.options.logprobs
            )
        request.stats.tokens = len(request.tokens)
        return len(request.tokens) - before

    def _ends(self, request: Request, token: int) -> bool:
        """Append the text of the newest token. Returns whether the token ends the generation."""
        options = request.options
        is_stop = token in options.stop_tokens or (
            not options.ignore_eos and self._engine.model.is_end_of_generation(token)
        )
        request.pieces.append("" if is_stop else request.text.push(token))
        if is_stop or request.text.stopped:
            request.finish_reason = "stop"
        elif len(request.tokens) >= options.max_tokens:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _settle(self, request: Request, states: States | None, n_accepted: int, n_new: int) -> None:
        """Record the outcome of a draft: statistics, states of the decoded tokens, the drafter.

        :param n_new: number of appended tokens; fewer than the accepted ones if the text ended before.
        """
        n_kept = min(n_accepted, n_new)
        request.newest_is_decoded = n_new <= n_accepted
        # Drafted tokens after the end of the text were not verified.
        n_verified = n_kept if request.newest_is_decoded else len(request.draft.tokens)
        request.stats.count(n_verified, n_kept)
        if self._length is not None and n_verified:
            self._length.observe(n_verified, n_kept)
        if request.options.states is not None and states is not None:
            # The rows of the token before the draft, and of the accepted tokens.
            first = request.first_state
            request.kept.keep_generated(states, first, first + n_kept + 1)
            self._timer.charge("target", [request])
        if self._drafter is not None:
            self._drafter.accept(request.seq, n_accepted)
            self._timer.charge("draft", [request])
