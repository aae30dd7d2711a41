"""``llamatap convert``: turn a drafter's checkpoint into a GGUF file, or back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llamatap.commands._arguments import layer_ids
from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    from llamatap.convert import Conversion

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("convert", help="turn a drafter's checkpoint into a GGUF file, or back")
    parser.add_argument(
        "source", type=Path, help="a checkpoint's folder, or an mtp.safetensors; with --to, a GGUF draft"
    )
    parser.add_argument("target", type=Path, help="the GGUF file of the model that it drafts for")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PATH")
    # The names are those of llamatap.convert, which is imported when it runs.
    parser.add_argument(
        "--type", choices=("f32", "f16", "bf16", "q8_0"), help="type of the matrices (default: f16)"
    )
    parser.add_argument(
        "--to",
        choices=("speculators", "eagle3", "angelslim", "mtp"),
        help="write a checkpoint in this format; eagle3 is SpecForge's, mtp an mtp.safetensors",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="with an mtp.safetensors: write the model too, as mimo2 with the block behind it",
    )
    parser.add_argument(
        "--layers",
        help="layers of the target that it was trained on, as llamatap counts, where the checkpoint does not "
        'tell: "2,15,27"',
    )
    parser.add_argument(
        "--own-embedding",
        action="store_true",
        help="keep a token embedding or a head that equals the target's",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out a tensor or a setting; repeatable",
    )
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="with --to speculators: name or folder of the model as transformers has it, for config.json",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.convert import to_checkpoint, to_gguf

    if arguments.to is not None:
        others = (
            arguments.type,
            arguments.layers,
            arguments.own_embedding,
            arguments.ignore,
            arguments.whole,
        )
        if any(others):
            raise InvalidInputError("--to takes none of --type, --layers, --own-embedding, --ignore, --whole")
        done = to_checkpoint(
            arguments.source,
            arguments.target,
            arguments.output,
            format=arguments.to,
            verifier=arguments.verifier,
        )
    else:
        if arguments.verifier is not None:
            raise InvalidInputError("--verifier needs --to speculators")
        done = to_gguf(
            arguments.source,
            arguments.target,
            arguments.output,
            type=arguments.type or "f16",
            target_layers=None if arguments.layers is None else layer_ids(arguments.layers),
            embedding="own" if arguments.own_embedding else "auto",
            ignore=arguments.ignore,
            whole=arguments.whole,
        )
    print(_told(done))
    return 0


def _told(done: Conversion) -> str:
    files = [done.path] if done.path.is_file() else list(done.path.iterdir())
    size = sum(one.stat().st_size for one in files)
    inherited = f"; uses the target's {' and '.join(done.inherited)}" if done.inherited else ""
    layers = ", ".join(f"H_{one}" for one in done.target_layers)
    return f"{done.path}: {done.kind} on {layers}, {size:,} bytes{inherited}"
