"""Tokens per second for all hidden states, relative to transformers, by file type, on the CPU.

    nox -s bench-transformers
    python bench/against_transformers.py --peer PYTHON [--model smollm2|gemma3] [--rounds N] [--tokens N]

Both compute H_0..H_n and no output head, with the same number of threads. transformers has the weights of
the float32 file, in float32 and in bfloat16, and runs in processes of its own, for PyTorch and the engine
would fight for the cores in one. Each round runs every variant once, in an order of its own, so that slow
phases of the machine fall on all of them; only one computes at a time. The ratios are medians of those within
a round: BF16 to transformers in bfloat16, the others to transformers in float32. Q4_1 also runs with its
weights converted as they are loaded. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

import llamatap as lt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import machine, timed, write_results  # noqa: E402

from fidelity.files import FILE_TYPES, f32_file, quantised  # noqa: E402
from fidelity.peer import Transformers  # noqa: E402

PEERS = {"transformers float32": "float32", "transformers bfloat16": "bfloat16"}
CONVERTED: list[Literal["f32", "f16", "bf16"]] = ["f32", "f16", "bf16"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Tokens per second of all hidden states, beside transformers."
    )
    parser.add_argument("--peer", type=Path, required=True, help="a python with torch and transformers")
    parser.add_argument("--model", choices=["smollm2", "gemma3"], default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    source = f32_file(arguments.model)
    work: dict[str, Callable[[], float]] = {}
    seconds: dict[str, list[float]] = {}
    with ExitStack() as held:
        versions: dict[str, str] = {}
        extractors: dict[str, lt.Extractor] = {}
        for file_type in FILE_TYPES:
            path = held.enter_context(quantised(source, file_type))
            for weights in (None, *CONVERTED) if file_type == "Q4_1" else (None,):
                model = held.enter_context(lt.Model(path, weights=weights))
                name = file_type if weights is None else f"{file_type}, weights={weights}"
                extractors[name] = held.enter_context(lt.Extractor(model, n_threads=arguments.threads))
        tokens = np.random.default_rng(0).integers(100, model.n_vocab, arguments.tokens).tolist()
        layers = list(range(model.n_layer + 1))
        for name, dtype in PEERS.items():
            peer = held.enter_context(
                Transformers(arguments.peer, source, dtype=dtype, attention="sdpa", threads=arguments.threads)
            )
            versions = peer.versions
            work[name] = partial(peer.seconds, tokens)
        for name, extractor in extractors.items():
            work[name] = partial(timed, partial(extractor, tokens, layers))
        for run in work.values():
            run()
        seconds = {name: [] for name in work}
        shuffled = random.Random(0)
        for _ in range(arguments.rounds):
            for name in shuffled.sample(list(work), len(work)):
                seconds[name].append(work[name]())

    head = {
        "machine": machine(),
        "model": arguments.model,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "build": lt.build_config(),
        **versions,
    }
    print(
        f"{head['machine']}; {arguments.model}, all hidden states of {arguments.tokens} tokens, "
        f"{arguments.threads} threads; medians of {arguments.rounds} rounds; "
        + ", ".join(f"{package} {version}" for package, version in versions.items())
    )
    results = {}
    for name, times in seconds.items():
        speed = statistics.median(arguments.tokens / s for s in times)
        row: dict[str, object] = {"tokens_per_second": speed, "seconds": times}
        line = f"{name:24} {speed:8.0f} tokens/s"
        if name not in PEERS:
            base = f"transformers {'bfloat16' if name.lower().endswith('bf16') else 'float32'}"
            ratio = statistics.median(b / a for a, b in zip(times, seconds[base], strict=True))
            row |= {"ratio": ratio, "to": base}
            line += f"   {ratio:5.2f}x {base}"
        results[name] = row
        print(line)
    write_results(f"against_transformers_{arguments.model}", {**head, "results": results})


if __name__ == "__main__":
    main()
