"""Data sets of hidden states, on disk: what trainers of drafters and probes read.

>>> from llamatap import dataset                                                        # doctest: +SKIP
>>> dataset.write(model, "chats.jsonl", "states", dataset.Options(layers=[2, 15, 27]))  # doctest: +SKIP

The command ``llamatap dataset`` does the same; docs/datasets.md tells of inputs, loss masks and layouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from llamatap.dataset._job import Job, Progress, Report
from llamatap.dataset.layouts import LAYOUTS
from llamatap.dataset.options import Options
from llamatap.dataset.rows import Row, read_rows
from llamatap.dataset.samples import Sample, Samples
from llamatap.model import Model

__all__ = ["LAYOUTS", "Job", "Options", "Report", "Sample", "Samples", "read_rows", "write"]


def write(
    model: Model,
    samples: str | os.PathLike[str] | Iterable[Row],
    folder: str | os.PathLike[str],
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Report:
    """Write the states of samples: :class:`Job`, and its :meth:`Job.run` at once.

    :raises InvalidInputError: the input or an option is wrong, or the folder holds something else.
    :raises UnsupportedError: the model carries no single residual stream, or a package is missing.
    :raises BusyError: another run is writing to the folder.
    :raises OSError: it cannot be read or written, or there is no room. What was written stays.
    """
    return Job(model, samples, folder, options).run(progress)
