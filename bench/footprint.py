"""Import time, and memory for extracting a long prompt.

    python bench/footprint.py [MODEL] [--tokens N] [--rounds N]

Each figure comes from a separate process: the time that `import numpy` and `import llamatap` take, in turn,
five times a round, and the largest resident memory of a plain decode and of an extraction of one layer.
Medians; writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from common import machine, write_results

import llamatap as lt
from llamatap.fetch import fetch

IMPORT = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
PEAK = """
import sys
import numpy as np
import llamatap as lt
with lt.Model(sys.argv[1]) as model:
    tokens = np.random.default_rng(0).integers(100, model.n_vocab, int(sys.argv[2]))
    {0}
# getrusage reports for a child at least its parent's peak.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""
PLAIN = "model.context(n_ctx=len(tokens)).decode(lt.Batch.of(tokens.tolist()))"
EXTRACT = "states = lt.extract(model, tokens, layers=[-2], max_length=len(tokens))"


def measured(code: str, *arguments: str) -> float:
    command = [sys.executable, "-c", code, *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="What importing and extracting take.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = str(arguments.model or fetch("smollm2"))

    imports = {
        "import numpy": (IMPORT.format("numpy"),),
        "import llamatap": (IMPORT.format("llamatap"),),
    }
    peaks = {
        "plain": (PEAK.format(PLAIN), model, str(arguments.tokens)),
        "extract": (PEAK.format(EXTRACT), model, str(arguments.tokens)),
    }
    found: dict[str, list[float]] = {name: [] for name in imports | peaks}
    # Imports first and in turn: after a long computation the first import would find cold caches.
    for work, rounds in ((imports, 5 * arguments.rounds), (peaks, arguments.rounds)):
        for _ in range(rounds):
            for name, command in work.items():
                found[name].append(measured(*command))
    median = {name: statistics.median(values) for name, values in found.items()}

    rounds = f"{arguments.rounds} rounds (imports: of {5 * arguments.rounds})"
    print(f"{machine()}; {Path(model).name}; medians of {rounds}")
    more = (median["import llamatap"] - median["import numpy"]) * 1e3
    print(f"import llamatap: {median['import llamatap'] * 1e3:.0f} ms, {more:.0f} ms more than numpy")
    with lt.Model(model, vocab_only=True) as loaded:
        result = arguments.tokens * loaded.metadata[f"{loaded.arch}.embedding_length"] * 4 / 2**20
    more = (median["extract"] - median["plain"]) / 1024
    print(
        f"{arguments.tokens} tokens: plain decode {median['plain'] / 1024:.0f} MiB, "
        f"extract of one layer {more:+.0f} MiB (the result: {result:.0f} MiB)"
    )
    write_results("footprint", {"machine": machine(), "tokens": arguments.tokens, "medians": median})


if __name__ == "__main__":
    main()
