"""Job of writing one data set: prepare the samples, compute the missing states, finish the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamatap._validate import instance
from llamatap.dataset import plan, resume
from llamatap.dataset.batch_computation import BatchComputation
from llamatap.dataset.disk_space import check_disk_space
from llamatap.dataset.folder import DatasetFolder
from llamatap.dataset.layouts import layout_class
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.row_files import Row, read_rows
from llamatap.dataset.rows_to_samples import prepare
from llamatap.errors import Error, InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.model import Model
from llamatap.states import dtype_name

__all__ = ["Job", "Progress", "Report"]

#: Called with the number of written tokens, and the total.
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Report:
    """Report of a run.

    :ivar n_samples: samples of the data set, of all workers together.
    :ivar n_tokens: tokens of these samples.
    :ivar n_written: samples that this run wrote.
    :ivar skipped: rows that are not in the data set, with the reasons.
    :ivar complete: whether the data set is complete; of several workers, the last one completes it.
    """

    n_samples: int
    n_tokens: int
    n_written: int
    skipped: Mapping[int, str]
    complete: bool


class Job:
    """A data set that is prepared but not yet written, so that it can be inspected first.

    :param model: the model.
    :param samples: a file or folder (see :func:`llamatap.dataset.read_rows`), or rows: mappings with
        ``input_ids`` (and a ``loss_mask``), ``messages`` or ``conversations`` (and ``tools``), or ``text``;
        the first of these columns that a row has counts.
    :param folder: the folder to write to; created if missing.
    :param options: see :class:`Options`.
    :ivar n_rows: rows of the input.
    :ivar samples: the samples that will be written, in order, with their tokens and loss masks.
    :ivar n_truncated: the number of samples that were truncated.
    :ivar skipped: the other rows, with the reasons.
    :ivar n_bytes: bytes of the files of states.
    :raises InvalidInputError: the input or an option is wrong, or the folder holds something else.
    :raises UnsupportedError: the model carries no single residual stream, or a package is missing.
    :raises OSError: the input cannot be read, or there is no room for the data set (``ENOSPC``).
    """

    def __init__(
        self,
        model: Model,
        samples: str | os.PathLike[str] | Iterable[Row],
        folder: str | os.PathLike[str],
        options: DatasetOptions | None = None,
    ) -> None:
        instance("model", model, Model)
        self.model = model
        options = options or DatasetOptions()
        self._folder = DatasetFolder(Path(folder))
        layout = layout_class(options.layout)
        self.columns = plan.columns(model, options, layout)
        dtype = dtype_name(options.dtype)
        manifest = self._folder.manifest()
        resume.check_allowed(self._folder.path, manifest, options)
        self.options = options = replace(
            options,
            max_length=plan.longest_sample(model, options),
            date=resume.template_date(manifest, options),
        )
        self._facts = facts = self._provenance(dtype)
        self._made_with = resume.made_with(model.path, options, facts)
        # Checked before the samples are prepared, which takes long, and again with their hash.
        self._check_same(manifest)

        self.skipped: dict[int, str] = {}
        rows = read_rows(Path(samples)) if isinstance(samples, (str, os.PathLike)) else samples
        prepared = prepare(model, rows, options, self._skip)
        self.samples = prepared.samples
        self.n_rows, self.n_truncated = prepared.n_rows, prepared.n_truncated
        if not self.samples:
            row, reason = next(iter(self.skipped.items()))
            raise InvalidInputError(f"none of the {self.n_rows} rows can be used; row {row}: {reason}")
        self._made_with[resume.SAMPLES_HASH] = self.samples.sha256()
        self._check_same(manifest)
        self._layout = layout(self._folder.path, self.samples, self.columns, dtype, model.n_embd, facts)
        self.n_bytes = self._layout.n_bytes()
        if self._status() != "complete":
            check_disk_space(self._folder, self._layout, options)

    def _skip(self, row: int, error: Error) -> None:
        if self.options.on_error == "stop":
            raise InvalidInputError(f"row {row}: {error}") from error
        self.skipped[row] = str(error)

    def _provenance(self, dtype: str) -> dict[str, Any]:
        """Provenance that the states of all samples share. Subclasses may compute it elsewhere."""
        return plan.provenance(self.model, self.options, self.columns, dtype)

    @property
    def free_bytes(self) -> int:
        """Free bytes of the file system of the folder."""
        return self._folder.free_bytes()[0]

    def _check_same(self, manifest: Mapping[str, Any] | None) -> None:
        resume.check_same(self._folder.path, manifest, self._made_with)

    def _status(self) -> str | None:
        manifest = self._folder.manifest()
        return None if manifest is None else manifest.get("status")

    def run(self, progress: Progress | None = None) -> Report:
        """Write the data set, or its missing part.

        :param progress: called with the number of written tokens and the total (of this worker, if there are
            several), at the start and after each batch, from a writing thread.
        :raises InvalidInputError: ``on_error`` is "stop" and the states of a sample are not finite.
        :raises BusyError: another run is writing to the folder.
        :raises OSError: it cannot be written, e.g. for lack of room. The written part is kept, and ``resume``
            continues.
        """
        options = self.options
        n_written = 0
        with self._folder.used(options.rank, options.world_size):
            with self._folder.settled():
                manifest = self._folder.manifest()
                if manifest is None:
                    # Work files of another data set, whose own files were removed.
                    self._folder.clear_work()
                    self._write_manifest("writing")
                self._check_same(manifest)
                if manifest is not None and options.resume:
                    self._reopen(manifest)
                writing = self._status() == "writing"
                if writing:
                    work = self._work()
                    n_written = work.recover()
            if writing:
                n_written += self._fill(work, progress or (lambda done, total: None))
            with self._folder.settled():
                return self._finish(n_written)

    def _reopen(self, manifest: Mapping[str, Any]) -> None:
        """Set a complete data set back to "finishing", or to "writing" if files were lost since."""
        status = resume.reopened_status(manifest, len(self.samples), bool(self._layout.written().all()))
        if status is not None:
            self._write_manifest(status)

    def _work(self) -> BatchComputation:
        """The batches of this worker. Opens the layout for them."""
        options, lengths = self.options, self.samples.lengths
        extraction = plan.extractor_options(self.model, options, int(lengths.max()))
        batches = plan.sample_batches(lengths.tolist(), extraction["n_ubatch"], extraction["n_seq_max"])
        mine = batches[options.rank :: options.world_size]
        self._layout.open(index for batch in mine for index in batch)
        done = self._layout.written()
        done[list(self._folder.lost())] = True
        return BatchComputation(
            self._layout, self._folder, options, extraction, mine, done, self.model.n_layer
        )

    def _fill(self, work: BatchComputation, progress: Progress) -> int:
        """Compute and write the missing samples. Returns how many were written."""
        lengths = self.samples.lengths
        mine = np.array([index for batch in work.batches for index in batch], np.int64)
        total = int(lengths[mine].sum())
        n_tokens = int(lengths[mine][work.done[mine]].sum())
        n_written = 0
        progress(n_tokens, total)

        def wrote(indices: Sequence[int]) -> None:
            nonlocal n_tokens, n_written
            n_tokens += int(lengths[list(indices)].sum())
            n_written += len(indices)
            progress(n_tokens, total)

        self._compute(work, wrote)
        if self.options.world_size > 1:
            # Workers on other machines see only what is on the disk.
            self._layout.sync()
        return n_written

    def _compute(self, work: BatchComputation, wrote: Callable[[Sequence[int]], None]) -> None:
        """Compute and write the batches. Subclasses may do it elsewhere.

        :param wrote: called with the samples of each batch once they are written.
        """
        with Extractor(self.model, **work.extraction) as extractor:
            work.compute(extractor, work.batches, wrote)

    def _finish(self, n_written: int) -> Report:
        """Finish the files once all samples are written, and report."""
        lost = self._folder.lost()
        rows = self.samples.rows
        skipped = dict(
            sorted({**self.skipped, **{int(rows[i]): reason for i, reason in lost.items()}}.items())
        )
        status = self._status()
        if status == "writing":
            there = self._layout.written()
            there[list(lost)] = True
            if there.all():
                # Written before any file is renumbered.
                status = "finishing"
                self._write_manifest(status)
        if status == "finishing":
            if len(lost) == len(self.samples):
                raise InvalidInputError(f"no sample has finite states; row {rows[0]}: {lost[0]}")
            self._layout.finish(list(lost))
            self._folder.write_skipped(skipped)
            self._folder.journal.clear()
            status = "complete"
            self._write_manifest(status, len(lost))
        lengths = self.samples.lengths
        return Report(
            len(self.samples) - len(lost),
            int(lengths.sum() - lengths[list(lost)].sum()),
            n_written,
            skipped,
            status == "complete",
        )

    def _write_manifest(self, status: str, n_lost: int = 0) -> None:
        self._folder.write_manifest(
            {
                "status": status,
                "n_samples": len(self.samples) - n_lost,
                "n_skipped": len(self.skipped) + n_lost,
                "made_with": self._made_with,
                "provenance": self._facts,
            }
        )
