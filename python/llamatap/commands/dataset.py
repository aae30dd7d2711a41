"""``llamatap dataset``: write the hidden states of a data set, as trainers read them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatap.commands._arguments import (
    DTYPES,
    add_chat_masks,
    add_loading,
    add_model,
    add_threads,
    given,
    layer_ids,
    load_model,
    read_text,
)
from llamatap.commands._progress import StageBars
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import CONVENTIONS

if TYPE_CHECKING:
    from llamatap.dataset import Job, Report

__all__ = ["add", "run"]

# Maximum number of skipped rows that are listed; skipped.jsonl has all of them.
_TOLD = 5


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("dataset", help="write the states of a data set's samples to a folder")
    add_model(parser)
    parser.add_argument(
        "input",
        type=Path,
        help="a .jsonl or .parquet file, or a folder that Hugging Face datasets saved, with input_ids (and "
        "loss_mask), messages, conversations or text",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--layers",
        help='comma-separated, "2,15,27"; the layout adds the last layer (default: those of EAGLE-3)',
    )
    parser.add_argument(
        "--convention",
        choices=list(CONVENTIONS),
        default="llamatap",
        help="the numbering of --layers (default: llamatap, which is vLLM's)",
    )
    # The names are those of llamatap.dataset.LAYOUTS, which takes long to import.
    parser.add_argument(
        "--layout",
        choices=("speculators", "specforge", "npy"),
        default="speculators",
        help="(default: speculators)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    _add_samples(parser)
    _add_running(parser)
    add_loading(parser)
    parser.set_defaults(run=run)


def _add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-length",
        type=int,
        help="truncate samples on the right to this many tokens (default: the trained length)",
    )
    parser.add_argument("--min-tokens", type=int, default=2, help="leave out shorter samples (default: 2)")
    parser.add_argument(
        "--min-loss-tokens",
        type=int,
        default=1,
        help="leave out samples with fewer tokens in the loss mask (default: 1)",
    )
    add_chat_masks(parser)
    parser.add_argument(
        "--template-variables",
        metavar="JSON",
        help='variables of the chat template: {"enable_thinking": false}',
    )
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="date that chat templates see as today")


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="skip or stop at samples that fail (default: skip)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the data set in the folder")
    parser.add_argument("--rank", type=int, default=0, help="the rank of this worker, from 0")
    parser.add_argument(
        "--world-size", type=int, default=1, help="workers that share the samples (default: 1)"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=512, help="tokens computed at once (default: 512)"
    )
    add_threads(parser, "--n-threads")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and stop")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    from llamatap.dataset import Job, Options

    options = Options(
        **given(Options, arguments)
        | {
            "layers": None if arguments.layers is None else layer_ids(arguments.layers),
            "template": None if arguments.chat_template is None else read_text(arguments.chat_template),
            "template_variables": _variables(arguments.template_variables),
            "context": given(ContextOptions, arguments),
        }
    )
    with load_model(arguments) as model:
        job = Job(model, arguments.input, arguments.output, options)
        _announce(job, arguments.output)
        if arguments.dry_run:
            return 0
        try:
            with StageBars(quiet=arguments.quiet) as bars:
                report = job.run(lambda done, total: bars("", done, total))
        except KeyboardInterrupt:
            print("the computed part is kept; continue with --resume", file=sys.stderr)
            raise
    return _tell(report, arguments.output)


def _variables(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"--template-variables is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"--template-variables must be a JSON object, not {text}")
    return found


def _announce(job: Job, folder: Path) -> None:
    cut = f", {job.n_truncated} of them cut" if job.n_truncated else ""
    last = job.columns[-1]
    print(
        f"{len(job.samples)} samples of {job.n_rows} rows{cut}; {job.samples.n_tokens} tokens; layers "
        f"{list(job.columns)}, of which the layout adds {last}; "
        f"{job.n_bytes:,} bytes of states in {folder}, {job.free_bytes:,} free",
        file=sys.stderr,
    )
    for row, reason in list(job.skipped.items())[:_TOLD]:
        print(f"left out: row {row}: {reason}", file=sys.stderr)
    if len(job.skipped) > _TOLD:
        print(f"left out: {len(job.skipped) - _TOLD} more", file=sys.stderr)


def _tell(report: Report, folder: Path) -> int:
    what = "complete" if report.complete else "this worker's part is done, other workers are not"
    where = " (skipped.jsonl)" if report.complete else ""
    skipped = f", {len(report.skipped)} left out{where}" if report.skipped else ""
    print(
        f"{folder}: {report.n_samples} samples, {report.n_tokens} tokens, {report.n_written} samples written "
        f"now{skipped}; {what}"
    )
    return 0
