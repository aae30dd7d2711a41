"""States handed to a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from numpy.typing import ArrayLike

from llamatap._validate import shown
from llamatap.connectors.base import Connector, Stored, tensors_of
from llamatap.errors import InvalidInputError
from llamatap.states import States

__all__ = ["CallbackConnector"]


class CallbackConnector(Connector):
    """Whatever is put is handed to a function at once; nothing is kept, nothing can be read.

    :param function: of the arrays (:data:`Stored`) and the index, or None.
    :raises InvalidInputError: it is none.
    """

    def __init__(self, function: Callable[[Stored, int | None], object]) -> None:
        if not callable(function):
            raise InvalidInputError(f"function must be one of arrays and an index, not {shown(function)}")
        self._function = function

    def put(self, states: States, *, index: int | None = None, loss_mask: ArrayLike | None = None) -> None:
        """See :meth:`Connector.put`. Exceptions of the function are raised."""
        self._function(tensors_of(states, loss_mask), index)

    def get_cached(self, file_idx: int) -> None:
        """None."""

    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> None:
        """None."""
