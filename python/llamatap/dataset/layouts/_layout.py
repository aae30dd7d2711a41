"""Base class of the file layouts of a data set."""

from __future__ import annotations

import contextlib
import functools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.samples import Samples
from llamatap.layers import LayerId
from llamatap.states import DTYPES

__all__ = ["FilePerSample", "Layout"]


class Layout(ABC):
    """The files of one data set.

    :param folder: where they lie.
    :param samples: all of the data set's samples, of which some may turn out to have no finite states.
    :param columns: the layers of the states, in order, as llamatap counts.
    :param dtype: of the states, a name of :data:`llamatap.states.DTYPES`.
    :param n_embd: the width of the states.
    :param provenance: where the states come from; goes into the files.
    """

    #: As ``--layout`` names it.
    name: ClassVar[str]
    #: Whether the last column is norm(H_n) rather than H_n, for a model with n blocks.
    last_is_norm: ClassVar[bool] = False
    #: Packages that must be installed for it.
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        folder: Path,
        samples: Samples,
        columns: Sequence[LayerId],
        dtype: str,
        n_embd: int,
        provenance: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self.samples = samples
        self.columns = tuple(columns)
        self.dtype = dtype
        self.n_embd = n_embd
        self.provenance = dict(provenance)
        self.item_bytes: int = DTYPES[dtype].itemsize

    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes of the files of states when all samples are written."""

    @abstractmethod
    def n_bytes_there(self) -> int:
        """Bytes of the files of states that are there, or have their room already."""

    @abstractmethod
    def open(self, indices: Iterable[int]) -> None:
        """Make what must be there before samples are written, and remove what a killed run left half written.

        :param indices: the samples that this process writes; others may be writing the rest.
        :raises OSError: it cannot be made.
        """

    @abstractmethod
    def written(self) -> NDArray[np.bool_]:
        """Mask of the samples that are completely written: bool ``(n_samples,)``."""

    @abstractmethod
    def write(self, index: int, states: NDArray[Any]) -> None:
        """Write a sample, whole or not at all: called by one thread of each process.

        :param states: ``(n_tokens, n_columns, n_embd)``, all finite.
        :raises OSError: it cannot be written.
        """

    def sync(self) -> None:  # noqa: B027  not all have something to do
        """Have what this process wrote survive a power failure of this machine, where one would not show.

        :raises OSError: it cannot be written.
        """

    @abstractmethod
    def finish(self, lost: Sequence[int]) -> None:
        """Write what tells of all samples; may be called again after it was interrupted.

        :param lost: the samples that have no finite states and were not written, in order.
        :raises OSError: it cannot be written.
        """


class FilePerSample(Layout):
    """A layout with a file for each sample."""

    @abstractmethod
    def path(self, index: int) -> Path:
        """The file of a sample."""

    @abstractmethod
    def size(self, n_tokens: int, row: int) -> int:
        """Bytes of a file.

        :param row: the sample's row of the input, whose digits are in it.
        """

    def n_bytes(self) -> int:
        return int(self._sizes.sum())

    def n_bytes_there(self) -> int:
        return int(self._sizes[self.written()].sum())

    @functools.cached_property
    def _sizes(self) -> NDArray[np.int64]:
        known: dict[tuple[int, int], int] = {}
        sizes = np.zeros(len(self.samples), np.int64)
        for index, (n_tokens, row) in enumerate(
            zip(self.samples.lengths.tolist(), self.samples.rows.tolist(), strict=True)
        ):
            key = (n_tokens, len(str(row)))
            if key not in known:
                known[key] = self.size(n_tokens, row)
            sizes[index] = known[key]
        return sizes

    def open(self, indices: Iterable[int]) -> None:
        ours = {self.path(index) for index in indices}
        for folder in {path.parent for path in ours}:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*"):
                # atomic_path's folder of a file that is not whole yet: .NAME.XXXXXXXX
                name = leftover.name[1:].rpartition(".")[0]
                if folder / name in ours:
                    shutil.rmtree(leftover, ignore_errors=True)

    def written(self) -> NDArray[np.bool_]:
        # A power failure can leave files of the wrong size, though not a kill.
        sizes = self._sizes.tolist()
        found = np.zeros(len(sizes), np.bool_)
        for index, size in enumerate(sizes):
            with contextlib.suppress(FileNotFoundError):
                found[index] = self.path(index).stat().st_size == size
        return found
