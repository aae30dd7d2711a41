"""Measure llamatap against transformers, by layer and by file type, and write docs/fidelity.md.

    nox -s fidelity

Fails, and writes nothing, when a bound does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamatap as lt

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from common import machine  # noqa: E402

from fidelity.files import FILE_TYPES, f32_file, matrix_types, quantised, source_file  # noqa: E402
from fidelity.peer import Transformers  # noqa: E402
from fidelity.report import page  # noqa: E402
from fidelity.results import Distance, Measured, MeasuredModel  # noqa: E402

PAGE = ROOT / "docs" / "fidelity.md"
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False, "n_threads": 2}

TEXTS = (
    "The river had risen in the night, and by morning the lower fields were a single sheet of brown water. "
    "Nobody in the village could remember it higher, though the old miller said that his grandfather had.",
    "def merge(a, b):\n    out = []\n    while a and b:\n"
    "        out.append((a if a[0] <= b[0] else b).pop(0))\n"
    "    return out + a + b\n\nassert merge([1, 4, 9], [2, 3]) == [1, 2, 3, 4, 9]\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 天地玄黃、宇宙洪荒。 "
    "E = mc², π ≈ 3.14159; naïve café, 東京 → 大阪: 403 km.",
)

#: What one rounding of a number can change it by, relative to it or to the largest of its block: float16
#: keeps 11 bits, bfloat16 8, and the engine's kernels for quantised matrices -127..127.
STEPS = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
EIGHT_BIT_STEP = 1 / 127


def prompts(name: str) -> list[list[int]]:
    """Token ids of the texts, and of a long one of their words in random order."""
    words = " ".join(TEXTS).split()
    shuffled = " ".join(np.random.default_rng(0).choice(words, 400))
    with lt.Model(source_file(name)) as model:
        tokens = [model.tokenize(text).tolist() for text in (*TEXTS, shuffled)]
    # The sliding window of gemma3 is 512 positions: one prompt must be longer.
    assert len(tokens[-1]) > 600
    return tokens


def ours(model: lt.Model, tokens: Sequence[list[int]], **options: Any) -> list[NDArray[np.float32]]:
    with lt.Extractor(model, **options) as extractor:
        found = extractor(tokens, [*range(model.n_layer + 1), "norm"])
        return [states.array for states in found]


def measure(name: str, file_types: Sequence[str], python: Path) -> MeasuredModel:
    tokens = prompts(name)
    truth: NDArray[np.float32] | None = None
    result = MeasuredModel(name, "", 0, [len(ids) for ids in tokens], [], {})
    for file_type in file_types:
        with quantised(f32_file(name), file_type) as path:
            with lt.Model(path) as model:
                result.arch, result.n_layer = model.arch, model.n_layer
                exact = ours(model, tokens, **EXACT)
                defaults = np.concatenate(ours(model, tokens, n_threads=2))
            with Transformers(python, path) as peer:
                result.versions = peer.versions
                same = np.concatenate([peer.states(ids) for ids in tokens])
                rounded = np.concatenate([peer.states(ids, rounded=True) for ids in tokens])
                blocks = np.concatenate([peer.blocks(*pair) for pair in zip(tokens, exact, strict=True)])
            found = np.concatenate(exact)
            truth = same if truth is None else truth
            measured = Measured(
                file_type,
                matrix_types(path),
                truth=Distance.of(found, truth),
                same=Distance.of(found, same),
                defaults=Distance.of(defaults, same),
                rounding=Distance.of(rounded, same),
                blocks=Distance.of(found[:, 1:], blocks),
            )
        result.types.append(measured)
        print(
            f"{name} {file_type}: to F32 {measured.truth.l2.max():.1e}, same weights "
            f"{measured.same.l2.max():.1e} (rounding {measured.rounding.l2.max():.1e}), "
            f"one block {measured.blocks.l2.max():.1e}",
            flush=True,
        )
    return result


def faults(model: MeasuredModel) -> list[str]:
    """The bounds that do not hold."""
    wrong = []

    def bound(what: str, found: float, most: float) -> None:
        if not found <= most:
            wrong.append(f"{model.name} {measured.file_type}, {what}: {found:.2e} is above {most:.2e}")

    for measured in model.types:
        # Rounds: the F32 file of a model with GELU does too, in the engine's table of it.
        rounds = bool(measured.rounding.l2.max() > 0)
        step = STEPS.get(measured.file_type, EIGHT_BIT_STEP)
        bound("H_0", float(measured.same.l2[0]), 1e-6)
        if not rounds:
            bound("worst layer", float(measured.same.l2.max()), 1e-5)
            bound("worst block", float(measured.blocks.l2.max()), 1e-5)
            continue
        step = max(step, STEPS["F16"])
        # Rounding grows from block to block, in two runs independently: one draw against another.
        for layer, (found, yard) in enumerate(zip(measured.same.l2, measured.rounding.l2, strict=True)):
            bound(f"entry {layer}, to what rounding does", float(found), 2 * float(yard) + 1e-6)
        # With the same rounding on both sides, only values near a rounding step differ.
        bound("worst block", float(measured.blocks.l2.max()), 2 * step)
        bound("median block", float(np.median(measured.blocks.l2)), step / 2)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="llamatap against transformers, by layer and by file type.")
    parser.add_argument("--peer", type=Path, required=True, help="a python with torch and transformers")
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--types", nargs="+", choices=FILE_TYPES, default=list(FILE_TYPES))
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    types = ["F32", *(name for name in arguments.types if name != "F32")]
    models = [measure(name, types, arguments.peer) for name in arguments.models]
    wrong = [fault for model in models for fault in faults(model)]
    if wrong:
        sys.exit("\n".join(wrong))
    arguments.page.write_text(page(models, machine(), datetime.date.today().isoformat()))
    print(arguments.page)


if __name__ == "__main__":
    main()
