"""Generation and extraction beside processes that keep CPUs busy.

    python bench/contention.py [MODEL] [--rounds N] [--loops 0 1 2] [--threads N] [--cgroup FOLDER]

Two jobs: 3 prompts of 24 generated tokens each, and the extraction of 512 tokens. Each round runs both
alone and beside busy loops (processes that never sleep); the figures are medians over the rounds, as ratios
to the time alone. ``--cgroup`` puts the loops into a cgroup that it makes (as root; /sys/fs/cgroup/cpu/NAME
with version 1, /sys/fs/cgroup/NAME with version 2): the kernel then shares CPUs between groups, as between
containers. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from common import machine, timed, write_results

import llamatap as lt
from llamatap.fetch import fetch

PROMPTS = ["The capital of France is", "A recipe for bread:", "Once upon a time"]


@contextlib.contextmanager
def busy(n_loops: int, cgroup: Path | None) -> Iterator[None]:
    """Run `n_loops` processes that never sleep."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_loops)]
    try:
        if cgroup:
            cgroup.mkdir(exist_ok=True)
            for loop in loops:
                (cgroup / "cgroup.procs").write_text(str(loop.pid))
        # Wait until they run and the kernel has placed them.
        time.sleep(0.5 if loops else 0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        if cgroup:
            cgroup.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation and extraction beside busy processes.")
    parser.add_argument("model", type=Path, nargs="?", help="default: SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loops", type=int, nargs="*", default=[1, 2], help="numbers of busy processes")
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--cgroup", type=Path, help="a cgroup to make, for the loops")
    arguments = parser.parse_args()

    with lt.Model(arguments.model or fetch("smollm2")) as model:
        n_threads = arguments.threads
        context = model.context(n_ctx=1024, n_seq_max=3, n_threads=n_threads)
        extractor = lt.Extractor(model, n_threads=n_threads)
        tokens = np.random.default_rng(0).integers(0, model.n_vocab, 512).tolist()
        jobs: dict[str, Callable[[], object]] = {
            "generate": lambda: list(lt.generate(context, PROMPTS, max_tokens=24, ignore_eos=True)),
            "extract": lambda: extractor(tokens, layers=[-2]),
        }
        seconds: dict[tuple[str, int], list[float]] = {}
        for work in jobs.values():
            work()
        for _ in range(arguments.rounds):
            for n_loops in (0, *arguments.loops):
                with busy(n_loops, arguments.cgroup if n_loops else None):
                    for name, work in jobs.items():
                        seconds.setdefault((name, n_loops), []).append(timed(work))
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        host = f"{machine()}, {len(os.sched_getaffinity(0))} CPUs, {context.n_threads} threads"
        print(f"{host}; {model.path.name}; medians of {arguments.rounds} rounds")
        for name in jobs:
            alone = medians[name, 0]
            ratios = "".join(f"   beside {n}: {medians[name, n] / alone:6.2f}x" for n in arguments.loops)
            print(f"{name:9} alone {alone:6.3f} s{ratios}")
    results = {
        name: {
            str(n): {"seconds": seconds[name, n], "ratio": medians[name, n] / medians[name, 0]}
            for n in (0, *arguments.loops)
        }
        for name in jobs
    }
    write_results("contention", {"machine": host, "cgroup": arguments.cgroup is not None, "results": results})


if __name__ == "__main__":
    main()
