"""``llamatap generate``: continue a prompt, with or without a drafter."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from llamatap._options import read_options
from llamatap._validate import integer
from llamatap.commands._arguments import (
    add_loading,
    add_model,
    add_numbers,
    add_option,
    add_prompt,
    add_threads,
    draft_length,
    given,
    load_model,
    read_prompt,
)
from llamatap.context_options import ContextOptions
from llamatap.drafting.model_drafters import DraftOptions, named_drafter
from llamatap.errors import InvalidInputError
from llamatap.generation.options import GenerateOptions, check_trained_length
from llamatap.sampler import SamplingOptions

if TYPE_CHECKING:
    from llamatap import Generation

__all__ = ["add", "run"]

_MAX_TOKENS: int = read_options(GenerateOptions)["max_tokens"].default


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="continue a prompt, with or without a drafter")
    add_model(parser)
    add_prompt(parser, "--prompt", "the text to continue")
    parser.add_argument(
        "--drafter",
        metavar="FILE",
        help="an EAGLE-3, MTP or DFlash file, an mtp.safetensors or a smaller model; ngram or suffix, which "
        "need only the text; or mtp for the model's own blocks",
    )
    parser.add_argument(
        "--n-max",
        metavar="N",
        help="draft length in tokens, or auto (default: 8 with ngram, 64 with suffix, else 4)",
    )
    add_option(parser, DraftOptions, "p_min", text="end a draft before tokens below this probability")
    add_option(
        parser,
        GenerateOptions,
        "max_tokens",
        "-n",
        "--max-tokens",
        text=f"maximum number of generated tokens (default: {_MAX_TOKENS})",
    )
    add_numbers(parser.add_argument_group("sampling"), SamplingOptions)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop string; repeatable")
    add_loading(parser, weights=False)
    add_threads(parser)
    parser.add_argument("--stats", action="store_true", help="print drafting statistics to stderr")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import generate

    draft_options = _draft_options(arguments)
    # Checked before a context is sized by it.
    max_tokens = _MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens
    integer("--max-tokens", max_tokens, 1)
    final: Generation | None = None
    with load_model(arguments, load_mtp=arguments.drafter == "mtp") as model:
        tokens = model.tokenize(read_prompt(model, arguments))
        check_trained_length(
            model, len(tokens), "the prompt", "generate in Python, in a context of a larger n_ctx"
        )
        context_options = given(ContextOptions, arguments)
        with model.context(n_ctx=len(tokens) + max_tokens, **context_options) as context:
            drafter = None
            if arguments.drafter is not None:
                n_gpu_layers = arguments.n_gpu_layers
                drafter = named_drafter(
                    context, arguments.drafter, n_gpu_layers=n_gpu_layers, **draft_options
                )
            options = given(GenerateOptions, arguments)
            for event in generate(context, tokens, drafter, stream=True, **options):
                _print(event.text, end="")
                final = event.final or final
    _print()
    if arguments.stats and final is not None:
        _print_stats(final)
    return 0


def _draft_options(arguments: argparse.Namespace) -> DraftOptions:
    if arguments.drafter is None and arguments.n_max is not None:
        raise InvalidInputError("--n-max is the draft length, and needs --drafter")
    if arguments.p_min is not None and arguments.drafter in (None, "ngram"):
        raise InvalidInputError("--p-min needs a drafter with probabilities: a file, mtp or suffix")
    options: DraftOptions = {}
    if arguments.n_max is not None:
        options["n_max"] = draft_length(arguments.n_max)
    if arguments.p_min is not None:
        options["p_min"] = arguments.p_min
    return options


def _print(text: str = "", end: str = "\n") -> None:
    """Print in the terminal's encoding, with escapes for characters that it lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


def _print_stats(final: Generation) -> None:
    stats = final.stats
    seconds = stats.target_seconds + stats.draft_seconds + stats.sampling_seconds
    each = f", {stats.tokens_per_round:.2f} tokens each" if stats.rounds else ""
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
    for label, value in (
        ("prompt", f"{stats.prompt_tokens} tokens"),
        (
            "generated",
            f"{stats.tokens} tokens ({final.finish_reason}), {stats.tokens / seconds:.1f} a second",
        ),
        ("rounds", f"{stats.rounds}{each}"),
        ("drafted", f"{stats.drafted} tokens, {stats.accepted} accepted"),
        ("by position", by_position or "-"),
        (
            "seconds",
            f"target {stats.target_seconds:.3f}, draft {stats.draft_seconds:.3f}, "
            f"sampling {stats.sampling_seconds:.3f}",
        ),
    ):
        print(f"{label:>12}  {value}", file=sys.stderr)
