"""The states that a request keeps of the target's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamatap._engine_context import EngineContext
from llamatap.layers import LayerId
from llamatap.states import States

__all__ = ["KeptStates"]


class KeptStates:
    """States of a request's prompt and generated tokens, copied from the target's passes.

    :param kind: which generated tokens to keep states of: all of them ("full"), the last one, or none.
    :param layers: the layers to keep.
    :param n_prompt: tokens of the prompt.
    :ivar generated: ``(n_layers, n_embd)`` of each generated token, or of the last.
    """

    def __init__(
        self, kind: Literal["last", "full"] | None, layers: tuple[LayerId, ...], n_prompt: int
    ) -> None:
        self._kind = kind
        self._layers = layers
        self._n_prompt = n_prompt
        self.generated: list[NDArray[np.float32]] = []
        # Filled row by row as the prompt is decoded.
        self._prompt: NDArray[np.float32] | None = None

    def keep_generated(self, states: States, begin: int, end: int) -> None:
        """Keep rows ``[begin, end)`` of a pass: those of the newest generated tokens."""
        rows = np.take(states.array[begin:end], self._columns(states), axis=1)
        if self._kind == "full":
            self.generated += list(rows)
        else:
            self.generated = [rows[-1].copy()]

    def keep_prompt(self, states: States, begin: int, end: int, n_prefilled: int) -> None:
        """Keep rows ``[begin, end)`` of a pass: the last of the ``n_prefilled`` first tokens of the
        prompt."""
        columns = self._columns(states)
        n, (n_rows, n_columns, n_embd) = end - begin, states.array.shape
        if n == n_rows == self._n_prompt and columns == list(range(n_columns)):
            # One pass had the whole prompt and exactly these layers: no copy.
            self._prompt = states.array
            return
        if self._prompt is None:
            self._prompt = np.empty((self._n_prompt, len(columns), n_embd), np.float32)
        piece = self._prompt[n_prefilled - n : n_prefilled]
        # Column by column: selecting all at once would make a second copy.
        for i, column in enumerate(columns):
            piece[:, i] = states.array[begin:end, column]

    def omit_last(self) -> None:
        """Record that the last generated token has no state; drops the rows if only that one was
        requested."""
        if self._kind != "full":
            self.generated = []

    def states_of_prompt(self, engine: EngineContext, tokens: NDArray[np.int32]) -> States:
        """The states of the decoded tokens of the prompt."""
        array = self._no_rows(engine) if self._prompt is None else self._prompt[: len(tokens)]
        return self._states(engine, array, tokens.tolist(), "prompt")

    def states_of_generated(
        self, engine: EngineContext, rows: Sequence[NDArray[np.float32]], tokens: Sequence[int]
    ) -> States | None:
        """States of generated tokens, from their rows; None if no states were requested."""
        if self._kind is None:
            return None
        array = np.stack(rows) if rows else self._no_rows(engine)
        return self._states(engine, array, tokens, self._kind)

    def _columns(self, states: States) -> list[int]:
        return [states.layers.index(layer) for layer in self._layers]

    def _no_rows(self, engine: EngineContext) -> NDArray[np.float32]:
        return np.zeros((0, len(self._layers), engine.model.n_embd), np.float32)

    def _states(
        self, engine: EngineContext, array: NDArray[np.float32], tokens: Sequence[int], rows: str
    ) -> States:
        ids = np.array(tokens, np.int32)
        array.flags.writeable = ids.flags.writeable = False
        return engine.states(array, ids, self._layers, {"rows": rows})
