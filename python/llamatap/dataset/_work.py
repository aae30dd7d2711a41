"""Work on a data set: batches, extraction, writing. The same in whichever process it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._native import native_of
from llamatap._system_limits import require_memory
from llamatap.dataset._computed import Computed
from llamatap.dataset._folder import Folder
from llamatap.dataset._writer import Writer
from llamatap.dataset.layouts import Layout
from llamatap.dataset.options import Options
from llamatap.dataset.samples import Preparation
from llamatap.errors import InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.extraction.packing import batch_sequence_limit, pack_prompts
from llamatap.layers import LayerId, default_eagle3_layers, translate_for
from llamatap.model import Model
from llamatap.states import States

__all__ = ["Work", "batches", "chosen_layers", "extraction", "nonfinite", "preparation", "provenance"]

# Samples that are packed into batches together: batches stay near the order of the input.
_WINDOW = 512


def batches(lengths: Sequence[int], room: int, most: int) -> list[list[int]]:
    """Pack samples into batches, independently of the number of workers: rounding depends on the batch.

    :param lengths: tokens of each sample.
    :param room: the most tokens of a batch; a longer sample is one by itself.
    :param most: the most samples of a batch.
    """
    found: list[list[int]] = []
    for start in range(0, len(lengths), _WINDOW):
        part = pack_prompts(lengths[start : start + _WINDOW], room, most)
        found += sorted(sorted(start + index for index in pack) for pack in part)
    return found


def chosen_layers(model: Model, options: Options) -> tuple[LayerId, ...]:
    """The layers that the options name, as llamatap counts, without what a layout adds.

    :raises InvalidInputError: there are none, or the model has no such layers.
    :raises UnsupportedError: the model carries no single residual stream.
    """
    own = options.layers is None
    ids = default_eagle3_layers(model.n_layer) if own else options.layers
    convention = "llamatap" if own else options.convention
    assert ids is not None
    found = translate_for(model, ids, source=convention)
    if not found:
        raise InvalidInputError("layers is empty; give at least one layer id")
    return tuple(found)


def preparation(model: Model, options: Options, date: str) -> Preparation:
    """How rows become samples of this model.

    :param date: what templates take for today, YYYY-MM-DD.
    """
    limits = [options.max_length, options.context.get("n_ctx"), model.n_ctx_train, 2**31 - 1]
    return Preparation(
        min(limit for limit in limits if limit),
        options.min_tokens,
        options.min_loss_tokens,
        options.template,
        options.template_variables,
        date,
        options.supervise_empty_thoughts,
    )


def extraction(model: Model, options: Options, longest: int) -> dict[str, Any]:
    """Options of the extractor.

    :param longest: the most tokens of a sample.
    """
    found: dict[str, Any] = {"n_ubatch": options.batch_tokens, **options.context}
    if model.layer_map.at_once:
        found["n_ubatch"] = found["n_batch"] = max(found["n_ubatch"], longest)
    most = batch_sequence_limit(native_of(model)) if found.get("kv_unified", True) else 1
    found.setdefault("n_seq_max", most)
    return found


def provenance(model: Model, options: Options, columns: Sequence[LayerId], dtype: str) -> dict[str, Any]:
    """Provenance that the states of all samples share: file, engine, back end, layers, ...

    :param columns: the layers, as llamatap counts.
    :param dtype: of the states.
    """
    with Extractor(model, **dict(options.context)) as extractor:
        found = extractor([0], columns, dtype=dtype).provenance
    own = ("window", "prompt_tokens", "truncated")
    return {key: value for key, value in found.items() if key not in own and value is not None}


@dataclass(frozen=True)
class Work:
    """Batches to compute, and where to write them. Can be pickled for a worker.

    :ivar layout: writes samples; it is open.
    :ivar folder: remembers those that have no finite states.
    :ivar options: of the data set.
    :ivar extraction: options of the extractor.
    :ivar batches: numbers of the samples that are computed together, a list each.
    :ivar done: which samples are there: bool ``(n_samples,)``.
    :ivar n_layer: blocks of the model.
    """

    layout: Layout
    folder: Folder
    options: Options
    extraction: Mapping[str, Any]
    batches: Sequence[Sequence[int]]
    done: NDArray[np.bool_]
    n_layer: int

    def compute(
        self,
        extractor: Extractor,
        part: Iterable[Sequence[int]],
        wrote: Callable[[Sequence[int]], None],
    ) -> None:
        """Compute batches of samples and write those that are not there.

        :param part: some of the batches.
        :param wrote: called after each batch with the samples that were written.
        :raises InvalidInputError: ``on_error`` is "stop" and a sample's states are not finite.
        :raises OutOfMemoryError: the states of the batches that are computed and not yet written do not fit
            into memory; nothing was computed.
        :raises OSError: they cannot be written.
        """
        part = list(part)
        self._require_memory(part)
        computed = Computed(self.folder.work / "computed")

        def written(indices: Sequence[int]) -> None:
            computed.drop(indices[0])
            wrote(indices)

        with Writer(self._write, written, self.options.queue) as writer:
            for batch in part:
                missing = [index for index in batch if not self.done[index]]
                if not missing:
                    continue
                writer.reserve()
                # All of them, for states depend in their rounding on what is computed with them.
                tokens = [self.layout.samples[index].tokens for index in batch]
                found = extractor(tokens, self.layout.columns, dtype=self.layout.dtype)
                states = dict(zip(batch, found, strict=True))
                kept = [(index, states[index]) for index in missing]
                computed.keep(kept)
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
        """Write what a run that was killed had computed of these batches; how many samples that were.

        :raises InvalidInputError: ``on_error`` is "stop" and a sample's states are not finite.
        :raises OSError: they cannot be written.
        """
        computed = Computed(self.folder.work / "computed")
        columns = self.layout.columns
        ours = {index for batch in self.batches for index in batch}
        n_written = 0
        for batch in computed.left():
            if batch[0][0] not in ours:
                # Batch of another worker, which may be writing it now.
                continue
            for index, array in batch:
                if self.done[index]:
                    continue
                tokens = self.layout.samples[index].tokens
                self._write(index, States(array, tokens, columns, n_layer=self.n_layer))
                self.done[index] = True
                n_written += 1
            computed.drop(batch[0][0])
        return n_written

    def _write(self, index: int, states: States) -> None:
        layers = states.nonfinite_layers()
        if not layers:
            self.layout.write(index, states.array)
            return
        reason = nonfinite(layers, self.layout.dtype)
        if self.options.on_error == "stop":
            raise InvalidInputError(f"row {self.layout.samples.rows[index]}: {reason}")
        self.folder.lose(index, reason)


def nonfinite(layers: Sequence[LayerId], dtype: str) -> str:
    """Why states that are no numbers cannot be used.

    :param layers: those that hold NaN or infinity.
    """
    reason = f"NaN or infinity in layers {list(layers)} ({dtype})"
    return reason + ": float16 ends at 65504, take bfloat16" if dtype == "float16" else reason
