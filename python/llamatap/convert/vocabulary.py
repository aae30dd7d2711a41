"""The draft's vocabulary, and matrices that are the target's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.gguf_files import GgufSource
from llamatap.convert.tensors import Tensors
from llamatap.errors import InvalidInputError

__all__ = ["absolute_ids", "equals_target"]


_ROWS = 4096


def absolute_ids(tensors: Tensors, n_draft_vocab: int, n_vocab: int) -> NDArray[np.int64] | None:
    """The target's id of each row of the head, from a checkpoint's d2t; None where all are there in order.

    :raises InvalidInputError: d2t or t2d is missing, is no such table, or they disagree.
    """
    ids = np.arange(n_draft_vocab, dtype=np.int64)
    if "d2t" in tensors:
        offsets = tensors["d2t"]
        if offsets.shape != ids.shape or not np.issubdtype(offsets.dtype, np.integer):
            raise InvalidInputError(
                f"d2t is {list(offsets.shape)} of {offsets.dtype}, expected [{len(ids)}] of int64 "
                "(draft_vocab_size)"
            )
        ids = ids + offsets
        if ids.min() < 0 or ids.max() >= n_vocab or len(np.unique(ids)) < len(ids):
            raise InvalidInputError(
                f"d2t does not lead to distinct tokens of {n_vocab}: it must hold offsets, so that row i of "
                "the head is token i + d2t[i]"
            )
    elif n_draft_vocab != n_vocab:
        raise InvalidInputError(
            f"the checkpoint lacks d2t, and its head has {n_draft_vocab} rows for {n_vocab} tokens"
        )
    if "t2d" in tensors:
        mask = tensors["t2d"]
        expected = np.zeros(n_vocab, bool)
        expected[ids] = True
        if mask.shape != expected.shape or not np.array_equal(mask.astype(bool), expected):
            raise InvalidInputError(
                "t2d and d2t disagree: t2d must be true for the tokens that d2t leads to, alone"
            )
    return None if len(ids) == n_vocab and np.array_equal(ids, np.arange(len(ids))) else ids


def equals_target(values: NDArray[Any], target: GgufSource, name: str) -> bool:
    """Whether a token embedding or a head is the target's, in its own dtype."""
    if name not in target.names:
        name = "token_embd.weight"
    if name not in target.names or target.n_embd != values.shape[-1]:
        return False
    n_rows = len(target.raw(name).data)
    if n_rows != len(values):
        return False
    # In parts: most differ in the first one, and a whole one may be large.
    return all(
        np.array_equal(
            target.values(name, first, first + _ROWS).astype(values.dtype), values[first : first + _ROWS]
        )
        for first in range(0, n_rows, _ROWS)
    )
