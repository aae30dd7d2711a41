"""docs/fidelity.md, made of what was measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import llamatap as lt
from fidelity.results import Distance, Measured, MeasuredModel

HEAD = """# Fidelity

Made by `nox -s fidelity` on {date}: every layer against transformers, live, on the same token ids. The bounds
are in tests/fidelity/measure.py; when one does not hold, nothing is written.

{machine}; llamatap {llamatap}, engine {engine}; transformers {transformers}, torch {torch}.

All files of a model are made of one: the published file, dequantised to float32 by the `gguf` package, and
from that the other types by the engine's own quantiser. transformers dequantises each file by itself and
computes in float32 with eager attention. llamatap computes with a float32 KV cache and without flash
attention, but for the column *defaults*.

A row's *relative L2* is |found - expected| / |expected|. A layer's figure is the root mean square over all
rows, so that each row counts alike (the first ones are many times as large as others). *Cosine* is the mean
over rows. *Worst* and *median* are over the layers `H_0`..`H_n` and norm(`H_n`).

- **To float32**: llamatap on this file against transformers on the float32 weights. What quantisation
  costs.
- **Same weights**: llamatap on this file against transformers on the same file's weights. What is left is
  the arithmetic of the engine's kernels: they round what enters a matrix to float16, bfloat16 or 8 bits.
- **Rounding**: transformers on the same weights, rounding as the kernels do, against itself. No code of
  llamatap or the engine has a part in it. *Same weights* should be about as much, and it is.
- **One block**: each block in transformers is given llamatap's `H_i` and rounds like the kernels; what it
  makes of it is compared with llamatap's `H_{{i+1}}`. Nothing adds up from block to block here: what is
  left are sums in another order, and numbers that they move across the edge of a rounding step. The first
  block shows most of it, because its result is many times as large as its input. (Q4_1's kernel also rounds
  the sum of each 32 inputs to float16, which is not redone.)

Two things to know when reading the tables:

- Of a model with GELU (Gemma; also GPT-2, BLOOM, StarCoder) the float32 file rounds too: on a CPU the engine
  reads GELU from a table of 65,536 float16 values. Tiny random models of gemma, bloom, starcoder and
  starcoder2 are 3e-5 to 2e-4 from transformers, and within 3e-7 at `H_1` when transformers rounds what enters
  and what leaves GELU to float16.
- A row with a massive activation (one number thousands of times as large as the others) may be far off while
  all others are right: whether a token grows one is decided by little. In SmolLM2's Q4_K_M one such row, in
  60 random tokens, is 0.35 from the same weights computed exactly (the median row 4e-2), and 28 times as long
  as in the float32 file, where the token grows none. Root mean squares show such rows and little else.

"""

ABOUT = {
    "smollm2": "SmolLM2-135M-Instruct, Apache-2.0, published as Q4_1 (so Q4_1 loses nothing more of the\n"
    "weights). The engine also has hooks for the inputs of this architecture's blocks.",
    "gemma3": "Gemma 3 270M, under the Gemma terms of use, published as Q4_K_M (which loses next to nothing\n"
    "more). The engine has no hooks for this architecture: the states come from its graph. Its GELU is read\n"
    "from a table of float16 values, in the float32 file too. One prompt is longer than its window.",
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cosine(value: float) -> str:
    return f"{value:.6f}"


def _l2(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _summary(model: MeasuredModel) -> str:
    head = ["file", "matrices of blocks", "to float32: worst", "median", "cosine, lowest"]
    head += [
        "same weights: worst",
        "median",
        "cosine, lowest",
        "defaults: worst",
        "rounding: worst",
        "median",
    ]
    head += ["one block: worst", "median"]
    rows = []
    for found in model.types:
        row = [found.file_type, ", ".join(f"{count} {kind}" for kind, count in found.matrices.items())]
        for distance in (found.truth, found.same):
            row += [
                _l2(distance.l2.max()),
                _l2(float(np.median(distance.l2))),
                _cosine(distance.cosine.min()),
            ]
        row.append(_l2(found.defaults.l2.max()))
        for distance in (found.rounding, found.blocks):
            row += [_l2(distance.l2.max()), _l2(float(np.median(distance.l2)))]
        rows.append(row)
    return _table(head, rows)


def _by_layer(model: MeasuredModel, which: Callable[[Measured], Distance]) -> str:
    names = [*(f"`H_{i}`" for i in range(model.n_layer + 1)), "norm"]
    columns = [which(found).l2 for found in model.types]
    rows = [[name, *(_l2(column[i]) for column in columns)] for i, name in enumerate(names)]
    return _table(["layer", *(found.file_type for found in model.types)], rows)


def page(models: list[MeasuredModel], machine: str, date: str) -> str:
    """The page, as Markdown."""
    text = HEAD.format(
        date=date,
        machine=machine,
        llamatap=lt.__version__,
        engine=lt.build_config()["engine_commit"],
        **models[0].versions,
    )
    for model in models:
        lengths = ", ".join(map(str, model.lengths))
        text += f"## {model.name}\n\n{ABOUT.get(model.name, '')}\n"
        text += f"Architecture {model.arch}, {model.n_layer} blocks; prompts of {lengths} tokens.\n\n"
        text += _summary(model)
        text += "\nTo float32, relative L2 by layer:\n\n" + _by_layer(model, lambda found: found.truth)
        text += (
            "\nSame weights, relative L2 by layer:\n\n" + _by_layer(model, lambda found: found.same) + "\n"
        )
    return text.rstrip() + "\n"
