"""Choosing tokens from logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from llamatap._native import NativeOwner, _core, native_of
from llamatap._validate import instance, integer, number, shown
from llamatap.context import Context
from llamatap.errors import InvalidInputError
from llamatap.loaded_model import LoadedModel

__all__ = ["Sampler", "SamplerOptions"]

# Far from where float32 ends, and far beyond any logit.
_MOST_BIAS = 1e6


class SamplerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Sampler`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float] | None
    seed: int | None


class Sampler(NativeOwner[_core.Sampler]):
    """The engine's sampler chain: logit bias, penalties, top-k, top-p, min-p, temperature, draw.
    One thread at a time: a second one gets BusyError.

    :param temperature: 0 takes the most likely token.
    :param top_k: keep the k most likely; 0 is off.
    :param top_p: keep the smallest set whose probability reaches p; 1 is off.
    :param min_p: drop what is less likely than min_p times the most likely; 0 is off.
    :param repeat_penalty: divides (or, when negative, multiplies) the logits of recent tokens; 1 is off.
    :param frequency_penalty: subtracted for each recent occurrence.
    :param presence_penalty: subtracted once for a recent token.
    :param penalty_last_n: how many tokens are recent, 2**20 at most.
    :param logit_bias: by token id, what is added to its logit before all else; -infinity rules a token out.
    :param seed: of the random numbers, 0..2**32-2; None draws one (:attr:`seed` tells).
    :raises InvalidInputError: a value is out of range, or no number.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        penalty_last_n: int = 64,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
    ) -> None:
        instance("model", model, LoadedModel, "Model")
        # The engine reads 2**32-1 as "draw a seed", which would not be reproducible.
        self.seed = secrets.randbits(31) if seed is None else integer("seed", seed, 0, 2**32 - 2)
        self._native = _core.Sampler(
            native_of(model),
            temperature=number("temperature", temperature),
            top_k=integer("top_k", top_k),
            top_p=number("top_p", top_p),
            min_p=number("min_p", min_p),
            repeat_penalty=number("repeat_penalty", repeat_penalty),
            frequency_penalty=number("frequency_penalty", frequency_penalty),
            presence_penalty=number("presence_penalty", presence_penalty),
            penalty_last_n=integer("penalty_last_n", penalty_last_n),
            seed=self.seed,
            logit_bias=_biases(model, logit_bias),
        )

    def _get_native(self) -> _core.Sampler:
        return self._native

    def sample(self, context: Context, row: int = -1) -> int:
        """Draw a token from the logits of an entry of the last batch, and take note of it.

        :raises InvalidInputError: as :meth:`sample_logits`, or there are no such logits.
        :raises BusyError: another thread uses this sampler or the context.
        """
        instance("context", context, Context)
        return self._native.sample(native_of(context), integer("row", row))

    def sample_logits(self, logits: NDArray[np.float32]) -> int:
        """Draw a token from float32 ``(n_vocab,)`` logits, and take note of it.

        :raises InvalidInputError: another length or dtype; NaN or infinity among them, or
            -infinity throughout; or they overflow when divided by the temperature.
        :raises BusyError: another thread uses this sampler.
        """
        instance("logits", logits, np.ndarray)
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise InvalidInputError(f"logits must be contiguous float32, not {logits.dtype}")
        return self._native.sample_logits(logits)

    def accept(self, token: int) -> None:
        """Take note of a token that was not drawn here, e.g. of the prompt."""
        self._native.accept(integer("a token id", token))

    def reset(self) -> None:
        """Back to the start: no tokens noted, random numbers from the seed."""
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
                f"rules it out, not {value}"
            )
        found.append((index, value))
    return found
