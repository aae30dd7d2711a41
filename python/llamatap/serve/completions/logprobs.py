"""Log-probabilities in responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from llamatap.generation.results import TokenLogprobs
from llamatap.model import Model
from llamatap.serve.payload import as_array

__all__ = ["finite", "prompt_logprobs", "prompt_logprobs_bytes"]

# Bytes for one token among the log-probabilities of a prompt, from computation to sending: the entry, its
# text, and the JSON of both.
_ENTRY_BYTES = 400


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: OpenAI's substitute for minus infinity."""
    return max(logprob, -9999.0)


def prompt_logprobs_bytes(n_tokens: int, n_top: int) -> int:
    """Maximum memory of the log-probabilities of prompts until they are sent."""
    return n_tokens * (n_top + 1) * _ENTRY_BYTES


def prompt_logprobs(model: Model, found: Sequence[TokenLogprobs | None], n_top: int) -> orjson.Fragment:
    """Log-probabilities of a prompt in vLLM's form: by token id, the prompt's own token first.

    :param n_top: number of most likely tokens to list at each position.
    """
    return as_array(None if one is None else _candidates(model, one, n_top) for one in found)


def _candidates(model: Model, found: TokenLogprobs, n_top: int) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(found.top, 1)}
    candidates = dict(((found.token, found.logprob), *found.top[:n_top]))
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": ranks.get(token),
            "decoded_token": model.token_bytes(token).decode(errors="replace"),
        }
        for token, logprob in candidates.items()
    }
