"""One data set, from samples to files."""

from __future__ import annotations

import datetime
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamatap._extras import missing
from llamatap._validate import instance, shown
from llamatap.dataset._computed import Computed
from llamatap.dataset._folder import Folder
from llamatap.dataset._work import (
    Work,
    batches,
    chosen_layers,
    extraction,
    preparation,
    provenance,
)
from llamatap.dataset.layouts import LAYOUTS, Layout
from llamatap.dataset.options import Options
from llamatap.dataset.rows import Row, read_rows
from llamatap.dataset.samples import Samples, prepare
from llamatap.errors import Error, InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.states import dtype_name

__all__ = ["Job", "Progress", "Report"]

_SAMPLES = "samples_sha256"
# Options of the context that the provenance tells of, and threads, which change no number.
_TOLD_ELSEWHERE = ("flash_attn", "n_threads")

#: Called with tokens that are there and tokens that there will be.
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Report:
    """Report of a run.

    :ivar n_samples: samples of the data set; with several workers of all of them.
    :ivar n_tokens: their tokens.
    :ivar n_written: samples that this run wrote.
    :ivar skipped: rows that are not in the data set, and why.
    :ivar complete: whether all is there; with several workers the last one finishes.
    """

    n_samples: int
    n_tokens: int
    n_written: int
    skipped: Mapping[int, str]
    complete: bool


