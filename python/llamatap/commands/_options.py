"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llamatap._validate import shown
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

if TYPE_CHECKING:
    from llamatap import States

__all__ = [
    "DTYPES",
    "above",
    "add_loading",
    "add_threads",
    "draft_length",
    "integers",
    "layer_ids",
    "read_text",
    "warn_of_cut",
]

# Far beyond the layers of any model, which is not loaded yet when they are read.
_MOST_LAYERS = 100_000

DTYPES = ("float32", "float16", "bfloat16")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """``--gpu-layers`` and ``--weights``: how a model is loaded."""
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1 for all")
    parser.add_argument("--weights", choices=("f32", "f16", "bf16"), help="convert the weights first")


def add_threads(parser: argparse.ArgumentParser, *names: str) -> None:
    """``--threads``, and other names of it: the engine's threads."""
    parser.add_argument(
        "--threads",
        *names,
        type=integers(1),
        metavar="N",
        help="threads of the engine (default: one a physical core, within the CPU quota of the container)",
    )


def integers(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an option that takes integers of a range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected an integer in {low}..{high}, found {shown(text)}")
        return value

    return read


def above(low: float, unit: int = 1) -> Callable[[str], float]:
    """The type of an option that takes numbers above another.

    :param unit: what they are multiplied by.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value < 2.0**32:
            raise argparse.ArgumentTypeError(f"expected a number above {low:g}, found {shown(text)}")
        return max(value * unit, 1)

    return read


def draft_length(text: str) -> int | Literal["auto"]:
    """``--n-max``: tokens of a draft, or "auto".

    :raises InvalidInputError: it is neither.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise InvalidInputError(f"--n-max: expected a number or auto, found {shown(text)}") from None


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
            ids = range(int(first), int(last) + 1) if dots else [int(item)]
        except ValueError:
            raise InvalidInputError(
                f'--layers: {shown(item)} is no layer id; give integers, ranges (0..30) and "norm"'
            ) from None
        # Before a range is written out. Of no length are those that run backwards.
        if any(abs(layer) > _MOST_LAYERS for layer in ids[:1]) or ids[_MOST_LAYERS - len(layers) :]:
            raise InvalidInputError(f"--layers: no model has the layers {shown(item)}")
        layers += ids
    return layers


def warn_of_cut(states: States, what: str) -> None:
    """Warn on the standard error of a prompt that was cut.

    :param what: the option or the setting that cut it.
    """
    if states.truncated:
        about = states.provenance
        print(
            f"llamatap: warning: {what} cut the prompt of {about['prompt_tokens']} tokens to the first "
            f"{about['max_length']}",
            file=sys.stderr,
        )


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
