"""``llamatap extract``: hidden states of a prompt, into a safetensors file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llamatap.commands._arguments import (
    DTYPES,
    add_loading,
    add_model,
    add_prompt,
    add_threads,
    given,
    layer_ids,
    load_model,
    read_prompt,
    warn_of_cut,
)
from llamatap.context_options import ContextOptions
from llamatap.errors import ContextFullError, InvalidInputError
from llamatap.extraction.inputs import parse_window
from llamatap.layers import CONVENTIONS
from llamatap.storage.tensor_files import check_suffix

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("extract", help="write hidden states to a safetensors file")
    add_model(parser)
    source = add_prompt(parser, "--text", "the prompt")
    source.add_argument("--tokens", metavar="IDS", help="token ids, comma-separated")
    parser.add_argument(
        "--layers",
        default="-2",
        help='comma-separated: 0..n, negative from the end, "norm" (default: -2)',
    )
    parser.add_argument(
        "--convention",
        choices=list(CONVENTIONS),
        default="llamatap",
        help="the numbering of --layers (default: llamatap)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--max-length", type=int, help="truncate the prompt on the right to this many tokens")
    parser.add_argument("--window", metavar="START:STOP", help="write only these positions")
    parser.add_argument("--pool", choices=("mean", "last", "max"), help="pool the positions into one row")
    add_loading(parser)
    add_threads(parser)
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="write states even if they contain NaN or infinity"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.safetensors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import Extractor
    from llamatap.layers import translate_for

    check_suffix(arguments.output)
    layers = layer_ids(arguments.layers)
    window = None if arguments.window is None else parse_window("--window", arguments.window)
    with load_model(arguments) as model:
        prompt = read_prompt(model, arguments) if arguments.tokens is None else _token_ids(arguments.tokens)
        wanted = translate_for(model, layers, source=arguments.convention)
        start = time.perf_counter()
        with Extractor(model, **given(ContextOptions, arguments)) as extractor:
            try:
                states = extractor(
                    prompt,
                    wanted,
                    dtype=arguments.dtype,
                    max_length=arguments.max_length,
                    window=window,
                    pool=arguments.pool,
                )
            except ContextFullError as error:
                # The rest is advice for Python.
                found, _, _ = str(error).partition(";")
                raise ContextFullError(f"{found}; cut it with --max-length") from None
        seconds = time.perf_counter() - start
        warn_of_cut(states, "--max-length")
        states.save(arguments.output, allow_nonfinite=arguments.allow_nonfinite)
    print(
        f"{arguments.output}: hidden_states {states.array.shape} {arguments.dtype}, "
        f"layers {list(states.layers)}, {len(states)} tokens, {seconds:.2f} s"
    )
    return 0


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--tokens: expected integers, found {text!r}") from None
