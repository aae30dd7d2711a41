"""Collector: an ``on_states`` callback that puts finished generations through a connector."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap._validate import instance, number, shown
from llamatap.connectors.connector import Connector
from llamatap.errors import InvalidInputError
from llamatap.generation.results import Generation, whole_states
from llamatap.states import DTYPES, States, dtype_name

__all__ = ["Collector"]

#: System errors for a full disk or quota.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
#: Seconds between tries.
_INTERVAL = 0.05


class Collector:
    """Puts each generation through a connector as soon as it is finished. Thread-safe.

    An ``on_states`` callback for :func:`llamatap.generate`, with ``states="full"``, ``prompt_states=True``
    and ``layers``. The samples get the indices 0, 1, 2, ... in the order in which they finish, and replace
    earlier samples with these indices. A sample that cannot be put is dropped, and the other generations
    continue.

    :param connector: the connector.
    :param wait: the seconds that a sample waits for room, which a reader makes with
        :meth:`Connector.delete`, before it is dropped; generation pauses meanwhile.
    :param dtype: dtype that states are converted to; None keeps theirs.
    :raises InvalidInputError: an argument is wrong.
    """

    def __init__(
        self, connector: Connector, *, wait: float = 0.0, dtype: DTypeLike | str | None = "bfloat16"
    ) -> None:
        # Imported here, because reading does not need it.
        from llamatap.dataset.samples import Samples

        instance("connector", connector, Connector)
        # NaN fails the comparison.
        if not number("wait", wait) >= 0:
            raise InvalidInputError(f"wait must be 0 seconds or more, not {shown(wait)}")
        self.connector = connector
        self.wait = float(wait)
        self._dtype = None if dtype is None else DTYPES[dtype_name(dtype)]
        self._samples = Samples()
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, generation: Generation) -> None:
        """Put a generation, or drop it.

        :raises InvalidInputError: a generated token has no state.
        :raises OSError: it cannot be put, for another reason than lack of room.
        """
        instance("generation", generation, Generation)
        states, generated = whole_states(generation, self._dtype)
        with self._lock:
            if reason := self._put(states, generated):
                self._dropped[reason] += 1

    def _put(self, states: States, generated: NDArray[np.float32]) -> str | None:
        """Put a sample. Returns the reason if it was dropped."""
        if not generated[1:].any():
            return "no generated token to predict"
        if states.nonfinite_layers():
            return "NaN or infinity in the states"
        deadline = time.monotonic() + self.wait
        while True:
            try:
                self.connector.put(states, index=len(self._samples), loss_mask=generated)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
            else:
                self._samples.append(len(self._samples), states.tokens, generated == 1)
                return None
            if (left := deadline - time.monotonic()) <= 0:
                return "no room"
            time.sleep(min(left, _INTERVAL))

    def __len__(self) -> int:
        """The number of samples that were put."""
        return len(self._samples)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped samples by reason: "no room", "NaN or infinity in the states", "no generated
        token to predict"."""
        return dict(self._dropped)

    def write_dataset(self, folder: str | os.PathLike[str]) -> None:
        """Write the Arrow data set of the samples that were put so far; replaces an earlier one.

        speculators' ``ArrowDataset`` needs it beside the states: row i has the token ids and the loss mask of
        the sample with index i.

        :param folder: the folder to write to; created if missing.
        :raises InvalidInputError: nothing was put.
        :raises UnsupportedError: pyarrow is not installed.
        :raises OSError: it cannot be written.
        """
        from llamatap.dataset.layouts.arrow_dataset import write_dataset

        with self._lock:
            if not self._samples:
                raise InvalidInputError(f"nothing to write: no sample was put; dropped: {self.dropped}")
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_dataset(Path(folder), self._samples, self._samples.sha256()[:16])
