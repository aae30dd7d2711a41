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

    :param folder: the folder to write to.
    :param samples: all samples of the data set; some may turn out to have no finite states.
    :param columns: the layers of the states, in order, in llamatap's numbering.
    :param dtype: dtype of the states, a name of :data:`llamatap.states.DTYPES`.
    :param n_embd: the width of the states.
    :param provenance: the origin of the states; stored in the files.
    """

    #: Name for ``--layout``.
    name: ClassVar[str]
    #: Whether the last column is norm(H_n) rather than H_n, for a model with n blocks.
    last_is_norm: ClassVar[bool] = False
    #: Packages that it needs.
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
        """Bytes of the files of states that exist, or are allocated."""

    @abstractmethod
    def open(self, indices: Iterable[int]) -> None:
        """Create the files and folders for writing, and remove half-written files of a killed run.

        :param indices: the samples that this process writes; other processes may be writing the rest.
        :raises OSError: it cannot be created.
        """

    @abstractmethod
    def written(self) -> NDArray[np.bool_]:
        """The samples that are completely written: bool ``(n_samples,)``."""

    @abstractmethod
    def write(self, index: int, states: NDArray[Any]) -> None:
        """Write a sample atomically. Called by one thread of each process.

        :param states: ``(n_tokens, n_columns, n_embd)``, all finite.
        :raises OSError: it cannot be written.
        """

    def sync(self) -> None:  # noqa: B027  most layouts have nothing to do
        """Make written samples survive a power failure, if their loss would go unnoticed.

        :raises OSError: it cannot be written.
        """

    @abstractmethod
    def finish(self, lost: Sequence[int]) -> None:
        """Write the index of all samples. May be called again after an interruption.

        :param lost: the samples that were not written, because their states are not finite, in order.
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

        :param row: the sample's row of the input, whose number is in the file.
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
                # atomic_path's folder of an unfinished file: .NAME.XXXXXXXX
                name = leftover.name[1:].rpartition(".")[0]
                if folder / name in ours:
                    shutil.rmtree(leftover, ignore_errors=True)

    def written(self) -> NDArray[np.bool_]:
        # A power failure can leave files of the wrong size; a kill cannot.
        sizes = self._sizes.tolist()
        found = np.zeros(len(sizes), np.bool_)
        for index, size in enumerate(sizes):
            with contextlib.suppress(FileNotFoundError):
                found[index] = self.path(index).stat().st_size == size
        return found
