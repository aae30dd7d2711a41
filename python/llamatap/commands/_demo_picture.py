"""``llamatap demo``: the hidden states of a prompt, as a table and a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.extraction.api import extract
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


def norm(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """L2 norm of vectors along the last axis."""
    result: NDArray[np.float64] = np.linalg.norm(array.astype(np.float64), axis=-1)
    return result


def run(model_path: Path, text: str | None, picture: Path) -> None:
    """Extract all layers of a prompt, print a table, write a picture.

    :param model_path: a GGUF file.
    :param text: the prompt; None for the built-in one.
    :param picture: the PNG to write.
    :raises MissingPackageError: matplotlib is not installed.
    """
    with needs("demo", "the picture"):
        import matplotlib as mpl
    mpl.use("Agg")

    start = time.perf_counter()
    with Model(model_path) as model:
        loaded = time.perf_counter()
        prompt = text if text is not None else PROMPT
        every = list(range(model.n_layer + 1))
        states = extract(model, prompt, layers=every)
        seconds = time.perf_counter() - loaded
        pieces = [model.token_bytes(int(token)).decode(errors="replace") for token in states.tokens]
        what = f"{model_path.name} ({model.description})"
        print(f"model     {what}, loaded in {loaded - start:.2f} s")
        print(f"prompt    {prompt!r}: {len(states)} tokens")
        print(
            f"states    {states.array.shape} = (n_tokens, n_layers, n_embd), {states.array.dtype}, "
            f"{states.array.nbytes / 2**20:.1f} MiB, in {seconds:.2f} s"
        )
    _print_table(states)
    _draw(states, pieces, what, picture)
    print(f"picture   {picture}")


def _print_table(states: States) -> None:
    array = states.array
    last = array.shape[1] - 1
    norms = norm(array)
    print()
    print("          L2 norm of H_i, over tokens      mean cosine of H_i to")
    print(f"layer i       median      largest       H_i-1       {f'H_{last}':>6}")
    for layer in sorted({*range(0, last + 1, max(1, last // 10)), max(0, last - 1), last}):
        before = f"{cosine(array[:, layer], array[:, layer - 1]).mean():.3f}" if layer else "-"
        final = cosine(array[:, layer], array[:, last]).mean()
        median, largest = np.median(norms[:, layer]), norms[:, layer].max()
        print(f"{layer:7}   {median:10.2f}   {largest:10.2f}   {before:>9}   {final:10.3f}")
    print()


def _draw(states: States, pieces: list[str], what: str, picture: Path) -> None:
    from matplotlib.figure import Figure

    heights = [0.21 * max(8, len(pieces)), 1.5, 1.5]
    figure = Figure(figsize=(8, sum(heights) + 1.9), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.06)  # type: ignore[union-attr, call-arg]
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    figure.suptitle(f"Hidden states of {what}", fontsize=10, fontweight="bold", parse_math=False)
    _draw_turns(top, states, pieces)
    _draw_norms(middle, states, pieces)
    _draw_cosines(bottom, states)
    for axes in (middle, bottom):
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        # Beside the title, where it hides no line.
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False, borderaxespad=0
        )
    bottom.set_xlim(0, states.array.shape[1] - 1)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_xlabel("layer i ($H_i$ enters block i)", fontsize=9)
    for axes in (top, middle, bottom):
        axes.tick_params(labelsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


def _draw_turns(axes: Any, states: States, pieces: list[str]) -> None:
    """Heat map: how far each block turns each token."""
    from matplotlib.colors import PowerNorm

    array = states.array
    # Most blocks turn a token only a little: the square root spreads small values.
    image = axes.imshow(
        1 - cosine(array[:, 1:], array[:, :-1]),
        aspect="auto",
        cmap="magma",
        norm=PowerNorm(0.5, vmin=0),
        extent=(0, array.shape[1] - 1, len(pieces), 0),
    )
    axes.set_yticks(np.arange(len(pieces)) + 0.5, [repr(piece)[1:-1] for piece in pieces], parse_math=False)
    axes.set_title("How far block i turns each token", fontsize=9, loc="left")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.015, aspect=24)
    bar.set_label("1 - cosine of $H_i$ and $H_{i+1}$", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _draw_norms(axes: Any, states: States, pieces: list[str]) -> None:
    norms = norm(states.array)
    layers = np.arange(norms.shape[1])
    largest = int(norms.max(axis=1).argmax())
    axes.semilogy(layers, norms.T, color="tab:blue", linewidth=0.7, alpha=0.4)
    axes.plot([], [], color="tab:blue", linewidth=0.7, alpha=0.6, label="each token")
    axes.plot(layers, np.median(norms, axis=0), color="tab:blue", linewidth=2, label="median")
    # Often an attention sink: one value of its state is thousands of times as large as the others.
    name = repr(pieces[largest]).replace("$", r"\$")
    label = f"the largest: token {largest}, {name}"
    axes.plot(layers, norms[largest], color="tab:orange", linewidth=1.5, label=label)
    axes.set_title("Norm of $H_i$", fontsize=9, loc="left")
    axes.set_ylabel("L2 norm", fontsize=8)


def _draw_cosines(axes: Any, states: States) -> None:
    array = states.array
    last = array.shape[1] - 1
    for target, colour in ((0, "tab:green"), (last, "tab:red")):
        similarity = cosine(array, array[:, target : target + 1]).mean(axis=0)
        axes.plot(np.arange(last + 1), similarity, color=colour, linewidth=2, label=f"to $H_{{{target}}}$")
    axes.set_title(
        "Cosine of $H_i$ to the first and the last layer, mean over tokens", fontsize=9, loc="left"
    )
    axes.set_ylabel("cosine", fontsize=8)
