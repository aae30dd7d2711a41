"""``llamatap demo``: what a prompt's hidden states look like, as a table and a picture."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.extraction.api import extract
from llamatap.fetch import fetch
from llamatap.model import Model
from llamatap.states import States

__all__ = ["run"]

PROMPT = "The capital of France is Paris, and the capital of Japan is"


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosine of the angle between vectors along the last axis."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a64, axis=-1) * np.linalg.norm(b64, axis=-1)
    result: NDArray[np.float64] = np.sum(a64 * b64, axis=-1) / np.maximum(norms, 1e-30)
    return result


def run(model_path: Path | None, text: str | None, picture: Path) -> None:
    """Extract all layers of a prompt, print a table, write a picture.

    :param model_path: a GGUF file; None fetches SmolLM2-135M-Instruct.
    :param text: the prompt; None for one of our own.
    :param picture: the PNG to write.
    :raises MissingPackageError: matplotlib is not installed.
    """
    with needs("demo", "the picture"):
        import matplotlib as mpl
    mpl.use("Agg")

    path = model_path if model_path is not None else fetch("smollm2")
    start = time.perf_counter()
    with Model(path) as model:
        loaded = time.perf_counter()
        prompt = text if text is not None else PROMPT
        every = list(range(model.n_layer + 1))
        states = extract(model, prompt, layers=every)
        seconds = time.perf_counter() - loaded
        pieces = [model.token_bytes(int(token)).decode(errors="replace") for token in states.tokens]
        print(f"model     {path.name}: {model.description}, loaded in {loaded - start:.2f} s")
        print(f"prompt    {prompt!r}: {len(states)} tokens")
        print(
            f"states    {states.array.shape} = (tokens, layers, width), {states.array.dtype}, "
            f"{states.array.nbytes / 2**20:.1f} MiB, in {seconds:.2f} s"
        )
    _print_table(states)
    _draw(states, pieces, path.name, picture)
    print(f"picture   {picture}")


def _print_table(states: States) -> None:
    array = states.array
    last = array.shape[1] - 1
    print()
    print("layer   median length   cosine to the layer before   cosine to the last layer")
    shown = sorted({*range(0, last + 1, max(1, last // 10)), last - 1, last})
    for layer in shown:
        length = np.linalg.norm(array[:, layer].astype(np.float64), axis=-1)
        before = f"{cosine(array[:, layer], array[:, layer - 1]).mean():.3f}" if layer else "-"
        final = cosine(array[:, layer], array[:, last]).mean()
        print(f"{layer:5}   {np.median(length):13.2f}   {before:>26}   {final:24.3f}")
    print()


def _draw(states: States, pieces: list[str], name: str, picture: Path) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    array = states.array
    n_layers = array.shape[1]
    change = 1 - cosine(array[:, 1:], array[:, :-1])
    lengths = np.linalg.norm(array.astype(np.float64), axis=-1)

    figure = Figure(figsize=(13, 0.32 * len(pieces) + 4.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[max(2.0, 0.3 * len(pieces)), 2.2])
    figure.suptitle(f"How a prompt's representation changes over the layers of {name}")

    # Most blocks turn a token by little: the root keeps them apart.
    image = top.imshow(
        change,
        aspect="auto",
        cmap="magma",
        norm=PowerNorm(0.5, vmin=0),
        extent=(0.5, n_layers - 0.5, len(pieces), 0),
    )
    top.set_yticks(np.arange(len(pieces)) + 0.5, [repr(piece)[1:-1] for piece in pieces], fontsize=9)
    top.set_xlabel("layer i")
    top.set_title("How much block i-1 turned each token: 1 - cosine(H_i, H_{i-1})", fontsize=10)
    figure.colorbar(image, ax=top, pad=0.01)

    layers = np.arange(n_layers)
    bottom.semilogy(layers, np.median(lengths, axis=0), label="median length of H_i (left)", color="tab:blue")
    bottom.fill_between(layers, lengths.min(axis=0), lengths.max(axis=0), alpha=0.15, color="tab:blue")
    bottom.set_xlabel("layer i")
    bottom.set_ylabel("length")
    right = bottom.twinx()
    for target, colour, label in (
        (0, "tab:green", "H_0"),
        (n_layers - 1, "tab:red", "the last layer"),
    ):
        similarity = cosine(array, array[:, target : target + 1]).mean(axis=0)
        right.plot(layers, similarity, color=colour, label=f"mean cosine to {label} (right)")
    right.set_ylim(-0.1, 1.05)
    right.set_ylabel("cosine")
    handles = [*bottom.get_lines(), *right.get_lines()]
    bottom.legend(handles, [str(line.get_label()) for line in handles], fontsize=9, loc="center")
    bottom.set_xlim(0, n_layers - 1)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
