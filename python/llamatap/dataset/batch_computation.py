"""Computing batches of samples and writing them, in this process or a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._system_limits import require_memory
from llamatap.dataset.background_writer import BackgroundWriter
from llamatap.dataset.batch_journal import BatchJournal
from llamatap.dataset.folder import DatasetFolder
from llamatap.dataset.layouts import Layout
from llamatap.dataset.options import DatasetOptions
from llamatap.errors import InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.layers import LayerId
from llamatap.states import States

__all__ = ["BatchComputation", "nonfinite_reason"]


@dataclass(frozen=True)
class BatchComputation:
    """Batches to compute, and where to write them. Can be pickled for a worker.

    :ivar layout: writes samples; it is open.
    :ivar folder: records samples without finite states.
    :ivar options: the options of the data set.
    :ivar extraction: options of the extractor.
    :ivar batches: lists of the indices of samples that are computed together.
    :ivar done: the samples that are written or lost already: bool ``(n_samples,)``.
    :ivar n_layer: the number of blocks of the model.
    """

    layout: Layout
    folder: DatasetFolder
    options: DatasetOptions
    extraction: Mapping[str, Any]
    batches: Sequence[Sequence[int]]
    done: NDArray[np.bool_]
    n_layer: int

    @property
    def journal(self) -> BatchJournal:
        """The journal of batches that are computed and not yet written."""
        return self.folder.journal

    def compute(
        self,
        extractor: Extractor,
        part: Iterable[Sequence[int]],
        wrote: Callable[[Sequence[int]], None],
    ) -> None:
        """Compute batches, and write the samples of them that are missing.

        :param part: some of the batches.
        :param wrote: called after each batch with the samples that were written.
        :raises InvalidInputError: ``on_error`` is "stop" and the states of a sample are not finite.
        :raises OutOfMemoryError: the states of the batches that are computed and not yet written do not fit
            into memory; nothing was computed.
        :raises OSError: they cannot be written.
        """
        part = list(part)
        self._require_memory(part)
        journal = self.journal

        def written(indices: Sequence[int]) -> None:
            journal.drop(indices[0])
            wrote(indices)

        with BackgroundWriter(self._write, written, self.options.queue) as writer:
            for batch in part:
                missing = [index for index in batch if not self.done[index]]
                if not missing:
                    continue
                writer.reserve()
                # The whole batch is computed, because rounding depends on what is computed together.
                tokens = [self.layout.samples[index].tokens for index in batch]
                found = extractor(tokens, self.layout.columns, dtype=self.layout.dtype)
                states = dict(zip(batch, found, strict=True))
                kept = [(index, states[index]) for index in missing]
                journal.keep(kept)
                writer.put(kept)

    def _require_memory(self, part: Sequence[Sequence[int]]) -> None:
        lengths = self.layout.samples.lengths
        largest = max((int(lengths[list(batch)].sum()) for batch in part), default=0)
        n_batches = min(self.options.queue, len(part))
        row_bytes = len(self.layout.columns) * self.layout.n_embd * self.layout.item_bytes
        require_memory(
            n_batches * largest * row_bytes,
            f"the states of batches of up to {largest:,} tokens, {n_batches} at once (queue), take",
            "take a smaller queue, batch_tokens or max_length, or fewer layers",
        )

    def recover(self) -> int:
        """Write the batches that a killed run left in the journal. Returns the number of samples written.

        :raises InvalidInputError: ``on_error`` is "stop" and the states of a sample are not finite.
        :raises OSError: they cannot be written.
        """
        columns = self.layout.columns
        ours = {index for batch in self.batches for index in batch}
        n_written = 0
        for batch in self.journal.batches():
            if batch[0][0] not in ours:
                # Another worker's batch, which it may be writing now.
                continue
            for index, array in batch:
                if self.done[index]:
                    continue
                tokens = self.layout.samples[index].tokens
                self._write(index, States(array, tokens, columns, n_layer=self.n_layer))
                self.done[index] = True
                n_written += 1
            self.journal.drop(batch[0][0])
        return n_written

    def _write(self, index: int, states: States) -> None:
        layers = states.nonfinite_layers()
        if not layers:
            self.layout.write(index, states.array)
            return
        reason = nonfinite_reason(layers, self.layout.dtype)
        if self.options.on_error == "stop":
            raise InvalidInputError(f"row {self.layout.samples.rows[index]}: {reason}")
        self.folder.mark_lost(index, reason)


def nonfinite_reason(layers: Sequence[LayerId], dtype: str) -> str:
    """The reason why states with NaN or infinity are not written.

    :param layers: the layers that contain them.
    """
    reason = f"NaN or infinity in layers {list(layers)} ({dtype})"
    return reason + ": float16 ends at 65504, take bfloat16" if dtype == "float16" else reason
