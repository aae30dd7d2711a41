"""Sampling: choosing tokens from logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from llamatap._native import NativeOwner, _core, native_of
from llamatap._options import Option, checked_options, takes_options
from llamatap._validate import instance, integer, number, shown
from llamatap.context import Context
from llamatap.errors import InvalidInputError
from llamatap.loaded_model import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Sampler", "SamplingOptions"]

# Far below the limit of float32, and far beyond any logit.
_MOST_BIAS = 1e6


class SamplingOptions(TypedDict, total=False):
    """Sampling options: the keyword arguments of :class:`Sampler`, and some of :func:`generate`."""

    temperature: Annotated[float, Option(0.0, "0 takes the most likely token", low=0)]
    top_k: Annotated[int, Option(0, "keep the k most likely tokens; 0 is off", low=0)]
    top_p: Annotated[
        float, Option(1.0, "keep the smallest set whose probability reaches p; 1 is off", above=0, high=1)
    ]
    min_p: Annotated[
        float,
        Option(0.0, "drop tokens less likely than min_p times the most likely one; 0 is off", low=0, high=1),
    ]
    repeat_penalty: Annotated[
        float,
        Option(1.0, "divides (or, when negative, multiplies) the logits of recent tokens; 1 is off", above=0),
    ]
    frequency_penalty: Annotated[float, Option(0.0, "subtracted for each recent occurrence of a token")]
    presence_penalty: Annotated[float, Option(0.0, "subtracted once for a recent token")]
    penalty_last_n: Annotated[
        int, Option(64, "number of tokens that count as recent, at most 2**20", low=0, high=2**20)
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Option(None, "by token id: added to its logit before all else; -infinity excludes a token"),
    ]
    # The engine reads 2**32-1 as "draw a seed", which would not be reproducible.
    seed: Annotated[
        int | None,
        Option(None, "random seed, 0..2**32-2; drawn if not given", low=0, high=2**32 - 2),
    ]


@takes_options(SamplingOptions)
class Sampler(NativeOwner[_core.Sampler]):
    """The engine's sampler chain: logit bias, penalties, top-k, top-p, min-p, temperature, random choice.
    One thread at a time: a second one gets BusyError.

    :param model: the model whose tokens are chosen.
    :options:
    :ivar seed: the given or drawn seed.
    :raises InvalidInputError: a value is out of range, or no number.
    """

    def __init__(self, model: LoadedModel, **options: Unpack[SamplingOptions]) -> None:
        instance("model", model, LoadedModel, "Model")
        chosen: dict[str, Any] = {**checked_options(SamplingOptions, options, "Sampler()")}
        self.seed: int = secrets.randbits(31) if chosen["seed"] is None else chosen["seed"]
        chosen |= {"seed": self.seed, "logit_bias": _biases(model, chosen["logit_bias"])}
        self._native = _core.Sampler(native_of(model), **chosen)

    def _get_native(self) -> _core.Sampler:
        return self._native

    def sample(self, context: Context, row: int = -1) -> int:
        """Sample a token from the logits of an entry of the last batch, and count it for the penalties.

        :param row: which entry; negative ones count from the end of the batch.

        :raises InvalidInputError: as in :meth:`sample_logits`, or there are no such logits.
        :raises BusyError: another thread uses this sampler or the context.
        """
        instance("context", context, Context)
        return self._native.sample(native_of(context), integer("row", row))

    def sample_logits(self, logits: NDArray[np.float32]) -> int:
        """Sample a token from float32 ``(n_vocab,)`` logits, and count it for the penalties.

        :raises InvalidInputError: another length or dtype; NaN or infinity among them, or
            -infinity throughout; or they overflow when divided by the temperature.
        :raises BusyError: another thread uses this sampler.
        """
        instance("logits", logits, np.ndarray)
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise InvalidInputError(f"logits must be contiguous float32, not {logits.dtype}")
        return self._native.sample_logits(logits)

    def accept(self, token: int) -> None:
        """Count a token that was not sampled here, e.g. of the prompt, for the penalties."""
        self._native.accept(integer("a token id", token))

    def reset(self) -> None:
        """Start again: no recent tokens, random numbers from the seed."""
        self._native.reset()


def _biases(model: LoadedModel, given: Mapping[int, float] | None) -> list[tuple[int, float]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"logit_bias must map token ids to numbers, not be {shown(given)}")
    found = []
    for token, bias in given.items():
        index = integer("a token id of logit_bias", token, 0, model.n_vocab - 1)
        value = number(f"the logit_bias of token {index}", bias)
        # Not NaN either.
        if not (abs(value) <= _MOST_BIAS or value == -math.inf):
            raise InvalidInputError(
                f"the logit_bias of token {index} must be in -{_MOST_BIAS:g}..{_MOST_BIAS:g}, or -inf, which "
                f"excludes it, not {value}"
            )
        found.append((index, value))
    return found
