"""Rotary embeddings: order of the rows of q and k, and the scaling of frequencies.

Checkpoints of transformers rotate the pairs (j, j + d/2) of a head of width d. GGUF files of architectures
with the engine's NORM rope (llama, eagle3) rotate neighbours (2j, 2j+1) and hold the rows of q and k in that
order; those with NEOX rope (mimo2, qwen3, dflash) hold them as the checkpoints do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.settings import Settings
from llamatap.errors import InvalidInputError

__all__ = ["Rope", "read_rope", "rope_config", "to_halves", "to_neighbours"]


def to_neighbours(rows: NDArray[Any], n_head: int) -> NDArray[Any]:
    """Rows of q or k (n_head * d, ...) from the pairs (j, j + d/2) to neighbours (2j, 2j+1)."""
    return _swapped(rows, n_head, 2, rows.shape[0] // n_head // 2)


def to_halves(rows: NDArray[Any], n_head: int) -> NDArray[Any]:
    """Rows of q or k (n_head * d, ...) from neighbours (2j, 2j+1) to the pairs (j, j + d/2)."""
    return _swapped(rows, n_head, rows.shape[0] // n_head // 2, 2)


def _swapped(rows: NDArray[Any], n_head: int, first: int, second: int) -> NDArray[Any]:
    parts = rows.reshape(n_head, first, second, *rows.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(rows.shape))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a block.

    :ivar base: base of the frequencies.
    :ivar kind: "default" (unscaled), "linear", or "llama3".
    :ivar factor: how much longer the context became.
    :ivar low, high: frequency factors of llama3.
    :ivar original: context before the scaling, of llama3.
    """

    base: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original: int = 0

    def divisors(self, width: int) -> NDArray[np.float32] | None:
        """What each of the width/2 frequencies is divided by: the engine's ``rope_freqs``; None where
        there is no such tensor.

        Llama 3.1 divides low frequencies by the factor, leaves high ones alone, and blends between.
        """
        if self.kind != "llama3":
            return None
        frequencies = self.base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        turns = self.original * frequencies / (2 * math.pi)
        span = self.high - self.low
        share = np.clip((turns - self.low) / span, 0, 1) if span else (turns >= self.low).astype(np.float64)
        return (1 / ((1 - share) / self.factor + share)).astype(np.float32)


def _read_scaling(settings: Settings, base: float) -> Rope:
    """The rope of an object of scaling parameters."""
    kind = settings.text("rope_type", settings.text("type", "default"))
    settings.only("type", kind)
    settings.only("partial_rotary_factor", 1.0, 1)
    if kind == "default":
        # Writers leave the factors of other kinds there, which this one does not read.
        settings.only("factor", 1.0, 1)
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", settings.number("factor"))
    if kind == "llama3":
        return Rope(
            base,
            "llama3",
            settings.number("factor"),
            settings.number("low_freq_factor"),
            settings.number("high_freq_factor"),
            settings.integer("original_max_position_embeddings"),
        )
    settings.refuse(
        "rope_type" if "rope_type" in settings else "type", "default, linear and llama3 are known"
    )
    settings.skip(*settings.names)
    return Rope(base)


def read_rope(settings: Settings) -> Rope:
    """The rope of a config.json: ``rope_parameters`` of transformers 5, or ``rope_theta`` and
    ``rope_scaling`` of version 4, or both if they agree.

    :raises InvalidInputError: an entry is missing or of another type, or both disagree.
    """
    old_base = settings.number("rope_theta", 10000.0)
    has_old_base = "rope_theta" in settings
    scaling = settings.inner("rope_scaling")
    found = []
    if "rope_parameters" in settings:
        new = settings.inner("rope_parameters")
        found.append(_read_scaling(new, new.number("rope_theta", old_base)))
        settings.refused += new.rest()
    if "rope_scaling" in settings or not found:
        base = found[0].base if found and not has_old_base else old_base
        scaling.skip("rope_theta")
        found.append(_read_scaling(scaling, base))
        settings.refused += scaling.rest()
    if found[0] != found[-1] or (has_old_base and found[0].base != old_base):
        raise InvalidInputError(
            "config.json has two ropes that disagree: rope_parameters, and rope_theta or rope_scaling"
        )
    return found[0]


def rope_config(rope: Rope) -> dict[str, Any]:
    """The entries of a config.json for this rope, as transformers 4 and 5 read it."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original,
        }
    return {
        "rope_theta": rope.base,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.base, **scaling},
    }
