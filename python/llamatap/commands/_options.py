"""What several commands have in common: options, and how their values are read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

__all__ = ["DTYPES", "add_loading", "draft_length", "layer_ids", "read_text"]

DTYPES = ("float32", "float16", "bfloat16")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """``--gpu-layers`` and ``--weights``: how a model is loaded."""
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1 for all")
    parser.add_argument("--weights", choices=("f32", "f16", "bf16"), help="convert the weights first")


def draft_length(text: str) -> int | Literal["auto"]:
    """``--n-max``: tokens of a draft, or "auto".

    :raises InvalidInputError: it is neither.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise InvalidInputError(f"--n-max: expected a number or auto, found {text!r}") from None


def layer_ids(text: str) -> list[LayerId]:
    """Ids of ``--layers``: "-2,norm", "0..30".

    :raises InvalidInputError: one is none.
    """
    layers: list[LayerId] = []
    for item in text.split(","):
        item = item.strip()
        if item == "norm":
            layers.append("norm")
            continue
        first, dots, last = item.partition("..")
        try:
            layers += range(int(first), int(last) + 1) if dots else [int(item)]
        except ValueError:
            raise InvalidInputError(
                f'--layers: {item!r} is no layer id; give integers, ranges (0..30) and "norm"'
            ) from None
    return layers


def read_text(path: Path) -> str:
    """The text of ``--file``, as it is; ``-`` is the standard input.

    :raises InvalidInputError: it is not UTF-8, or there is no standard input.
    :raises OSError: it cannot be read.
    """
    if str(path) == "-" and sys.stdin is None:
        raise InvalidInputError("--file -: there is no standard input")
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: {error}") from error
