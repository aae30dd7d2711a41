"""A drafter of one's own: it remembers, over all texts, which token last came after each pair of tokens.

python examples/own_drafter.py MODEL.gguf "Once upon a time" "Once upon a midnight"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np

import llamatap as lt


class PairDrafter(lt.Drafter):
    """Subclasses of lt.Drafter have a ``draft``; what else they need, they override."""

    n_max = 4

    def __init__(self) -> None:
        self.after: dict[tuple[int, int], int] = {}
        self.texts: dict[int, list[int]] = {}

    def process(self, batch: lt.Batch) -> None:
        """After every decode of the target. Of a draft, the batch holds what may yet be taken back."""
        for token, position, seqs in zip(batch.tokens, batch.positions, batch.sequences, strict=True):
            text = self.texts.setdefault(seqs[0], [])
            del text[position:]
            text.append(int(token))

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
        drafts = {}
        for seq, request in requests.items():
            text = [*self.texts[seq][: request.position], request.last_token]
            for first, second, third in zip(text, text[1:], text[2:], strict=False):
                self.after[first, second] = third
            tokens: list[int] = []
            pair = (text[-2], text[-1])
            while len(tokens) < min(self.n_max, request.n_max) and pair in self.after:
                tokens.append(self.after[pair])
                pair = (pair[1], tokens[-1])
            drafts[seq] = lt.Draft(np.array(tokens, np.int32))
        return drafts

    def reset(self, seq: int) -> None:
        self.texts.pop(seq, None)


if __name__ == "__main__":
    with lt.Model(sys.argv[1]) as model:
        for found in lt.generate(model, sys.argv[2:], PairDrafter(), max_tokens=64):
            print(found.text, f"\n[{found.stats.tokens_per_round:.2f} tokens a round]")
