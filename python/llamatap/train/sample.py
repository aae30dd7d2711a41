"""Sample of training: tokens, a loss mask, and the target's states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.layers import LayerId

__all__ = ["TrainingSample"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """A text to train on, with its states. :class:`llamatap.dataset.Sample` has no states yet.

    :ivar input_ids: int64 ``(n,)``.
    :ivar loss_mask: float32 ``(n,)``: 1 for tokens to learn (those of a response), else 0.
    :ivar hidden_states: the target's states of the tokens: ``(n, n_embd)`` of one layer, ``(n, n_layers,
        n_embd)`` of several, the last of which is the one to predict; float32, float16 or bfloat16. None if
        they are missing.
    :ivar layers: the layers of the states, as in :class:`llamatap.States`; None if unknown.
    :ivar step: the step in which it was added.
    :ivar finite: whether the states hold neither NaN nor infinity.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    hidden_states: NDArray[Any] | None
    layers: tuple[LayerId, ...] | None
    step: int
    finite: bool
