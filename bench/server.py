"""Server against extraction in a process: requests per second and bytes, by encoding and number of clients.

    python bench/server.py [MODEL] [--rounds N] [--prompts N] [--tokens N]

Each round extracts the same prompts in this process, as one list, and then asks a server (another process, on
the same processors) for each of them, with 1, 8 and 32 clients and each encoding. A figure is the median of
the rounds' ratios to the rate in the process (1: as fast). The clients share the processors with the server.
The time of each encoding alone, for states of 512 tokens, is given relative to base64's.
Writes bench/results/server.json.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import machine, timed, write_results
from numpy.typing import NDArray

import llamatap as lt
from llamatap.fetch import fetch
from llamatap.serve.payload import as_base64, as_lists, as_safetensors

ENCODINGS = ("float", "base64", "safetensors")
CLIENTS = (1, 8, 32)


@contextlib.contextmanager
def served(model: Path, gpu_layers: int) -> Iterator[str]:
    """A server's address."""
    command = [sys.executable, "-m", "llamatap", "serve", "--port", "0", "--model", f"m={model}"]
    command += ["--gpu-layers", str(gpu_layers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        address = next(filter(None, (re.search(r"running on (\S+)", line) for line in process.stderr)))[1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(process.stderr.read)
            try:
                yield address
            finally:
                process.terminate()


def ask(url: str, prompts: list[list[int]], encoding: str, clients: int) -> int:
    """Request all of them; return the number of bytes received."""
    with httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=clients)) as http:

        def one(tokens: list[int]) -> int:
            body = {"model": "m", "input": tokens, "encoding_format": encoding, "max_length": len(tokens)}
            answer = http.post("/v1/hidden_states", json=body)
            answer.raise_for_status()
            return len(answer.content)

        with ThreadPoolExecutor(clients) as pool:
            return sum(pool.map(one, prompts))


def encode(array: NDArray[np.float32], encoding: str) -> bytes:
    """One body, or the largest part of it."""
    if encoding == "safetensors":
        return as_safetensors({"hidden_states": array}, {})
    return b"".join((as_base64 if encoding == "base64" else as_lists)(array))


def main() -> None:
    parser = argparse.ArgumentParser(description="The server beside extraction in a process.")
    parser.add_argument("model", type=Path, nargs="?", help="default: smollm2, fetched")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, on average")
    parser.add_argument("--gpu-layers", type=int, default=0)
    arguments = parser.parse_args()

    path = arguments.model or fetch("smollm2")
    rng = np.random.default_rng(0)
    kinds = [(encoding, clients) for encoding in ENCODINGS for clients in CLIENTS]
    ratios: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    rates: list[float] = []
    with (
        lt.Model(path, n_gpu_layers=arguments.gpu_layers) as model,
        served(path, arguments.gpu_layers) as url,
    ):
        lengths = rng.integers(arguments.tokens // 2, arguments.tokens * 3 // 2, arguments.prompts)
        prompts = [rng.integers(0, model.n_vocab, length).tolist() for length in lengths.tolist()]
        device = ", ".join(model.devices) or machine()
        print(
            f"{device}; {path.name}; {len(prompts)} prompts of {lengths.mean():.0f} tokens, layer -2; "
            f"medians of {arguments.rounds} rounds"
        )
        lt.extract(model, prompts)
        sizes = {encoding: ask(url, prompts, encoding, 8) for encoding in ENCODINGS}
        for _ in range(arguments.rounds):
            rates.append(len(prompts) / timed(partial(lt.extract, model, prompts)))
            for encoding, clients in kinds:
                seconds = timed(partial(ask, url, prompts, encoding, clients))
                ratios[encoding, clients].append(len(prompts) / seconds / rates[-1])
        states = int(lengths.sum()) * model.n_embd * 4
        array = np.ascontiguousarray(lt.extract(model, rng.integers(0, model.n_vocab, 512).tolist())[-2])
    taken: dict[str, list[float]] = {encoding: [] for encoding in ENCODINGS}
    for _ in range(10 * arguments.rounds):
        for encoding in ENCODINGS:
            taken[encoding].append(timed(partial(encode, array, encoding)))
    encoding_seconds = {encoding: statistics.median(each) for encoding, each in taken.items()}

    results: dict[str, Any] = {
        "machine": device,
        "model": path.name,
        "in_process_per_second": statistics.median(rates),
        "encodings": {},
    }
    print(f"in the process: {results['in_process_per_second']:.1f} prompts a second")
    clients_named = "".join(f"  {n:>3} client{'s' * (n > 1)}" for n in CLIENTS)
    print(f"{'encoding':>12}  {'bytes':>6}  {'encoding':>8}{clients_named}")
    for encoding in ENCODINGS:
        medians = {clients: statistics.median(ratios[encoding, clients]) for clients in CLIENTS}
        bytes_each = sizes[encoding] / states
        time_each = encoding_seconds[encoding] / encoding_seconds["base64"]
        results["encodings"][encoding] = {
            "bytes_of_float32": bytes_each,
            "encoding_of_base64": time_each,
            "ratio": medians,
        }
        figures = "".join(f"  {medians[n]:>{11 if n > 1 else 10}.2f}" for n in CLIENTS)
        print(f"{encoding:>12}  {bytes_each:>5.2f}x  {time_each:>7.2f}x{figures}")
    write_results("server", results)


if __name__ == "__main__":
    main()
