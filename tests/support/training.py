"""Helpers of the co-training tests: samples of small integers, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamatap as lt
from llamatap.generation.results import Stats
from llamatap.train import DataBuffer, Sample


def states(tokens: Sequence[int], layers: int | None = None, dtype: Any = np.float32) -> NDArray[Any]:
    """Rows that name their token and layer: (11, -11) for token 11, (11 + 100 k, -11) for its layer k."""
    one = np.array([[token, -token] for token in tokens], dtype).reshape(-1, 2)
    if layers is None:
        return one
    found = np.repeat(one[:, None], layers, 1)
    found[:, :, 0] += np.arange(layers, dtype=dtype) * 100
    return found


def sample(
    tokens: Sequence[int], loss_mask: Sequence[int] | None = None, layers: int | None = None, **others: Any
) -> Sample:
    """A sample made by a buffer."""
    buffer = DataBuffer()
    batch: dict[str, Any] = {"input_ids": list(tokens)}
    if loss_mask is not None:
        batch["loss_mask"] = list(loss_mask)
    given = others.pop("hidden_states", states(tokens, layers))
    buffer.add_batch(batch, [given], **others)
    (found,) = buffer.get_all_data()
    return found


def generation(
    prompt: Sequence[int], tokens: Sequence[int], rows: NDArray[Any] | None = None, **others: Any
) -> lt.Generation:
    """A generation as `lt.generate` makes it with states="full" and prompt_states=True, of layers 1 and H_4.

    :param rows: the states of all its tokens; those of :func:`states` unless given.
    """
    if rows is None:
        rows = states([*prompt, *tokens], 2)
    n = len(prompt)
    ids = np.array([*prompt, *tokens], np.int32)
    layers: list[lt.LayerId] = others.pop("layers", [1, 4])
    first, second = (
        lt.States(rows[part], ids[part], layers, n_layer=4, details={"rows": "full"})
        for part in (slice(n), slice(n, None))
    )
    return lt.Generation(0, ids[:n], ids[n:], "", "length", second, first, None, Stats())
