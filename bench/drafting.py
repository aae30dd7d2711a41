"""Drafting: tokens per round, acceptance, speed, break-even, and the engine's own program beside ours.

    make bench-drafting
    python bench/drafting.py [--quick] [--part PART ...] [--eagle3 FILE] [--mtp FILE]
    python bench/drafting.py --synthetic 0.5 0.7 0.9 [--shape tiny|qwen3-4b]

Prompts are those of bench/prompts: 64 questions that SmolLM2 wrote itself (own.jsonl, sampled as by
`llamatap conversations`, with a seed of their own), and 64 written by hand: chat, code, lists, translation
(hand.jsonl). Parts:

- acceptance: the model's own answers are decoded without drafts, and after each token every drafter is asked
  what it would have drafted. So one pass over the prompts gives the rounds of all drafters and draft lengths,
  all along the same texts. Figures count answers only. They are exact: other processes do not change them.
- speed: tokens per second after the prompts, relative to no drafter, within interleaved rounds. "again" are
  the same prompts twice, with one drafter.
- cost: seconds of a pass of the target by its number of tokens, and the tokens per round from which drafts
  pay, without and with the drafter's own time.
- peer: the engine's own program, llama-speculative-simple, with the same files.
- overhead: time of generation in relation to the engine calls in it.
- together: eight sequences in one context against one after another, on a tiny model.
- memory: of a draft context, by number of sequences.

`--synthetic` measures what drafts with given acceptance rates would bring to a model of another shape, with
random weights: a rigged drafter replays the target's own tokens, each right with that probability, in the
time of an EAGLE-3 pass of that width. Parts may run one at a time: bench/results/<--output>.json keeps the
others. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common import RESULTS, machine, write_results
from draft_acceptance import acceptance
from draft_figures import markdown
from draft_peer import PEER, QUANTIZE, peer
from draft_setup import ROOT, NMax, Row, label_of, open_target
from draft_speed import cost, memory, overhead, speed, together
from draft_synthetic import synthetic
from rigged_drafts import SHAPES

import llamatap as lt
from llamatap.fetch import fetch

PARTS = ("acceptance", "speed", "cost", "peer", "overhead", "together", "memory")


def draft_length(text: str) -> NMax:
    return "auto" if text == "auto" else int(text)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, rounds and variants")
    parser.add_argument("--synthetic", nargs="+", type=float, metavar="RATE", help="only rigged drafts")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the target of --synthetic")
    parser.add_argument("--target", type=Path, help="a GGUF file (default: smollm2, fetched)")
    parser.add_argument("--weights", nargs="+", default=["f16", "file"], help="(default: f16 file)")
    models = ROOT / "models"
    for name, file in (("eagle3", "smollm2-eagle3.gguf"), ("mtp", "smollm2-mtp.safetensors")):
        known = models / file
        parser.add_argument(f"--{name}", type=Path, default=known if known.exists() else None, metavar="FILE")
    parser.add_argument(
        "--drafter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FILE"),
        help="another drafter's file; repeatable",
    )
    parser.add_argument("--drafters", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--n-max", nargs="+", type=draft_length, help="(default: 1 2 3 4 auto)")
    parser.add_argument("--temperatures", nargs="+", type=float, help="(default: 0 0.8)")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8], help="(default: 1 8)")
    parser.add_argument("--prompts", type=int, help="of each file (default: 64)")
    parser.add_argument("--tokens", type=int, help="of each answer (default: 128)")
    parser.add_argument("--rounds", type=int, help="interleaved (default: 5)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="-1 for all (default: 0)")
    parser.add_argument("--output", default="drafting", metavar="NAME", help="of the file in bench/results/")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.n_max = arguments.n_max or ([3, "auto"] if quick else [1, 2, 3, 4, "auto"])
    arguments.temperatures = arguments.temperatures or ([0.0] if quick else [0.0, 0.8])
    arguments.prompts = arguments.prompts or (16 if quick else 64)
    arguments.tokens = arguments.tokens or (64 if quick else 128)
    arguments.rounds = arguments.rounds or (2 if quick else 5)
    if quick and arguments.part is PARTS:
        arguments.part = ("acceptance", "speed", "cost")
    if not any(isinstance(n, int) for n in arguments.n_max):
        parser.error("--n-max needs a number, too")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """The parts' names and rows, as they come."""
    if arguments.synthetic:
        yield f"synthetic, {arguments.shape}", synthetic(arguments)
        return
    by_target: dict[str, Callable[[argparse.Namespace, str, lt.Model], list[Row]]] = {
        "acceptance": acceptance,
        "speed": speed,
        "cost": cost,
        "overhead": overhead,
    }
    others = {"peer": peer, "together": together, "memory": memory}
    if "peer" in arguments.part and not (PEER.exists() and QUANTIZE.exists()):
        print(f"no {PEER.name}: `make bench-drafting` builds it\n", file=sys.stderr)
        others.pop("peer")
    found: dict[str, list[Row]] = {}
    for weights in arguments.weights:
        with open_target(arguments, weights) as model:
            for part in arguments.part:
                if part in by_target:
                    found.setdefault(part, []).extend(
                        by_target[part](arguments, label_of(model, weights), model)
                    )
    yield from found.items()
    for part in arguments.part:
        if part in others:
            yield part, others[part](arguments)


def tables(part: str, rows: Sequence[Row]) -> Iterator[str]:
    """The rows as tables; for acceptance without the kinds of prompts by hand, and the first 8 positions."""
    if part == "acceptance":
        hidden = ("rounds", "drafted", "generated tokens")
        rows = [
            {
                key: value[:8] if isinstance(value, list) else value
                for key, value in row.items()
                if key not in hidden
            }
            for row in rows
            if row["prompts"] in ("own", "hand")
        ]
    # Rows with other columns have a table of their own.
    while rows:
        columns = set(rows[0])
        yield markdown(row for row in rows if set(row) == columns)
        rows = [row for row in rows if set(row) != columns]


def main() -> None:
    arguments = read_arguments()
    if arguments.target is None and not arguments.synthetic:
        arguments.target = fetch("smollm2")
    path = RESULTS / f"{arguments.output}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    settings = {key: value for key, value in vars(arguments).items() if key not in ("part", "output")}
    for part, rows in measure(arguments):
        print(f"## {part}\n")
        for table in tables(part, rows):
            print(f"{table}\n", flush=True)
        results[part] = {
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "settings": json.loads(json.dumps(settings, default=str)),
            "rows": rows,
        }
        write_results(arguments.output, results)


if __name__ == "__main__":
    main()
