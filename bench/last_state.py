"""Cost of the state of a text's last token, by five ways to get it.

    python bench/last_state.py [MODEL] [--rounds N] [--tokens N] [--threads N]

Each round generates the same text once in every way, in a random order; figures are medians of the ratio
to generation without states in the same round. Writes JSON to bench/results/. docs/generation.md
describes the ways.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import machine, timed, write_results

import llamatap as lt
from llamatap.fetch import fetch

PROMPT = "The history of the lighthouse begins with fires on hills. Later, people built towers of stone, and"
LAYER = -2


class Ways:
    """The ways to get the state, on one context."""

    def __init__(self, model: lt.Model, n_tokens: int, threads: int | None) -> None:
        self.n_tokens = n_tokens
        self.context = model.context(n_ctx=1024, n_threads=threads)
        self.extractor = lt.Extractor(model, n_threads=threads)
        self.prompt = model.tokenize(PROMPT).tolist()

    def loop(self, capture: Callable[[int], bool], keep: bool = False) -> list[lt.States]:
        """Greedy generation by hand; the pass of the i-th token is tapped where `capture` says so."""
        context = self.context
        states: list[lt.States] = []
        context.memory.clear()
        context.decode(lt.Batch.of(self.prompt))
        self.text = list(self.prompt)
        for i in range(self.n_tokens):
            token = int(context.logits().argmax())
            self.text.append(token)
            batch = lt.Batch.of([token], pos0=len(self.text) - 1)
            if not capture(i):
                context.decode(batch)
                continue
            with context.tap([LAYER]) as tap:
                context.decode(batch)
            states = [*states, tap.states] if keep else [tap.states]
        return states

    def plain(self) -> None:
        self.loop(lambda i: False)

    def predict(self) -> None:
        self.loop(lambda i: i + 1 == self.n_tokens)

    def every_pass(self) -> None:
        self.loop(lambda i: True)

    def retain(self) -> None:
        self.loop(lambda i: True, keep=True)

    def hybrid(self) -> None:
        """Capture by the number of tokens, and where the end-of-generation token is among the ten most
        likely tokens."""
        end = self.context.model.eos_token
        assert end is not None

        def capture(i: int) -> bool:
            logits = self.context.logits()
            return i + 1 == self.n_tokens or bool(logits[end] >= np.partition(logits, -10)[-10])

        self.loop(capture)

    def prefill(self) -> None:
        self.loop(lambda i: False)
        self.extractor(self.text, [LAYER], window=(-1, None))

    def generate(self, **options: object) -> None:
        self.context.memory.clear()
        list(
            lt.generate(
                self.context,
                np.array(self.prompt, np.int32),
                max_tokens=self.n_tokens,
                ignore_eos=True,
                **options,  # type: ignore[call-overload]
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    model = lt.Model(arguments.model or fetch("smollm2"))
    ways = Ways(model, arguments.tokens, arguments.threads)
    variants: dict[str, tuple[str, Callable[[], None]]] = {
        "a loop without states": ("a loop without states", ways.plain),
        "predict the stop": ("a loop without states", ways.predict),
        "extract speculatively": ("a loop without states", ways.every_pass),
        "retain and pick": ("a loop without states", ways.retain),
        "a hybrid": ("a loop without states", ways.hybrid),
        "prefill after sampling": ("a loop without states", ways.prefill),
        "generate": ("generate", ways.generate),
        "generate(states='last')": ("generate", lambda: ways.generate(states="last", layers=[LAYER])),
        "generate(states='full')": ("generate", lambda: ways.generate(states="full", layers=[LAYER])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    chance = random.Random(0)
    for _ in range(arguments.rounds + 1):
        for name in chance.sample(list(variants), len(variants)):
            seconds[name].append(timed(variants[name][1]))
    results: dict[str, object] = {"machine": machine(), "tokens": arguments.tokens}
    for name, (base, _) in variants.items():
        # The first round warms up.
        ratios = [own / of for own, of in zip(seconds[name][1:], seconds[base][1:], strict=True)]
        results[name] = {
            "seconds": round(statistics.median(seconds[name][1:]), 3),
            "ratio": round(statistics.median(ratios), 3),
        }
        print(f"{name:28} {results[name]}")
    write_results("last_state", results)


if __name__ == "__main__":
    main()
