"""``llamatap generate``: a prompt continued, with a drafter or without."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamatap._validate import integer
from llamatap.commands._options import add_threads, draft_length, read_text
from llamatap.errors import InvalidInputError

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="continue a prompt, with a drafter or without")
    parser.add_argument("model", type=Path, help="a GGUF file")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="the text to continue")
    text.add_argument(
        "--file", type=Path, help="a UTF-8 file that holds it, a newline at its end included; - for stdin"
    )
    text.add_argument("--chat", metavar="TEXT", help="a user's turn, put into the chat template")
    parser.add_argument(
        "--drafter",
        metavar="FILE",
        help="an EAGLE-3, MTP or DFlash file or a smaller model; ngram; or mtp for the model's own blocks",
    )
    parser.add_argument("--n-max", help="tokens of a draft, or auto (default: 8 with ngram, else 4)")
    parser.add_argument("--p-min", type=float, help="end a draft before less likely tokens")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=128, metavar="N", help="tokens at most (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the most likely token"
    )
    parser.add_argument("--top-k", type=int, default=0, help="draw of so many (default: 0, of all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw of so much (default: 1, of all)")
    parser.add_argument("--seed", type=int, help="of the random numbers (default: another one each time)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="what ends the text; may be given again"
    )
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1 for all")
    add_threads(parser)
    parser.add_argument("--stats", action="store_true", help="print what drafting did, to stderr")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import Generation, Model, generate
    from llamatap.drafting.model_drafters import DraftOptions, named_drafter

    if arguments.drafter is None and arguments.n_max is not None:
        raise InvalidInputError("--n-max is of drafts; there is no --drafter")
    options: DraftOptions = {}
    if arguments.n_max is not None:
        options["n_max"] = draft_length(arguments.n_max)
    if arguments.p_min is not None:
        options["p_min"] = arguments.p_min
    # Before a context is sized by it.
    max_tokens = integer("--max-tokens", arguments.max_tokens, 1)
    if arguments.p_min is not None and arguments.drafter in (None, "ngram"):
        raise InvalidInputError("--p-min needs a drafter with probabilities: a file, or mtp")
    final: Generation | None = None
    with Model(
        arguments.model, n_gpu_layers=arguments.gpu_layers, load_mtp=arguments.drafter == "mtp"
    ) as model:
        if arguments.chat is not None:
            prompt = model.apply_chat_template([{"role": "user", "content": arguments.chat}])
        else:
            prompt = arguments.prompt if arguments.file is None else read_text(arguments.file)
        tokens = model.tokenize(prompt)
        with model.context(n_ctx=len(tokens) + max_tokens, n_threads=arguments.threads) as context:
            drafter = None
            if arguments.drafter is not None:
                gpu_layers = arguments.gpu_layers
                drafter = named_drafter(context, arguments.drafter, n_gpu_layers=gpu_layers, **options)
            for event in generate(
                context,
                tokens,
                drafter,
                max_tokens=max_tokens,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
                stop=arguments.stop,
                stream=True,
            ):
                _print(event.text, end="")
                final = event.final or final
    _print()
    if arguments.stats and final is not None:
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
    return 0


def _print(text: str = "", end: str = "\n") -> None:
    """Write to a terminal of any encoding: characters that it lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
