"""Connector to a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numpy.typing import ArrayLike

from llamatap._validate import shown
from llamatap.connectors.connector import Connector, Stored, tensors_of
from llamatap.errors import InvalidInputError
from llamatap.states import States

__all__ = ["CallbackConnector"]


class CallbackConnector(Connector):
    """Connector that calls a function with each sample. Nothing is kept, and nothing can be read.

    :param function: takes the arrays (:data:`Stored`), and the index or None.
    :raises InvalidInputError: it is not a function.
    """

    def __init__(self, function: Callable[[Stored, int | None], object]) -> None:
        if not callable(function):
            raise InvalidInputError(f"function must take arrays and an index, not be {shown(function)}")
        self._function = function

    def put(self, states: States, *, index: int | None = None, loss_mask: ArrayLike | None = None) -> None:
        """See :meth:`Connector.put`. Raises what the function raises."""
        self._function(tensors_of(states, loss_mask), index)

    def get_cached(self, file_idx: int) -> None:
        """Return None: nothing can be read."""

    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> None:
        """Return None: nothing can be read."""
