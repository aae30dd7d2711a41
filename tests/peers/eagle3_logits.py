"""The logits of speculators' own EAGLE-3 class, from a checkpoint's folder: `nox -s speculators`.

    python eagle3_logits.py FOLDER...

FOLDER/checkpoint is the checkpoint, FOLDER/inputs.npz has `features` [n, 3 * width] float32 and `tokens` [n]:
the pair of row p is (tokens[p], features[p]). n is a multiple of 128, the block of its attention.
FOLDER/found.npz gets `logits` [steps, n, rows of the head]: row p of step k is after the pairs 0..p and k
pairs more, of tokens[p + 1], ... and the states that the block gave. FOLDER/saved is what the class saves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel

STEPS = 3


def main(folder: Path) -> None:
    model = Eagle3DraftModel.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    inputs = np.load(folder / "inputs.npz")
    found: list[Any] = []
    model.lm_head.register_forward_hook(lambda module, given, logits: found.append(logits[0].numpy()))
    with torch.no_grad():
        model(
            torch.from_numpy(inputs["features"])[None],
            torch.from_numpy(inputs["tokens"])[None],
            torch.zeros(1, len(inputs["tokens"]), dtype=torch.long),
            ttt_steps=STEPS,
        )
    np.savez(folder / "found.npz", logits=np.stack(found))
    model.save_pretrained(folder / "saved")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
