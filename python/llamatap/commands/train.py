"""``llamatap train``: train a drafter for a GGUF file."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamatap.commands._arguments import (
    add_chat_masks,
    add_threads,
    given,
    integers,
    layer_ids,
    number_above,
    read_text,
)
from llamatap.commands._progress import StageBars
from llamatap.context_options import ContextOptions

__all__ = ["add", "run"]

# Options whose names and defaults are those of llamatap.train.drafters.options.HeadTrainingOptions, which
# takes long to import.
_NUMBERS: tuple[tuple[str, Any, Any, str], ...] = (
    (
        "draft_vocab",
        integers(0),
        8192,
        "eagle3: tokens that can be drafted, the most frequent ones; 0 for all",
    ),
    ("n_ff", integers(1), None, "width of the feed-forward network (default: the target's)"),
    ("steps", integers(1, 16), 3, "drafting steps in the loss"),
    ("decay", number_above(0), 0.8, "weight of a step, relative to the one before it"),
    ("epochs", integers(1), 8, "passes over the data"),
    ("minutes", number_above(0), None, "end after this time (default: no limit)"),
    ("batch_tokens", integers(2), 4096, "tokens in a batch"),
    ("learning_rate", number_above(0), 1e-3, "its highest value"),
    ("seed", integers(0), 0, "random seed"),
    ("held_out", integers(0), 64, "samples to measure on"),
    ("measure_minutes", number_above(0), 3.0, "minutes between measurements"),
    ("engine_prompts", integers(0), 8, "prompts on which the engine drafts then; 0 for none"),
    ("engine_tokens", integers(1), 64, "tokens that it generates after each"),
    ("save_seconds", number_above(0), 60.0, "seconds between saves, the most that a kill costs"),
    ("max_length", integers(2), None, "tokens of a sample (default: the trained length)"),
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train a drafter (EAGLE-3, MTP) for a GGUF file")
    parser.add_argument("kind", choices=("eagle3", "mtp"))
    parser.add_argument("target", type=Path, help="the GGUF file to draft for")
    parser.add_argument(
        "data",
        type=Path,
        help="texts, conversations or token ids, as `llamatap dataset` and `llamatap conversations` have "
        "them; or a folder of states from `llamatap dataset`",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DRAFT", help="a .gguf file; mtp: .safetensors"
    )
    parser.add_argument(
        "--type", choices=("f32", "f16", "bf16", "q8_0"), default="q8_0", help="of the .gguf (default: q8_0)"
    )
    parser.add_argument("--layers", help='eagle3: three layers of the target (default: "2,n/2,n-3")')
    for name, kind, default, text in _NUMBERS:
        shown = "" if default is None else f" (default: {default:g})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N", help=text + shown
        )
    parser.add_argument("--device", help="PyTorch's device (default: a GPU if there is one)")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    add_chat_masks(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the training of the same output; states of texts are computed again first",
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="DRAFT",
        help="train this draft (or its checkpoint) further, on more data for instance; --layers, "
        "--draft-vocab and --n-ff are then its own",
    )
    parser.add_argument(
        "--gpu-layers",
        dest="n_gpu_layers",
        type=int,
        metavar="N",
        default=0,
        help="of the target; -1 for all",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.dataset import Options
    from llamatap.train.drafters.api import train_head
    from llamatap.train.drafters.options import HeadTrainingOptions

    chosen = given(HeadTrainingOptions, arguments)
    chosen["layers"] = None if arguments.layers is None else layer_ids(arguments.layers)
    template = None if arguments.chat_template is None else read_text(arguments.chat_template)
    chosen["data"] = Options(
        max_length=arguments.max_length,
        template=template,
        supervise_empty_thoughts=arguments.supervise_empty_thoughts,
    )
    with StageBars(quiet=arguments.quiet) as bars, _told(arguments.output, arguments.data), _warnings():
        found = train_head(
            arguments.kind,
            arguments.target,
            arguments.data,
            arguments.output,
            HeadTrainingOptions(**chosen),
            type=arguments.type,
            n_gpu_layers=arguments.n_gpu_layers,
            progress=bars,
            command=["llamatap", *(one for one in sys.argv[1:] if one != "--resume")],
            **given(ContextOptions, arguments),
        )
    for label, name in (("held out", "held_out"), ("in the engine", "engine")):
        if measured := found.figures.get(name):
            shares = " ".join(f"{share:.2f}" for share in measured["by_position"])
            print(
                f"{label}: {measured['tokens_per_round']:.2f} tokens per round, accepted by position {shares}"
            )
    print(f"{found.path}, {found.path.stat().st_size:,} bytes; its card is {found.card}")
    return 0


@contextlib.contextmanager
def _told(output: Path, data: Path) -> Iterator[None]:
    """Say how to continue a training that is interrupted."""
    from llamatap.train.drafters.state_sources import is_state_folder

    try:
        yield
    except KeyboardInterrupt:
        folder = output.with_name(output.name + ".training")
        if (folder / "state.pt").exists():
            # The states of texts are in no file.
            again = "" if is_state_folder(data) else ". States of texts are computed again first"
            print(f"continue with --resume; {folder} has what was trained{again}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Show the package's warnings on stderr: rows that are left out."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    # Not the engine's own, whose loggers are below.
    handler.addFilter(lambda record: record.name == "llamatap")
    handler.setFormatter(logging.Formatter("llamatap: warning: %(message)s"))
    logger = logging.getLogger("llamatap")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
