"""Log-probabilities of tokens, from the target's unmodified logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamatap._native import _core, native_of
from llamatap.context import Context
from llamatap.generation.results import TokenLogprobs

__all__ = ["at_outputs", "of_logits"]


def at_outputs(context: Context, first_row: int, tokens: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens, one for each output of the last batch from ``first_row`` on.

    :param n_top: number of most likely tokens to return too, limited to the vocabulary.
    :raises NotFiniteError: the logits contain NaN or infinity.
    """
    ids = np.array(tokens, np.int32)
    return _entries(ids.tolist(), *_core.logprobs(native_of(context), first_row, ids, n_top))


def of_logits(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Log-probability of a token, by float32 ``(n_vocab,)`` logits."""
    (found,) = _entries([token], *_core.logprobs_of(logits, token, n_top))
    return found


def _entries(
    tokens: list[int],
    chosen: NDArray[np.float64],
    top: NDArray[np.int32],
    top_logprobs: NDArray[np.float64],
) -> list[TokenLogprobs]:
    rows = zip(tokens, chosen.tolist(), top.tolist(), top_logprobs.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]
