"""``llamatap demo``: how a prompt changes over the layers, and decoding with drafts beside plain decoding."""

from __future__ import annotations

import argparse
from pathlib import Path

from llamatap.commands._arguments import fetch_model

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo", help="show how a prompt changes over the layers, and what drafts do to decoding"
    )
    parser.add_argument("--model", type=Path, help="a GGUF file (default: smollm2, fetched)")
    parser.add_argument("--text", help="the prompt")
    parser.add_argument("-o", "--output", type=Path, default=Path("demo.png"), metavar="FILE.png")
    parser.add_argument(
        "--drafter",
        metavar="FILE",
        help="as in `llamatap generate` (default: the one in models/ of a checkout, else ngram)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.commands import _demo_drafting, _demo_picture

    model = fetch_model("smollm2") if arguments.model is None else arguments.model
    _demo_picture.run(model, arguments.text, arguments.output)
    _demo_drafting.run(arguments.model, arguments.drafter)
    return 0
