"""The command line: ``llamatap`` or ``python -m llamatap``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from llamatap._check import integer
from llamatap.errors import Error, InvalidInputError
from llamatap.layers import CONVENTIONS, LayerId

__all__ = ["main"]

# Their values may begin with a minus sign, which argparse would take for an option.
_SIGNED = ("--layers", "--window", "--text", "--tokens", "--chat", "--prompt", "--stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit status."""
    parsed = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has enough. What is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a program that SIGPIPE ends
    except (Error, OSError) as error:
        print(f"llamatap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _joined(arguments: Sequence[str]) -> list[str]:
    given = iter(arguments)
    joined = []
    for argument in given:
        value = next(given, None) if argument in _SIGNED else None
        joined.append(argument if value is None else f"{argument}={value}")
    return joined


class _Version(argparse.Action):
    """Prints the version; importing the core for it is left until someone asks."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from llamatap import __version__

        print(f"llamatap {__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llamatap", description="Hidden states of any layer of any GGUF model."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info", help="what a model is and what its layers give, tried in a child process"
    )
    info.add_argument("model", type=Path, help="a GGUF file")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_info)

    extract = commands.add_parser("extract", help="write hidden states to a safetensors file")
    extract.add_argument("model", type=Path, help="a GGUF file")
    source = extract.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the prompt")
    source.add_argument(
        "--file",
        type=Path,
        help="a UTF-8 file that holds the prompt, a newline at its end included; - for stdin",
    )
    source.add_argument("--chat", metavar="TEXT", help="a user's turn, put into the chat template")
    source.add_argument("--tokens", help="token ids, comma-separated")
    extract.add_argument(
        "--layers",
        default="-2",
        help='comma-separated: 0..n, negative from the end, "norm" (default: -2)',
    )
    extract.add_argument(
        "--convention",
        choices=list(CONVENTIONS),
        default="llamatap",
        help="how --layers counts (default: llamatap)",
    )
    extract.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    extract.add_argument("--max-length", type=int, help="cut the prompt on the right")
    extract.add_argument("--window", metavar="START:STOP", help="positions that are wanted")
    extract.add_argument("--pool", choices=("mean", "last", "max"))
    extract.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1 for all")
    extract.add_argument("--weights", choices=("f32", "f16", "bf16"), help="convert the weights first")
    extract.add_argument("--allow-nonfinite", action="store_true", help="write NaN and infinity too")
    extract.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.safetensors")
    extract.set_defaults(run=_extract)

    generate = commands.add_parser("generate", help="continue a prompt, with a drafter or without")
    generate.add_argument("model", type=Path, help="a GGUF file")
    text = generate.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="the text to continue")
    text.add_argument(
        "--file", type=Path, help="a UTF-8 file that holds it, a newline at its end included; - for stdin"
    )
    text.add_argument("--chat", metavar="TEXT", help="a user's turn, put into the chat template")
    generate.add_argument(
        "--drafter",
        metavar="FILE",
        help="an EAGLE-3, MTP or DFlash file or a smaller model; ngram; or mtp for the model's own blocks",
    )
    generate.add_argument("--n-max", help="tokens of a draft, or auto (default: 8 with ngram, else 4)")
    generate.add_argument("--p-min", type=float, help="end a draft before less likely tokens")
    generate.add_argument(
        "-n", "--max-tokens", type=int, default=128, metavar="N", help="tokens at most (default: 128)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the most likely token"
    )
    generate.add_argument("--top-k", type=int, default=0, help="draw of so many (default: 0, of all)")
    generate.add_argument("--top-p", type=float, default=1.0, help="draw of so much (default: 1, of all)")
    generate.add_argument("--seed", type=int, help="of the random numbers (default: another one each time)")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="what ends the text; may be given again"
    )
    generate.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1 for all")
    generate.add_argument("--stats", action="store_true", help="print what drafting did, to stderr")
    generate.set_defaults(run=_generate)

    fetch = commands.add_parser("fetch", help="bring a small model into the cache folder")
    fetch.add_argument("name", help="smollm2")
    fetch.set_defaults(run=_fetch)

    demo = commands.add_parser("demo", help="show how a prompt changes over the layers")
    demo.add_argument("--model", type=Path, help="a GGUF file (default: smollm2, fetched)")
    demo.add_argument("--text", help="the prompt")
    demo.add_argument("-o", "--output", type=Path, default=Path("demo.png"), metavar="FILE.png")
    demo.set_defaults(run=_demo)

    build = commands.add_parser("build-config", help="how this build was made (JSON)")
    build.set_defaults(run=_build_config)
    return parser


def _layers(text: str) -> list[LayerId]:
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


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise InvalidInputError(f"--window: expected START:STOP, found {text!r}") from None


def _info(arguments: argparse.Namespace) -> int:
    from llamatap import probe

    found = probe(arguments.model)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0 if found.loads else 1
    if not found.loads:
        print(f"llamatap: {found.error}", file=sys.stderr)
        return 1
    n = found.n_layer
    no_number = [str(layer.layer) for layer in found.layers if not layer.finite]
    if not found.states:
        layers = f"none: {found.error}"
    else:
        layers = f"0..{n} (0 enters the first block, {n} leaves the last one)"
        if found.layers[-1].layer == "norm":
            layers += ', and "norm"'
        if no_number:
            layers += f"; NOT FINITE: {', '.join(no_number)}"
    for label, value in (
        ("file", found.path),
        ("model", f"{found.name or '(unnamed)'} ({found.description})"),
        ("parameters", f"{found.n_params:,} in {(found.size_bytes or 0) / 2**20:,.1f} MiB"),
        ("blocks", n),
        ("width", found.n_embd),
        ("vocabulary", f"{found.n_vocab:,}"),
        ("trained context", f"{found.n_ctx_train:,} tokens"),
        ("chat template", "yes" if found.chat_template else "no"),
        ("layers", layers),
    ):
        print(f"{label:>16}  {value}")
    return 0


def _read_text(path: Path) -> str:
    if str(path) == "-" and sys.stdin is None:
        raise InvalidInputError("--file -: there is no standard input")
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: {error}") from error


def _extract(arguments: argparse.Namespace) -> int:
    from llamatap import Extractor, Model
    from llamatap.layers import translate

    layers = _layers(arguments.layers)
    window = _window(arguments.window)
    prompt: str | list[int]
    with Model(arguments.model, n_gpu_layers=arguments.gpu_layers, weights=arguments.weights) as model:
        if arguments.chat is not None:
            prompt = model.apply_chat_template([{"role": "user", "content": arguments.chat}])
        elif arguments.file is not None:
            prompt = _read_text(arguments.file)
        elif arguments.tokens is not None:
            try:
                prompt = [int(item) for item in arguments.tokens.split(",")]
            except ValueError:
                raise InvalidInputError(f"--tokens: no integers: {arguments.tokens!r}") from None
        else:
            prompt = arguments.text
        wanted = translate(
            layers,
            source=arguments.convention,
            n_layer=model.n_layer,
            final_norm=model.layer_map.has_norm,
        )
        start = time.perf_counter()
        with Extractor(model) as extractor:
            states = extractor(
                prompt,
                wanted,
                dtype=arguments.dtype,
                max_length=arguments.max_length,
                window=window,
                pool=arguments.pool,
            )
        seconds = time.perf_counter() - start
        states.save(arguments.output, allow_nonfinite=arguments.allow_nonfinite)
    print(
        f"{arguments.output}: hidden_states {states.array.shape} {arguments.dtype}, "
        f"layers {list(states.layers)}, {len(states)} tokens, {seconds:.2f} s"
    )
    return 0


def _print(text: str = "", end: str = "\n") -> None:
    """To a terminal of whatever encoding: what it lacks is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


def _generate(arguments: argparse.Namespace) -> int:
    from llamatap import (
        Generation,
        Model,
        MtpDrafter,
        NGramDrafter,
        SpeculativeContext,
        generate,
        load_drafter,
    )
    from llamatap.drafters import Drafter
    from llamatap.model_drafters import DraftOptions

    if arguments.drafter is None and arguments.n_max is not None:
        raise InvalidInputError("--n-max is of drafts; there is no --drafter")
    n_max: int | Literal["auto"]
    try:
        n_max = "auto" if arguments.n_max == "auto" else int(arguments.n_max or 4)
    except ValueError:
        raise InvalidInputError(f"--n-max: expected a number or auto, found {arguments.n_max!r}") from None
    # Before a context is sized by it.
    max_tokens = integer("--max-tokens", arguments.max_tokens, 1)
    if arguments.p_min is not None and arguments.drafter in (None, "ngram"):
        raise InvalidInputError("--p-min needs a drafter with probabilities: a file, or mtp")
    options: DraftOptions = {"n_max": n_max, "p_min": arguments.p_min or 0.0}
    own_blocks = arguments.drafter == "mtp"
    final: Generation | None = None
    with Model(arguments.model, n_gpu_layers=arguments.gpu_layers, load_mtp=own_blocks) as model:
        if arguments.chat is not None:
            prompt = model.apply_chat_template([{"role": "user", "content": arguments.chat}])
        else:
            prompt = arguments.prompt if arguments.file is None else _read_text(arguments.file)
        tokens = model.tokenize(prompt)
        with model.context(n_ctx=len(tokens) + max_tokens) as context:
            drafter: Drafter | None = None
            if arguments.drafter == "ngram":
                drafter = NGramDrafter() if arguments.n_max is None else NGramDrafter(n_max=n_max)
            elif own_blocks:
                blocks = SpeculativeContext(context, model)
                drafter = MtpDrafter(blocks, **options)
            elif arguments.drafter is not None:
                draft = Model(arguments.drafter, n_gpu_layers=arguments.gpu_layers, load_mtp=True)
                drafter = load_drafter(context, draft, **options)
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


def _fetch(arguments: argparse.Namespace) -> int:
    from llamatap.fetch import fetch

    print(fetch(arguments.name))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from llamatap.demo import run

    run(arguments.model, arguments.text, arguments.output)
    return 0


def _build_config(arguments: argparse.Namespace) -> int:
    from llamatap import build_config

    print(json.dumps(build_config(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
