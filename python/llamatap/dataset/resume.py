"""Resuming: whether the data set in a folder may be continued.

The manifest of a data set has ``made_with``: all that determines its files. A run continues a data set only
if its own ``made_with`` is the same.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamatap.dataset.options import DatasetOptions
from llamatap.errors import InvalidInputError

__all__ = ["SAMPLES_HASH", "check_allowed", "check_same", "made_with", "reopened_status", "template_date"]

#: Key of the hash of the samples in ``made_with``; known once they are prepared.
SAMPLES_HASH = "samples_sha256"
# Options of the context that the provenance records too, and threads, which change no value.
_TOLD_ELSEWHERE = ("flash_attn", "n_threads")


def check_allowed(folder: Path, manifest: Mapping[str, Any] | None, options: DatasetOptions) -> None:
    """Check that the options allow a data set in the folder.

    :raises InvalidInputError: they do not.
    """
    if manifest is not None and not options.resume and options.world_size == 1:
        raise InvalidInputError(
            f"{folder} already holds a data set; continue it (resume, --resume), or give another folder"
        )


def template_date(manifest: Mapping[str, Any] | None, options: DatasetOptions) -> str:
    """The date that chat templates see as today: of the options, of the data set in the folder, or today."""
    of_manifest = (manifest or {}).get("made_with", {}).get("date")
    return options.date or of_manifest or datetime.date.today().isoformat()


def made_with(model_path: Path, options: DatasetOptions, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines the files of a data set, except the hash of its samples.

    :param options: the options, with the maximum length and the date that are used.
    :param facts: the provenance that the states of all samples share.
    :raises InvalidInputError: the model file is not the one that was loaded any more.
    """
    if not facts.get("model_sha256"):
        raise InvalidInputError(
            f"{model_path} is gone or was replaced since it was loaded, but a data set records the hash of "
            f"its "
            "model file; load the model again"
        )
    found = {
        "layout": options.layout,
        **{key: value for key, value in facts.items() if key not in ("model", "convention", "norm")},
        "max_length": options.max_length,
        "min_tokens": options.min_tokens,
        "min_loss_tokens": options.min_loss_tokens,
        "template": options.template,
        "template_variables": dict(options.template_variables),
        "date": options.date,
        "supervise_empty_thoughts": options.supervise_empty_thoughts,
        "batch_tokens": options.batch_tokens,
        "context": {
            key: value
            for key, value in options.context.items()
            if key not in facts and key not in _TOLD_ELSEWHERE
        },
    }
    # As it is read back from the manifest: tuples as lists.
    as_read: dict[str, Any] = json.loads(json.dumps(found))
    return as_read


def check_same(folder: Path, manifest: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
    """Check that the data set in the folder is of the same model, samples and options.

    :param here: the ``made_with`` of this run.
    :raises InvalidInputError: it is not.
    """
    if manifest is None:
        return
    there = manifest["made_with"]
    names = [name for name in {**there, **here} if name != SAMPLES_HASH or name in here]
    wrong = [name for name in names if there.get(name) != here.get(name)]
    if wrong:
        differs = "; ".join(
            f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in wrong
        )
        # The names of the others are those of options.
        what = " (samples_sha256 is the hash of token ids and loss masks)" if SAMPLES_HASH in wrong else ""
        raise InvalidInputError(
            f"{folder} holds a data set of another kind: {differs}. Give the same{what}, or another folder"
        )


def reopened_status(manifest: Mapping[str, Any], n_samples: int, all_written: bool) -> str | None:
    """The status to set a complete data set back to; None to leave its status.

    "writing" if files were lost since, else "finishing". A data set without some samples, whose states were
    not finite, stays complete: its files were renumbered, so missing ones cannot be told.
    """
    if manifest["status"] == "complete" and manifest.get("n_samples") == n_samples:
        return "finishing" if all_written else "writing"
    return None