class Job:
    """A data set that is prepared and not yet written: what it will be can be looked at first.

    :param model: the model.
    :param samples: a file or folder (see :func:`llamatap.dataset.read_rows`), or rows: mappings with
        ``input_ids`` (and a ``loss_mask``), ``messages`` or ``conversations`` (and ``tools``), or ``text``:
        the first of these that is there.
    :param folder: where the data set is written; made if it is not there.
    :param options: see :class:`Options`.
    :ivar n_rows: rows of the input.
    :ivar samples: those that will be written, in order, with their tokens and loss masks.
    :ivar n_truncated: how many of them were cut.
    :ivar skipped: the other rows, and why.
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
        options: Options | None = None,
    ) -> None:
        instance("model", model, Model)
        self.model = model
        self.options = options = options or Options()
        self._folder = Folder(Path(folder))
        kind = _layout_kind(options.layout)
        self.columns = _columns(model, options, kind)
        dtype = dtype_name(options.dtype)
        manifest = self._folder.manifest()
        if manifest is not None and not options.resume and options.world_size == 1:
            raise InvalidInputError(
                f"{folder} holds a data set already; go on with it (resume, --resume), or give another folder"
            )
        today = datetime.date.today().isoformat()
        date = options.date or (manifest or {}).get("made_with", {}).get("date") or today
        how = preparation(model, options, date)
        facts = self._provenance(dtype)
        self._made_with: dict[str, Any] = {
            "layout": options.layout,
            **{key: value for key, value in facts.items() if key not in ("model", "convention", "norm")},
            "max_length": how.max_length,
            "min_tokens": options.min_tokens,
            "min_loss_tokens": options.min_loss_tokens,
            "template": options.template,
            "template_variables": dict(options.template_variables),
            "date": date,
            "supervise_empty_thoughts": options.supervise_empty_thoughts,
            "batch_tokens": options.batch_tokens,
            "context": {
                key: value
                for key, value in options.context.items()
                if key not in facts and key not in _TOLD_ELSEWHERE
            },
        }
        if not self._made_with.get("model_sha256"):
            raise InvalidInputError(
                f"{model.path} is gone or was replaced since it was loaded, and a data set tells which file "
                "it is of; load the model again"
            )
        self._made_with = json.loads(json.dumps(self._made_with))
        self._check_same(manifest)

        self.skipped: dict[int, str] = {}
        rows = read_rows(Path(samples)) if isinstance(samples, (str, os.PathLike)) else samples
        prepared = prepare(model, rows, how, self._skip)
        self.samples: Samples = prepared.samples
        self.n_rows, self.n_truncated = prepared.n_rows, prepared.n_truncated
        if not self.samples:
            row, reason = next(iter(self.skipped.items()))
            raise InvalidInputError(f"none of the {self.n_rows} rows can be used; row {row}: {reason}")
        self._made_with[_SAMPLES] = self.samples.sha256()
        self._check_same(manifest)
        self._layout = kind(self._folder.path, self.samples, self.columns, dtype, model.n_embd, facts)
        self._facts = facts
        self.n_bytes = self._layout.n_bytes()
        self._check_room()

    def _skip(self, row: int, error: Error) -> None:
        if self.options.on_error == "stop":
            raise InvalidInputError(f"row {row}: {error}") from error
        self.skipped[row] = str(error)

    def _provenance(self, dtype: str) -> dict[str, Any]:
        """Provenance that the states of all samples share."""
        return provenance(self.model, self.options, self.columns, dtype)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free where the folder is."""
        return self._folder.free_bytes()[0]

    def _check_same(self, manifest: Mapping[str, Any] | None) -> None:
        """Check that the folder's data set is of the same model, samples and options.

        :raises InvalidInputError: it is not.
        """
        if manifest is None:
            return
        there = manifest["made_with"]
        # The samples are known once they are prepared.
        names = [name for name in {**there, **self._made_with} if name != _SAMPLES or name in self._made_with]
        wrong = [name for name in names if there.get(name) != self._made_with.get(name)]
        differs = [
            f"{name} is {there.get(name)!r} there and {self._made_with.get(name)!r} here" for name in wrong
        ]
        if differs:
            # Of an option it is plain what to give.
            what = " (samples_sha256 is of token ids and loss masks)" if _SAMPLES in wrong else ""
            raise InvalidInputError(
                f"{self._folder.path} holds a data set of another kind: {'; '.join(differs)}. Give the same"
                f"{what}, or another folder"
            )

    def _check_room(self) -> None:
        free, block = self._folder.free_bytes()
        # Files end in part of a block; and there are token ids and masks besides the states.
        needed = self.n_bytes - self._layout.n_bytes_there()
        needed += int((~self._layout.written()).sum()) * block + 24 * self.samples.n_tokens
        # Batches that are computed are there twice until they are written.
        batch = max(self.options.batch_tokens, int(self.samples.lengths.max()))
        rows = min(self.options.queue * batch, self.samples.n_tokens)
        needed += rows * len(self.columns) * self.model.n_embd * self._layout.item_bytes
        if needed > free and self._status() != "complete":
            raise OSError(
                errno.ENOSPC,
                f"the data set ({len(self.samples):,} samples, {self.samples.n_tokens:,} tokens) needs "
                f"{needed:,} bytes more, and {free:,} are free; free some, or take fewer layers or samples",
                str(self._folder.path),
            )

    def _status(self) -> str | None:
        manifest = self._folder.manifest()
        return None if manifest is None else manifest.get("status")

    def run(self, progress: Progress | None = None) -> Report:
        """Write the data set, or what is missing of it.

        :param progress: called with the tokens that are there and those that there will be (with several
            workers, this one's), at the start and after each batch; by a thread that writes.
        :raises InvalidInputError: ``on_error`` is "stop" and a sample's states are not finite.
        :raises BusyError: another run is writing to the folder.
        :raises OSError: it cannot be written, for want of room for example. What was written stays, and
            ``resume`` goes on.
        """
        options = self.options
        n_written = 0
        with self._folder.used(options.rank, options.world_size):
            with self._folder.settled():
                manifest = self._folder.manifest()
                if manifest is None:
                    # Work files of another data set, whose own files were removed.
                    self._folder.forget()
                    self._write_manifest("writing")
                self._check_same(manifest)
                if manifest is not None and options.resume:
                    self._look_again(manifest)
                writing = self._status() == "writing"
                if writing:
                    work = self._work()
                    n_written = work.recover()
            if writing:
                n_written += self._fill(work, progress or (lambda done, total: None))
            with self._folder.settled():
                return self._finish(n_written)

    def _look_again(self, manifest: Mapping[str, Any]) -> None:
        """Set a complete data set back to "finishing", or to "writing" where files were lost since. (Not
        where samples had no finite states: files were moved, and missing ones cannot be told.)"""
        if manifest["status"] == "complete" and manifest.get("n_samples") == len(self.samples):
            self._write_manifest("finishing" if self._layout.written().all() else "writing")

    def _work(self) -> Work:
        """The work of this worker: its batches. Opens the layout for them."""
        options, lengths = self.options, self.samples.lengths
        how = extraction(self.model, options, int(lengths.max()))
        everything = batches(lengths.tolist(), how["n_ubatch"], how["n_seq_max"])
        mine = everything[options.rank :: options.world_size]
        self._layout.open(index for batch in mine for index in batch)
        done = self._layout.written()
        done[list(self._folder.lost())] = True
        return Work(self._layout, self._folder, options, how, mine, done, self.model.n_layer)

    def _fill(self, work: Work, progress: Progress) -> int:
        """Compute and write the missing samples. Returns how many were written."""
        lengths = self.samples.lengths
        mine = np.array([index for batch in work.batches for index in batch], np.int64)
        total = int(lengths[mine].sum())
        state = [int(lengths[mine][work.done[mine]].sum()), 0]
        progress(state[0], total)

        def wrote(indices: Sequence[int]) -> None:
            state[0] += int(lengths[list(indices)].sum())
            state[1] += len(indices)
            progress(state[0], total)

        self._compute(work, wrote)
        if self.options.world_size > 1:
            # Workers on other machines trust what is on the disk alone.
            self._layout.sync()
        return state[1]

    def _compute(self, work: Work, wrote: Callable[[Sequence[int]], None]) -> None:
        """Have the work done.

        :param wrote: called with the samples that were written, as they are.
        """
        with Extractor(self.model, **work.extraction) as extractor:
            work.compute(extractor, work.batches, wrote)

    def _finish(self, n_written: int) -> Report:
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
                # From here on files may move.
                status = "finishing"
                self._write_manifest(status)
        if status == "finishing":
            if len(lost) == len(self.samples):
                raise InvalidInputError(f"no sample has finite states; row {rows[0]}: {lost[0]}")
            self._layout.finish(list(lost))
            self._folder.write_skipped(skipped)
            Computed(self._folder.work / "computed").clear()
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


def _layout_kind(name: str) -> type[Layout]:
    import importlib.util

    kind = LAYOUTS.get(name)
    if kind is None:
        raise InvalidInputError(f"unknown layout {shown(name)}; known are {', '.join(LAYOUTS)}")
    absent = [package for package in kind.needs if importlib.util.find_spec(package) is None]
    if absent:
        raise missing(*absent, what=f"the layout {name}")
    return kind


def _columns(model: Model, options: Options, kind: type[Layout]) -> tuple[LayerId, ...]:
    """The layers to extract, the last of the layout's own choice at the end."""
    found = chosen_layers(model, options)
    last: LayerId = "norm" if kind.last_is_norm else model.n_layer
    return found if found[-1] == last else (*found, last)
