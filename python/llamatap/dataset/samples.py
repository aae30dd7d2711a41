"""Samples: token ids with a loss mask, before any state is computed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Samples", "TokenSample"]


@dataclass(frozen=True)
class TokenSample:
    """A sample to compute. :class:`llamatap.train.Sample` has states as well.

    :ivar row: its row of the input, from 0.
    :ivar tokens: int32 ``(n,)``.
    :ivar loss_mask: bool ``(n,)``: the tokens that the loss is computed on.
    """

    row: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class Samples(Sequence[TokenSample]):
    """A list of samples in flat arrays, 5 bytes per token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._mask = array("b")
        self._offsets = array("q", [0])
        self._rows = array("q")

    def append(self, row: int, tokens: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> None:
        """Add a copy of a sample."""
        self._tokens.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
        self._mask.frombytes(np.ascontiguousarray(loss_mask, np.int8).tobytes())
        self._offsets.append(len(self._tokens))
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        part = slice(self._offsets[index], self._offsets[index + 1])
        tokens = np.array(self._tokens[part], np.int32)
        return TokenSample(self._rows[index], tokens, np.array(self._mask[part], np.bool_))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, int64 ``(n,)``."""
        offsets = self.offsets
        return offsets[1:] - offsets[:-1]

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of the input of each sample, int64 ``(n,)``."""
        return np.array(self._rows, np.int64)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """The first token of each sample in the concatenation of all, and the end: int64 ``(n + 1,)``."""
        return np.array(self._offsets, np.int64)

    @property
    def n_tokens(self) -> int:
        """The number of tokens of all samples."""
        return len(self._tokens)

    def sha256(self) -> str:
        """Hash of rows, tokens and masks."""
        digest = hashlib.sha256()
        for part in (self._rows, self._offsets, self._tokens, self._mask):
            digest.update(part)
        return digest.hexdigest()
