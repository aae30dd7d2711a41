"""A model and a drafter whose distributions are known, and Pearson's test of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.generation import EXACT
from support.tiny_models import rigged
from support.tiny_models.rigged import cycle, wrong_at

import llamatap as lt

N = rigged.N_VOCAB
MARGIN = 3.0
F = cycle()
G = wrong_at(F, range(N))  # never F
LIKELY = rigged.probability(MARGIN)
RARE = (1 - LIKELY) / (N - 1)

Array = NDArray[np.float64]
CONTEXT: dict[str, Any] = {"n_ctx": 20 * 256, "n_seq_max": 20, "kv_unified": False, **EXACT}
#: With 200 tokens each, 4000 draws; all at once, so that no two of them share a sequence and a position.
PROMPTS = [[1, token] for token in range(3, 23)]


def p_value(counts: NDArray[np.int64], expected: Array) -> float:
    """p-value of Pearson's chi-square test, by Wilson and Hilferty's normal approximation."""
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    wanted = expected[kept] * counts.sum()
    assert wanted.min() > 5
    freedom = kept.sum() - 1
    statistic = float(((counts[kept] - wanted) ** 2 / wanted).sum())
    variance = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def drawn(q: Array, rng: np.random.Generator, count: int) -> list[int]:
    result: list[int] = rng.choice(len(q), count, p=q).tolist()
    return result


class Drawing(lt.Drafter):
    """A drafter that draws from its own distribution with its own random numbers, and reports it."""

    def __init__(self, length: int, *, margin: float = MARGIN, tells: str = "the truth") -> None:
        self.length = length
        self.margin = margin
        self.tells = tells
        self.rng = np.random.default_rng(99)

    def after(self, token: int) -> Array:
        weights = np.ones(N)
        weights[G[token]] = math.exp(self.margin)
        result: Array = weights / weights.sum()
        return result

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
        found = {}
        for seq, request in requests.items():
            text, rows = [request.last_token], []
            for _ in range(min(self.length, request.n_max)):
                q = self.after(text[-1])
                text += drawn(q, self.rng, 1)
                rows.append(q if self.tells == "the truth" else np.full(N, 1 / N))
            found[seq] = lt.Draft(np.array(text[1:], np.int32), None, np.array(rows, np.float32))
        return found
