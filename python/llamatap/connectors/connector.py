"""Connector: base class of places where states are put and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap._validate import instance
from llamatap.errors import InvalidInputError
from llamatap.generation.results import Generation, whole_states
from llamatap.states import States
from llamatap.train.batch_to_samples import read_mask

__all__ = ["Connector", "Stored", "tensors_of"]

#: Arrays of a sample: "hidden_states" ``(n, n_layers, n_embd)``, "token_ids" int64 ``(n,)`` and, if it was
#: given, "loss_mask" float32 ``(n,)``. To other libraries: :class:`llamatap.connectors.DLPackArray`.
Stored = dict[str, NDArray[Any]]


class Transfer(TypedDict):
    """Parameters with which a reader finds a sample; JSON can hold them.

    :ivar handle: the handle for :meth:`Connector.delete`.
    :ivar hidden_states_path: the same, under speculators' name.
    """

    handle: str
    hidden_states_path: str


class Connector(ABC):
    """A place where one process puts states, and another one, or the same, reads them.

    The methods for reading have the names of ``hs_connectors.HiddenStatesTransfer``.
    """

    def setup(self) -> None:
        """Prepare for reading; called in the process that reads. A second call does nothing."""
        return

    @abstractmethod
    def put(
        self, states: States, *, index: int | None = None, loss_mask: ArrayLike | None = None
    ) -> Transfer | None:
        """Put the states of a text.

        :param index: the index of the sample in a data set, for :meth:`get_cached`; replaces an earlier
            sample with this index. None for a sample that is found only by the returned value.
        :param loss_mask: ``(n,)``: 1 for tokens to learn, else 0.
        :returns: parameters for :meth:`get_generated`; None if the connector cannot be read.
        :raises InvalidInputError: the states are pooled, contain NaN or infinity, or the mask does not fit.
        :raises OSError: there is no room.
        """

    def put_generation(self, generation: Generation, *, index: int | None = None) -> Transfer | None:
        """Put the states of a generation, prompt and text in one sample. Its loss mask holds the generated
        tokens.

        :raises InvalidInputError: a generated token has no state.
        """
        instance("generation", generation, Generation)
        states, generated = whole_states(generation)
        return self.put(states, index=index, loss_mask=generated)

    @abstractmethod
    def get_cached(self, file_idx: int) -> Stored | None:
        """Read the sample of this index; None if there is none."""

    @abstractmethod
    def get_generated(self, hs_transfer_params: Mapping[str, object]) -> Stored | None:
        """Read the sample that :meth:`put` returned these parameters for; None if it is gone."""

    def delete(self, handle: str) -> None:
        """Delete a sample. Arrays already read from it stay valid. A second call does nothing."""
        return


def tensors_of(states: States, loss_mask: ArrayLike | None) -> Stored:
    """The arrays of a sample, with the names that trainers read.

    :raises InvalidInputError: see :meth:`Connector.put`.
    """
    instance("states", states, States)
    if states.array.ndim != 3:
        raise InvalidInputError("states must have a row for each token; extract without pool=")
    if layers := states.nonfinite_layers():
        raise InvalidInputError(f"NaN or infinity in layers {layers}: nothing was put; see lt.probe")
    found: Stored = {"hidden_states": states.array, "token_ids": states.tokens.astype(np.int64)}
    if loss_mask is not None:
        found["loss_mask"] = read_mask("loss_mask", loss_mask, len(states))
    return found
