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
from llamatap.connectors.base import Connector
from llamatap.errors import InvalidInputError
from llamatap.generation.results import Generation, whole_states
from llamatap.states import DTYPES, States, dtype_name

__all__ = ["Collector"]

#: Errors of the system for a full disk or quota.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
#: Seconds between tries.
_INTERVAL = 0.05


class Collector:
    """Puts each generation as its text ends: to be given to :func:`llamatap.generate` as ``on_states``, with
    ``states="full"``, ``prompt_states=True`` and ``layers``. They have the indices 0, 1, 2, ..., in that
    order; what had them before is replaced. A sample that cannot be put is dropped, and the other texts go
    on. Any thread may call it.

    :param connector: where they are put.
    :param wait: for how many seconds a sample waits for room, which a reader makes with
        :meth:`Connector.delete`; no text goes on meanwhile. After that it is dropped. 0: at once.
    :param dtype: what states are converted to; None keeps them.
    :raises InvalidInputError: an argument is wrong.
    """

    def __init__(
        self, connector: Connector, *, wait: float = 0.0, dtype: DTypeLike | str | None = "bfloat16"
    ) -> None:
        # Imported here: not needed for reading alone.
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

        :raises InvalidInputError: it has no state of each generated token.
        :raises OSError: it cannot be put for another reason than that there is no room.
        """
        instance("generation", generation, Generation)
        states, generated = whole_states(generation, self._dtype)
        with self._lock:
            if reason := self._put(states, generated):
                self._dropped[reason] += 1

    def _put(self, states: States, generated: NDArray[np.float32]) -> str | None:
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
        """How many were put."""
        return len(self._samples)

    @property
    def dropped(self) -> dict[str, int]:
        """How many were not put, by reason: "no room", "NaN or infinity in the states", "no generated token
        to predict"."""
        return dict(self._dropped)

    def write_dataset(self, folder: str | os.PathLike[str]) -> None:
        """Write the data set of what was put so far, which speculators' ``ArrowDataset`` needs beside the
        states: token ids and loss masks, of the row i those of the index i. Another time it is replaced.

        :param folder: is made where it is not there.
        :raises InvalidInputError: nothing was put.
        :raises UnsupportedError: pyarrow is not installed.
        :raises OSError: it cannot be written.
        """
        from llamatap.dataset.layouts._arrow import write_dataset

        with self._lock:
            if not self._samples:
                raise InvalidInputError(
                    f"there is nothing to write: no sample was put; dropped: {self.dropped}"
                )
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_dataset(Path(folder), self._samples, self._samples.sha256()[:16])
