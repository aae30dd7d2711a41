"""Time of writing a data set to disk, end to end, relative to extracting the same prompts into memory.

    python bench/dataset.py [MODEL] [--rounds N] [--samples N] [--layout NAME] [--gpu-layers N]

Each round extracts the prompts as one list, and then writes the data set from a file of conversations:
rendering, masks, tokenisation, computing and files, without loading the model. A figure is the median of the
rounds' ratios to the time in memory (1: as long). Writes bench/results/dataset.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, timed, write_results

import llamatap as lt
from llamatap import dataset
from llamatap.fetch import fetch

#: The files of states in all layouts.
STATES = ("hs_*.safetensors", "data_*.ckpt", "layer_*.npy")
WORDS = "the of and to in is that it was for on are with as his they be at one have this from or had by"


def write_chats(path: Path, count: int, seed: int) -> None:
    """Conversations of two turns each, of 20 to 400 words."""
    rng = np.random.default_rng(seed)

    def said(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS.split(), rng.integers(low, high)))

    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(2):
                messages.append({"role": "user", "content": said(5, 50)})
                messages.append({"role": "assistant", "content": said(5, 150)})
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="A data set beside extraction into memory.")
    parser.add_argument("model", type=Path, nargs="?", help="default: smollm2, fetched")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--layout", choices=list(dataset.LAYOUTS), default="speculators")
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--gpu-layers", type=int, default=0)
    arguments = parser.parse_args()

    path = arguments.model or fetch("smollm2")
    options = dataset.Options(layout=arguments.layout, batch_tokens=arguments.batch_tokens)
    seconds: dict[str, list[float]] = {"memory": [], "preparation": [], "run": []}
    with (
        lt.Model(path, n_gpu_layers=arguments.gpu_layers) as model,
        lt.Extractor(model, n_ubatch=arguments.batch_tokens) as extractor,
        tempfile.TemporaryDirectory() as scratch,
    ):
        chats = Path(scratch) / "chats.jsonl"
        write_chats(chats, arguments.samples, seed=0)
        job = dataset.Job(model, chats, Path(scratch) / "none", options)
        prompts = [sample.tokens for sample in job.samples]
        in_memory = partial(extractor, prompts, job.columns, dtype="bfloat16")
        device = ", ".join(model.devices) or machine()
        print(
            f"{device}; {path.name}; {len(prompts)} samples, {job.samples.n_tokens} tokens, layers "
            f"{list(job.columns)}, {job.n_bytes:,} bytes; medians of {arguments.rounds} rounds"
        )
        in_memory()
        for number in range(arguments.rounds):
            seconds["memory"].append(timed(in_memory))
            made: list[dataset.Job] = []
            folder = Path(scratch) / str(number)
            prepare = partial(dataset.Job, model, chats, folder, options)
            seconds["preparation"].append(timed(lambda: made.append(prepare())))  # noqa: B023
            seconds["run"].append(timed(made[0].run))
        written = sum(path.stat().st_size for pattern in STATES for path in folder.rglob(pattern))

    rounds = list(zip(*seconds.values(), strict=True))
    results: dict[str, Any] = {
        "machine": device,
        "model": path.name,
        "layout": arguments.layout,
        "samples": len(prompts),
        "tokens": job.samples.n_tokens,
        "bytes": job.n_bytes,
        "bytes_written": written,
        "tokens_per_second": statistics.median(job.samples.n_tokens / (a + b) for _, a, b in rounds),
        "ratio": statistics.median((prepared + run) / memory for memory, prepared, run in rounds),
        "ratio_preparation": statistics.median(prepared / memory for memory, prepared, _ in rounds),
        "ratio_run": statistics.median(run / memory for memory, _, run in rounds),
    }
    print(f"{written:,} bytes of states were written, {written - job.n_bytes} more than predicted")
    print(f"{results['tokens_per_second']:.0f} tokens a second, end to end")
    print(f"time beside extraction into memory: {results['ratio']:.3f}x")
    print(f"  of which before computing {results['ratio_preparation']:.3f}, after {results['ratio_run']:.3f}")
    write_results("dataset", results)


if __name__ == "__main__":
    main()
