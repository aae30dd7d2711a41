"""``llamatap encode``: write the text-encoder states of a prompt for an image model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llamatap.commands._arguments import (
    DTYPES,
    add_loading,
    add_model,
    add_threads,
    given,
    load_model,
    warn_of_cut,
)
from llamatap.context_options import ContextOptions

if TYPE_CHECKING:
    from llamatap import States

__all__ = ["add", "run", "write"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "encode", help="write the text-encoder states of a prompt for an image model"
    )
    add_model(parser)
    parser.add_argument("prompt", help="the prompt of the picture")
    parser.add_argument(
        "--preset", required=True, metavar="NAME", help="z-image, or the path of a TOML file of your own"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add_loading(parser)
    add_threads(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.safetensors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import Extractor
    from llamatap.presets import load_preset
    from llamatap.storage.tensor_files import check_suffix

    check_suffix(arguments.output)
    preset = load_preset(arguments.preset)
    with load_model(arguments) as model:
        start = time.perf_counter()
        with Extractor(model, **given(ContextOptions, arguments)) as extractor:
            states = preset.encode(extractor, arguments.prompt, dtype=arguments.dtype)
        seconds = time.perf_counter() - start
        warn_of_cut(states, f"max_length of preset {preset.name}")
        shape = write(arguments.output, states)
    print(
        f"{arguments.output}: prompt_embeds {shape} {arguments.dtype}, preset {preset.name}, "
        f"layers {list(states.layers)}, {seconds:.2f} s"
    )
    return 0


def write(path: Path, states: States) -> tuple[int, ...]:
    """Write a file for image pipelines, and return the shape of its ``prompt_embeds``.

    ``prompt_embeds`` is ``(n, n_embd)``, or ``(n, n_layers, n_embd)`` with several layers; ``attention_mask``
    is int64 ``(n,)``, ones; the metadata is the provenance and the token ids (``token_ids``).

    :raises InvalidInputError: the states contain NaN or infinity; nothing was written.
    :raises OSError: the file cannot be written.
    """
    import numpy as np

    from llamatap.states import check_finite
    from llamatap.storage.tensor_files import write_tensors

    check_finite(states)
    embeds = states.array[:, 0] if len(states.layers) == 1 else states.array
    mask = np.ones(len(states), np.int64)
    about = {**states.provenance, "token_ids": states.tokens.tolist()}
    write_tensors(path, {"prompt_embeds": embeds, "attention_mask": mask}, about)
    shape: tuple[int, ...] = embeds.shape
    return shape
