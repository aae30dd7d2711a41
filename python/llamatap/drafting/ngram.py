"""Drafting by n-grams of the text itself."""

from __future__ import annotations

from llamatap._native import _core
from llamatap._validate import integer
from llamatap.drafting.draft_length import MaxTokens, checked_n_min, numeric_n_max
from llamatap.drafting.native_drafter import NativeDrafter

__all__ = ["NGramDrafter"]


class NGramDrafter(NativeDrafter):
    """Drafts the tokens that followed the last occurrence of the newest n-gram in the sequence. It needs no
    model, and suits texts that repeat themselves or their prompt (edited code, summaries, translations).

    :param n_longest: length of the longest n-gram to search for; the longest match is used.
    :param n_shortest: length of the shortest n-gram to search for.
    :param n_max: maximum number of tokens in a draft, or "auto".
    :param n_min: shorter drafts are dropped.
    :raises InvalidInputError: a number is out of range.
    """

    draws = False

    def __init__(
        self,
        n_longest: int = 4,
        n_shortest: int = 2,
        *,
        n_max: MaxTokens = 8,
        n_min: int = 1,
    ) -> None:
        limit = numeric_n_max(n_max)
        core = _core.ngram_drafter(
            n_longest=integer("n_longest", n_longest, 1, 64),
            n_shortest=integer("n_shortest", n_shortest, 1, 64),
            n_max=limit,
            n_min=checked_n_min(n_min, limit),
        )
        super().__init__(core, n_max)
