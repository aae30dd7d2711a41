"""Cost of capture, and time saved by early exit.

    python bench/capture.py [MODEL] [--rounds N] [--tokens N] [--short N] [--threads N] [--gpu-layers N]

Each round runs every variant once, in a random order (a variant is slower after some than after others),
so that slow phases of the machine affect all of them; the figures are medians of the rounds' ratios to plain
decoding in the same round. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import machine, timed, write_results

import llamatap as lt
from llamatap.fetch import fetch

SHORT = "extract [-2] of short prompts, a token"


def variants(
    model: lt.Model, tokens: list[int], short: list[list[int]], threads: int | None
) -> tuple[dict[str, tuple[str, Callable[[], object]]], Callable[[], None]]:
    """Name -> (its baseline, the work); and the untimed preparation of each work."""
    n = model.n_layer
    four = [2, n // 2, n - 3, n]
    every = list(range(n + 1))
    context = model.context(n_ctx=len(tokens) + 512, n_threads=threads)
    batch = lt.Batch.of(tokens)
    extractor = lt.Extractor(model, n_threads=threads)

    def prefill(layers: list[lt.LayerId] | None, rows: str = "outputs") -> Callable[[], object]:
        def work() -> None:
            if layers is None:
                context.decode(batch)
            else:
                with context.tap(layers, rows=rows):  # type: ignore[arg-type]
                    context.decode(batch)

        return work

    def steps(layers: list[lt.LayerId] | None) -> Callable[[], object]:
        def loop() -> None:
            for position in range(64):
                context.decode(lt.Batch.of([tokens[position]], pos0=position))

        def work() -> None:
            if layers is None:
                loop()
            else:
                with context.tap(layers):
                    loop()

        return work

    work: dict[str, tuple[str, Callable[[], object]]] = {
        "plain prefill": ("", prefill(None)),
        "tap of 4 layers, all rows": ("plain prefill", prefill([*four], "all")),
        "tap of 4 layers, outputs": ("plain prefill", prefill([*four])),
        "extract [n//2]": ("plain prefill", lambda: extractor(tokens, [n // 2])),
        "extract [-2]": ("plain prefill", lambda: extractor(tokens, [-2])),
        "extract all layers": ("plain prefill", lambda: extractor(tokens, every)),
        "64 plain steps": ("", steps(None)),
        "64 steps, tap of 4 layers": ("64 plain steps", steps([*four])),
    }
    if short:
        work[SHORT] = ("extract [-2], a token", lambda: extractor(short, [-2]))
    return work, context.memory.clear


def main() -> None:
    parser = argparse.ArgumentParser(description="What capture costs, and what early exit saves.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--short", type=int, default=200, help="how many prompts of 8 to 60 tokens; 0: none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int, default=0, help="-1: all")
    arguments = parser.parse_args()

    path = arguments.model or fetch("smollm2")
    with lt.Model(path, n_gpu_layers=arguments.gpu_layers) as model:
        tokens = np.random.default_rng(0).integers(100, model.n_vocab, arguments.tokens).tolist()
        short = [tokens[2 * i % 450 :][: 8 + 2 * i % 53] for i in range(arguments.short)]
        work, prepare = variants(model, tokens, short, arguments.threads)
        for _, run in work.values():
            prepare()
            run()
        seconds: dict[str, list[float]] = {name: [] for name in work}
        shuffled = random.Random(0)
        for _ in range(arguments.rounds):
            for name in shuffled.sample(list(work), len(work)):
                prepare()
                seconds[name].append(timed(work[name][1]))
        head = {
            "machine": machine(),
            "model": model.path.name,
            "tokens": len(tokens),
            "rounds": arguments.rounds,
            "build": lt.build_config(),
        }
    seconds["extract [-2], a token"] = [s / len(tokens) for s in seconds["extract [-2]"]]
    if short:
        seconds[SHORT] = [s / sum(map(len, short)) for s in seconds[SHORT]]

    print(f"{head['machine']}; {head['model']}; {len(tokens)} tokens; medians of {arguments.rounds} rounds")
    results = {}
    for name, (base, _) in work.items():
        row: dict[str, object] = {"seconds": statistics.median(seconds[name])}
        line = f"{name:48} {statistics.median(seconds[name]):10.5f} s"
        if base:
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))
            row |= {"ratio": ratio, "to": base}
            line += f"   {ratio:5.2f}x {base}"
        results[name] = row
        print(line)
    write_results("capture", {**head, "results": results})


if __name__ == "__main__":
    main()
