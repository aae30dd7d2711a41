"""Data sets of hidden states on disk, for trainers of drafters and probes.

>>> from llamatap import dataset                                                        # doctest: +SKIP
>>> dataset.write(model, "chats.jsonl", "states", dataset.Options(layers=[2, 15, 27]))  # doctest: +SKIP

The command ``llamatap dataset`` does the same; docs/datasets.md describes inputs, loss masks and layouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from llamatap.dataset.job import Job, Progress, Report
from llamatap.dataset.layouts import LAYOUTS
from llamatap.dataset.options import DatasetOptions as Options
from llamatap.dataset.row_files import Row, read_rows
from llamatap.dataset.samples import Samples
from llamatap.dataset.samples import TokenSample as Sample
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
    """Write the states of samples: make a :class:`Job` and run it.

    :raises InvalidInputError: the input or an option is wrong, or the folder holds something else.
    :raises UnsupportedError: the model carries no single residual stream, or a package is missing.
    :raises BusyError: another run is writing to the folder.
    :raises OSError: files cannot be read or written, or there is no room. The written part is kept.
    """
    return Job(model, samples, folder, options).run(progress)
