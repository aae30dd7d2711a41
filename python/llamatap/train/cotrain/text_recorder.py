"""Recorder of a text in flight: its tokens and states, from what a drafter is told of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamatap.states import DTYPES, States, join_states, take_rows

__all__ = ["TextRecorder"]


class TextRecorder:
    """Records the tokens of a text that stay, with the target's states in bfloat16.

    Entries that are followed by :meth:`accept` were the newest token and its draft; the others are the
    prompt's. The last token of a text, which no pass has computed, is not recorded.

    :param max_length: tokens to record.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._parts: list[States] = []
        self._generated: list[bool] = []
        self._n = 0
        # Whether the last part may still lose rows.
        self._open = False
        self._row_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Size of the recorded states."""
        return self._n * self._row_bytes

    def add(self, states: States, rows: Sequence[int], room: int) -> None:
        """Record the entries of a batch.

        :param rows: those of the text, in order of position.
        :param room: bytes that the states may take. Where they do not suffice, the record ends.
        """
        self._row_bytes = row_bytes = 2 * states.array[0].size
        n = min(len(rows), self._max_length - self._n, max(0, room) // row_bytes)
        if n < len(rows):
            # Later tokens would not follow upon the recorded ones.
            self._max_length = self._n + n
        self._open = n > 0
        if self._open:
            self._parts.append(take_rows(states, rows[:n], DTYPES["bfloat16"]))
            self._generated.append(False)
            self._n += n

    def accept(self, n: int) -> None:
        """Keep ``n`` drafted tokens of the last batch, and the token before them."""
        if not self._open:
            return
        last = self._parts[-1]
        if len(last) > n + 1:
            self._n -= len(last) - n - 1
            self._parts[-1] = take_rows(last, range(n + 1))
        self._generated[-1] = True
        self._open = False

    def finish(self) -> tuple[States, NDArray[np.float32]] | None:
        """The sample: states ``(n, n_layers, n_embd)`` in bfloat16, and a loss mask ``(n,)``, 1 for generated
        tokens; None if no generated token follows another token."""
        if self._open and any(self._generated):
            # A pass that failed: nobody knows which of its drafted tokens would have stayed.
            self._parts.pop()
            self._generated.pop()
        if not any(self._generated):
            return None
        states = join_states(self._parts)
        mask = np.concatenate(
            [
                np.full(len(part), own, np.float32)
                for part, own in zip(self._parts, self._generated, strict=True)
            ]
        )
        return (states, mask) if mask[1:].any() else None
