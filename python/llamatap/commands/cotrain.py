"""``llamatap cotrain``: train a drafter on the traffic of a server that uses it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from llamatap.commands._arguments import given, integers, number_above
from llamatap.train.cotrain.options import TrainerOptions

__all__ = ["add", "run"]

_DESCRIPTION = """\
The trainer of co-training. A server (llamatap serve --drafter DRAFT --cotrain FOLDER) or a program
(llamatap.train.CoTrainer) writes the texts that it generates, with the target's states, into FOLDER. This
command trains the drafter on them, and publishes it there whenever it drafts better on held-out texts; the
server takes it without a restart. The server starts this command by itself; start it by hand to choose other
options, another Python or a GPU (then: --cotrain-trainer off). It can be ended and started again at any time.
FOLDER/log.jsonl and FOLDER/acceptance.png tell how it goes."""

_NUMBERS: tuple[tuple[str, Any, str], ...] = (
    ("min_tokens", integers(1), "tokens to train on, before the first cycle"),
    ("new_tokens", integers(1), "new tokens, before a further cycle"),
    ("cycle_tokens", integers(2), "most tokens of a cycle: the newest texts, then a choice of older ones"),
    ("held_out", integers(1), "most texts to measure on"),
    (
        "better_by",
        number_above(0, or_equal=True),
        "tokens per round that a drafter must gain on them to be published",
    ),
    ("epochs", integers(1), "passes over the texts of a cycle"),
    ("steps", integers(1, 16), "drafting steps in the loss"),
    ("decay", number_above(0), "weight of a step, relative to the one before it"),
    ("batch_tokens", integers(2), "tokens in a batch"),
    ("learning_rate", number_above(0), "its highest value in a cycle"),
    ("keep", integers(1), "published drafters that stay in FOLDER"),
    ("n_threads", integers(1), "PyTorch's threads (default: the cores that the engine leaves)"),
    ("seed", integers(0), "random seed"),
    ("poll_seconds", number_above(0), "seconds between looks for new texts"),
    ("minutes", number_above(0), "end after this time (default: no limit)"),
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cotrain",
        help="train the drafter of a running server on its traffic",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", type=Path, metavar="TARGET.gguf", help="the GGUF file that is served")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of both sides")
    parser.add_argument(
        "--draft",
        type=Path,
        required=True,
        help="the drafter to begin with: the file that is served, or the checkpoint that it was made from",
    )
    for name, kind, text in _NUMBERS:
        default = getattr(TrainerOptions, name)
        shown = "" if default is None else f" (default: {default:g})"
        flag = "--threads" if name == "n_threads" else f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, type=kind, metavar="N", help=text + shown)
    parser.add_argument(
        "--type",
        choices=("f32", "f16", "bf16", "q8_0"),
        help="of published .gguf files (default: q8_0, MTP blocks bf16)",
    )
    parser.add_argument("--device", help="PyTorch's device (default: a GPU if there is one)")
    parser.add_argument(
        "--nice", type=integers(0, 39), default=19, metavar="N", help="added niceness (default: 19)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="end when the server ended, or gave no sign for half an hour"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Libraries that PyTorch computes with read these when they are loaded.
    if arguments.n_threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(arguments.n_threads)
    os.nice(arguments.nice)
    from llamatap.train.cotrain.trainer import train_in_folder

    options = TrainerOptions(**given(TrainerOptions, arguments))

    def ready() -> None:
        print(f"trains on what a server writes into {arguments.folder}; Ctrl-C ends it", file=sys.stderr)

    train_in_folder(arguments.target, arguments.folder, arguments.draft, options, ready)
    return 0
