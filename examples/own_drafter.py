"""A drafter of your own: it remembers, across all texts, which token last followed each pair of tokens.

python examples/own_drafter.py MODEL.gguf "Once upon a time" "Once upon a midnight"
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import llamatap as lt


class PairDrafter(lt.TextDrafter):
    """Guesses the next tokens from the text alone. A drafter that needs more is an lt.Drafter."""

    n_max = 4

    def __init__(self) -> None:
        super().__init__()
        self.after: dict[tuple[int, int], int] = {}

    def guess(self, tokens: NDArray[np.int32], n_max: int) -> list[int]:
        text = tokens.tolist()
        self.after.update(zip(pairwise(text), text[2:], strict=False))
        found: list[int] = []
        pair = (text[-2], text[-1])
        while len(found) < n_max and pair in self.after:
            found.append(self.after[pair])
            pair = (pair[1], found[-1])
        return found


if __name__ == "__main__":
    with lt.Model(sys.argv[1]) as model:
        for found in lt.generate(model, sys.argv[2:], PairDrafter(), max_tokens=64):
            print(found.text, f"\n[{found.stats.tokens_per_round:.2f} tokens per round]")
