"""``llamatap demo``: show how a prompt changes over the layers."""

from __future__ import annotations

import argparse
from pathlib import Path

from llamatap.commands._arguments import fetch_model

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="show how a prompt changes over the layers")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: smollm2, fetched)")
    parser.add_argument("--text", help="the prompt")
    parser.add_argument("-o", "--output", type=Path, default=Path("demo.png"), metavar="FILE.png")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.commands import _demo_picture

    model = fetch_model("smollm2") if arguments.model is None else arguments.model
    _demo_picture.run(model, arguments.text, arguments.output)
    return 0
