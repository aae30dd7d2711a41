"""``llamatap extract``: hidden states into a safetensors file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llamatap.commands._options import (
    DTYPES,
    add_loading,
    add_threads,
    layer_ids,
    read_text,
    warn_of_cut,
)
from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import parse_window
from llamatap.layers import CONVENTIONS

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("extract", help="write hidden states to a safetensors file")
    parser.add_argument("model", type=Path, help="a GGUF file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the prompt")
    source.add_argument(
        "--file",
        type=Path,
        help="a UTF-8 file that holds the prompt, a newline at its end included; - for stdin",
    )
    source.add_argument("--chat", metavar="TEXT", help="a user's turn, put into the chat template")
    source.add_argument("--tokens", help="token ids, comma-separated")
    parser.add_argument(
        "--layers",
        default="-2",
        help='comma-separated: 0..n, negative from the end, "norm" (default: -2)',
    )
    parser.add_argument(
        "--convention",
        choices=list(CONVENTIONS),
        default="llamatap",
        help="how --layers counts (default: llamatap)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--max-length", type=int, help="cut the prompt on the right")
    parser.add_argument("--window", metavar="START:STOP", help="positions that are wanted")
    parser.add_argument("--pool", choices=("mean", "last", "max"))
    add_loading(parser)
    add_threads(parser)
    parser.add_argument("--allow-nonfinite", action="store_true", help="write NaN and infinity too")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.safetensors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import Extractor, Model
    from llamatap.layers import translate_for

    layers = layer_ids(arguments.layers)
    window = None if arguments.window is None else parse_window("--window", arguments.window)
    prompt: str | list[int]
    with Model(arguments.model, n_gpu_layers=arguments.gpu_layers, weights=arguments.weights) as model:
        if arguments.chat is not None:
            prompt = model.apply_chat_template([{"role": "user", "content": arguments.chat}])
        elif arguments.file is not None:
            prompt = read_text(arguments.file)
        elif arguments.tokens is not None:
            try:
                prompt = [int(item) for item in arguments.tokens.split(",")]
            except ValueError:
                raise InvalidInputError(f"--tokens: no integers: {arguments.tokens!r}") from None
        else:
            prompt = arguments.text
        wanted = translate_for(model, layers, source=arguments.convention)
        start = time.perf_counter()
        with Extractor(model, n_threads=arguments.threads) as extractor:
            states = extractor(
                prompt,
                wanted,
                dtype=arguments.dtype,
                max_length=arguments.max_length,
                window=window,
                pool=arguments.pool,
            )
        seconds = time.perf_counter() - start
        warn_of_cut(states, "--max-length")
        states.save(arguments.output, allow_nonfinite=arguments.allow_nonfinite)
    print(
        f"{arguments.output}: hidden_states {states.array.shape} {arguments.dtype}, "
        f"layers {list(states.layers)}, {len(states)} tokens, {seconds:.2f} s"
    )
    return 0
