"""Writing a folder that Hugging Face ``datasets.load_from_disk`` reads.

The format is that of ``Dataset.save_to_disk`` (datasets 5.1.0): the rows as an Arrow stream whose schema
carries the features as metadata, ``dataset_info.json`` with the features, and ``state.json``, which names the
data files and the format of returned columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llamatap.dataset.row_files import import_pyarrow
from llamatap.dataset.samples import TokenSample
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["write_dataset"]

_FILE = "data-00000-of-00001.arrow"
_INT64 = {"dtype": "int64", "_type": "Value"}
_FEATURES = {
    "input_ids": {"feature": _INT64, "_type": "List"},
    "loss_mask": {"feature": _INT64, "_type": "List"},
    "seq_len": _INT64,
}


def write_dataset(folder: Path, samples: Iterable[TokenSample], fingerprint: str) -> None:
    """Write rows of ``input_ids``, ``loss_mask`` and ``seq_len`` (all int64); the first two are read back as
    torch tensors. ``state.json``, which makes the folder a data set, is written last.

    :param fingerprint: identifies the data set in caches of ``datasets``.
    :raises UnsupportedError: pyarrow is not installed.
    :raises OSError: it cannot be written.
    """
    pyarrow = import_pyarrow()
    numbers = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema(
        [("input_ids", numbers), ("loss_mask", numbers), ("seq_len", pyarrow.int64())],
        {"huggingface": json.dumps({"info": {"features": _FEATURES}})},
    )
    with (
        atomic_path(folder / _FILE) as scratch,
        # Opened by Python: pyarrow refuses some names of files.
        scratch.open("wb") as file,
        pyarrow.ipc.new_stream(file, schema) as stream,
    ):
        for batch in _batches(samples, 1000):
            columns = [
                pyarrow.array([sample.tokens.astype(np.int64) for sample in batch], numbers),
                pyarrow.array([sample.loss_mask.astype(np.int64) for sample in batch], numbers),
                pyarrow.array([len(sample.tokens) for sample in batch], pyarrow.int64()),
            ]
            stream.write_batch(pyarrow.record_batch(columns, schema=schema))
    state = {
        "_data_files": [{"filename": _FILE}],
        "_fingerprint": fingerprint,
        "_format_columns": ["input_ids", "loss_mask"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": True,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    for name, content in (("dataset_info.json", info), ("state.json", state)):
        with atomic_path(folder / name) as scratch:
            scratch.write_text(json.dumps(content, indent=2))


def _batches(samples: Iterable[TokenSample], size: int) -> Iterable[list[TokenSample]]:
    batch: list[TokenSample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
