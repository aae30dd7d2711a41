"""``llamatap info``: describe a model file, and try its layers."""

from __future__ import annotations

import argparse
import json
import sys

from llamatap.commands._arguments import add_model, add_threads

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="describe a model, and try its layers in a child process")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import probe
    from llamatap.chat.unparsed_tokens import warning_text

    found = probe(arguments.model, n_threads=arguments.n_threads)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0 if found.loads else 1
    if not found.loads:
        print(f"llamatap: {found.error}", file=sys.stderr)
        return 1
    n = found.n_layer
    nonfinite = [str(layer.layer) for layer in found.layers if not layer.finite]
    if not found.states:
        layers = f"none: {found.error}"
    else:
        layers = f"0..{n} (0 enters the first block, {n} leaves the last one)"
        if found.layers[-1].layer == "norm":
            layers += ', and "norm"'
        if nonfinite:
            layers += f"; NOT FINITE: {', '.join(nonfinite)}"
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
    if found.unparsed_tokens:
        print(f"{'WARNING':>16}  {warning_text(found.unparsed_tokens)}")
    return 0
