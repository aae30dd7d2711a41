"""Speed of the two kinds of tap: the graph callback and the engine's hooks.

    python bench/taps.py MODEL [--rounds N] [--gpu-layers N]

Taps 4 layers that have a hook, over decodes of 1, 64, 512 and 4,096 tokens. Each round runs plain decodes and
both ways, one after another; the figures are medians of the rounds' ratios to the plain decode (above 1:
faster). Checks that both give the same bits. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, timed, write_results
from numpy.typing import NDArray

import llamatap as lt
from llamatap._native import native_of


def main() -> None:
    parser = argparse.ArgumentParser(description="The two ways of a tap.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: all")
    arguments = parser.parse_args()

    results: dict[str, Any] = {}
    with lt.Model(arguments.model, n_gpu_layers=arguments.gpu_layers) as model:
        layer_map = model.layer_map
        hooked = [slot for slot, has in enumerate(layer_map.hooked) if has]
        slots = [hooked[i * (len(hooked) - 1) // 3] for i in range(4)]
        device = ", ".join(model.devices) or machine()
        print(f"{device}; {model.path.name}; layers {slots}; medians of {arguments.rounds} rounds")
        context = model.context(n_ctx=8192, n_batch=4096)

        def plain(batch: lt.Batch) -> None:
            context.memory.clear()
            context.decode(batch)

        def tapped(batch: lt.Batch, way: str) -> NDArray[Any]:
            context.memory.clear()
            states, _ = native_of(context).decode_tapped(layer_map, slots, "float32", False, batch, way)
            return states

        def often(work: Callable[[], object], times: int) -> None:
            for _ in range(times):
                work()

        for size in (1, 64, 512, 4096):
            tokens = np.random.default_rng(0).integers(0, model.n_vocab, size).tolist()
            batch = lt.Batch.of(tokens)
            if not np.array_equal(tapped(batch, "hooks"), tapped(batch, "callback")):
                raise SystemExit("the two ways differ")
            ways: dict[str, Callable[[], object]] = {
                "plain": partial(plain, batch),
                "callback": partial(tapped, batch, "callback"),
                "hooks": partial(tapped, batch, "hooks"),
            }
            times = 32 if size <= 64 else 4
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, work in ways.items():
                    work()  # a change of hooks reserves memory anew
                    seconds[name].append(timed(partial(often, work, times)) / times)
            row = {
                name: statistics.median(a / b for a, b in zip(seconds["plain"], seconds[name], strict=True))
                for name in ways
            }
            results[str(size)] = row | {"plain_seconds": statistics.median(seconds["plain"])}
            print(f"{size:6} tokens   callback {row['callback']:5.2f}x   hooks {row['hooks']:5.2f}x")
    write_results("taps", {"device": device, "model": arguments.model.name, "results": results})


if __name__ == "__main__":
    main()
