"""Drafting by suffixes: of the text itself, and of all texts before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypedDict

from llamatap._native import _core
from llamatap._options import Option, checked_options, takes_options
from llamatap.drafting.draft_length import MaxTokens, checked_n_max, checked_n_min, numeric_n_max
from llamatap.drafting.native_drafter import NativeDrafter

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SuffixDrafter", "SuffixOptions"]


class SuffixOptions(TypedDict, total=False):
    """Keyword arguments of :class:`SuffixDrafter`."""

    max_bytes: Annotated[
        int,
        Option(
            64 * 2**20,
            "maximum size of the cache; a token takes 90 bytes, or less in text that was there before",
            low=2**16,
            high=2**36,
        ),
    ]
    n_max: Annotated[
        MaxTokens, Option(64, 'maximum number of tokens in a draft, or "auto"', check=checked_n_max)
    ]
    n_min: Annotated[int, Option(1, "shorter drafts are dropped", low=0)]
    p_min: Annotated[
        float,
        Option(
            0.5,
            "a draft ends where it as a whole has a smaller probability, by the frequencies in the cache",
            low=0,
            high=1,
        ),
    ]
    max_spec_factor: Annotated[
        float,
        Option(
            1.0,
            "maximum length of a draft in relation to the length of its match",
            low=0.01,
            high=1e6,
        ),
    ]


@takes_options(SuffixOptions)
class SuffixDrafter(NativeDrafter):
    """Suffix decoding (https://arxiv.org/abs/2411.04975): drafts what followed the longest suffix of the text
    that has occurred before, in this text or in any other since the drafter was made; of several
    continuations the most frequent. It needs no model, and suits texts that repeat themselves, their prompt,
    or the texts of earlier requests (edited code, agents, the same question again).

    The drafter keeps its cache from one generation to the next. Like any drafter it belongs to one generation
    or session at a time, whose sequences share the cache; a second one gets BusyError.

    :options:
    :raises InvalidInputError: a number is out of range.
    """

    draws = False

    def __init__(self, **options: Unpack[SuffixOptions]) -> None:
        chosen = checked_options(SuffixOptions, options, "SuffixDrafter()")
        n_max = chosen["n_max"]
        limit = numeric_n_max(n_max)
        core = _core.suffix_drafter(
            max_bytes=chosen["max_bytes"],
            n_max=limit,
            n_min=checked_n_min(chosen["n_min"], limit),
            p_min=chosen["p_min"],
            max_spec_factor=chosen["max_spec_factor"],
        )
        super().__init__(core, n_max)
