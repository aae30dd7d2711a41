"""Acceptance of a draft file, measured by drafting in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.drafting.model_drafters import load_drafter
from llamatap.generation.api import generate
from llamatap.model import Model

__all__ = ["EngineAcceptance", "measure_in_engine"]


@dataclass(frozen=True, slots=True)
class EngineAcceptance:
    """Greedy drafting on some prompts.

    :ivar tokens_per_round: acceptance length: tokens after each text's first, by target passes.
    :ivar by_position: share of the drafts that long that were accepted up to there, by position.
    :ivar tokens: generated tokens.
    """

    tokens_per_round: float
    by_position: tuple[float, ...]
    tokens: int


def measure_in_engine(
    model: Model,
    draft: Path,
    prompts: Sequence[NDArray[np.int32]],
    n_max: int,
    max_tokens: int,
    **context: Any,
) -> EngineAcceptance:
    """Generate greedily after some prompts with a draft file.

    :param n_max: draft length in tokens.
    :param max_tokens: maximum number of tokens after each prompt.
    :param context: options of the target's context.
    """
    n_ctx = max(len(prompt) for prompt in prompts) + max_tokens
    drafted, accepted = np.zeros(n_max), np.zeros(n_max)
    tokens = rounds = 0
    with model.context(n_ctx=n_ctx, **context) as target:
        drafter = load_drafter(target, draft, n_max=n_max)
        with drafter.spec:
            for found in generate(target, list(prompts), drafter, max_tokens=max_tokens):
                stats = found.stats
                rounds += stats.rounds
                tokens += stats.tokens
                drafted[: len(stats.drafted_at)] += stats.drafted_at
                accepted[: len(stats.accepted_at)] += stats.accepted_at
    shares = tuple(float(x) for x in accepted / np.maximum(drafted, 1))
    return EngineAcceptance((tokens - len(prompts)) / max(rounds, 1), shares, tokens)
