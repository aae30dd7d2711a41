"""Drafters without a model: tokens per round of ours and of the engine's ``ngram-*`` types on the same texts,
and what ours do to the speed of generation.

    make bench-text-drafters
    python bench/text_drafters.py [--rounds N] [--tokens N] [--threads N] [--options]

Texts that are known already are replayed: a drafter guesses along them, and a round ends at the first wrong
guess. No model takes part, so all drafters see the same texts, and figures are exact. The engine's types run
as the engine runs them, with their own defaults (bench/peer/replay.cpp). The requests of a kind come one
after another and share one drafter. Speeds are medians of ratios within a round, in which every variant runs
once. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, median, timed, write_results

import llamatap as lt
from llamatap.fetch import fetch

ROOT = Path(__file__).parents[1]
#: Drafts of the engine along known texts (bench/peer).
REPLAY = ROOT / "build" / "peer" / "replay-drafts"
ENGINE_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")

#: Files, and a name in them that is changed everywhere.
EDITS = (
    ("python/llamatap/generation/scheduler.py", "in_flight", "running"),
    ("python/llamatap/drafting/draft_length.py", "seconds", "duration"),
    ("csrc/draft/pending_pairs.cpp", "sequence", "stream"),
    ("csrc/draft/verify.cpp", "draft", "guess"),
    ("docs/generation.md", "token", "symbol"),
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What are the primary colours, and why?",
    "Write a Python function that reverses a string.",
    "Name five animals that live in the sea.",
    "Why is the sky blue?",
    "How do I write a polite letter of complaint?",
    "What is the difference between weather and climate?",
    "Translate 'good morning, my friend' into Spanish.",
    "Describe the water cycle for a child.",
    "What should I pack for a week in the mountains?",
    "Write a haiku about autumn.",
    "How does a computer store numbers?",
    "Tell me about the history of bread.",
)
LOOPS = (
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "red green blue red green blue red",
    "a b c d e f g a b c d e f g a b",
)
#: (tokens of the prompt, tokens of the answer)
Request = tuple[list[int], list[int]]


def edits(model: lt.Model) -> list[Request]:
    """Files, and the same files with a name changed."""
    requests = []
    for name, old, new in EDITS:
        text = (ROOT / name).read_text()
        prompt = f"Rename {old} to {new} in this file:\n```\n{text}```\nThe new file:\n```\n"
        requests.append((tokens_of(model, prompt), tokens_of(model, text.replace(old, new) + "```\n")))
    return requests


def lists(model: lt.Model) -> list[Request]:
    """Lists of random words, repeated as they are."""
    rng = np.random.default_rng(0)
    words = sorted(set((ROOT / "docs" / "extraction.md").read_text().split()))
    requests = []
    for _ in range(4):
        text = "".join(f"- {' '.join(rng.choice(words, 3))}\n" for _ in range(40))
        requests.append((tokens_of(model, f"Repeat this list:\n{text}\nThe list:\n"), tokens_of(model, text)))
    return requests


def tokens_of(model: lt.Model, text: str) -> list[int]:
    return list(map(int, model.tokenize(text, add_special=False)))


def chat_prompts(model: lt.Model) -> list[list[int]]:
    return [
        model.tokenize(model.apply_chat_template([{"role": "user", "content": question}])).tolist()
        for question in QUESTIONS
    ]


def answered(model: lt.Model, prompts: Sequence[Any], n_tokens: int, *, ignore_eos: bool) -> list[Request]:
    """The model's own greedy answers."""
    options: Any = {"max_tokens": n_tokens, "ignore_eos": ignore_eos}
    return [
        (found.prompt.tolist(), found.tokens.tolist()) for found in lt.generate(model, prompts, **options)
    ]


def replayed(drafter: lt.Drafter, requests: Sequence[Request]) -> list[tuple[int, int, int]]:
    """(rounds, drafted, accepted) of each request. As with the engine, the first draft follows the prompt."""
    results = []
    for prompt, answer in requests:
        text = [*prompt, *answer]
        drafter.reset(0)
        drafter.process(lt.Batch.of(prompt[:-1]))
        position, rounds, drafted, accepted = len(prompt) - 1, 0, 0, 0
        while position + 1 < len(text):
            n_max = len(text) - position - 2
            found = drafter.draft({0: lt.DraftRequest(text[position], position, n_max)}) if n_max else {}
            draft = found[0].tokens.tolist() if 0 in found else []
            drafter.process(lt.Batch.of([text[position], *draft], pos0=position))
            n = next((i for i, token in enumerate(draft) if token != text[position + 1 + i]), len(draft))
            drafter.accept(0, n)
            rounds, drafted, accepted = rounds + 1, drafted + len(draft), accepted + n
            position += n + 1
        drafter.reset(0)
        results.append((rounds, drafted, accepted))
    return results


def by_engine(kind: str, requests: Sequence[Request]) -> list[tuple[int, int, int]]:
    lines = [" ".join(map(str, [len(prompt), *prompt, *answer])) for prompt, answer in requests]
    done = subprocess.run([REPLAY, kind], input="\n".join(lines), capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == len(requests)
    return found  # type: ignore[return-value]


def figures(requests: Sequence[Request], found: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    rounds, drafted, accepted = (sum(column) for column in zip(*found, strict=True))
    n_tokens = sum(len(answer) for _, answer in requests)
    return {
        "tokens per round": round(n_tokens / rounds, 2),
        "drafted": drafted,
        "accepted": round(accepted / drafted, 2) if drafted else 0.0,
    }


def tokens_per_round(texts: dict[str, tuple[list[Request], int]], ours: dict[str, Any]) -> dict[str, Any]:
    """For each kind of text: of the requests from the given one on, which all come after those before."""
    results: dict[str, Any] = {}
    for title, (requests, first) in texts.items():
        found = {kind: by_engine(kind, requests) for kind in ENGINE_TYPES}
        found |= {name: replayed(make(), requests) for name, make in ours.items()}
        results[title] = {name: figures(requests[first:], one[first:]) for name, one in found.items()}
    return results


def speeds(
    arguments: argparse.Namespace, model: lt.Model, texts: dict[str, list[list[int]]]
) -> dict[str, Any]:
    """Tokens per second with each drafter, in relation to none; a new drafter each time."""
    drafters: dict[str, Callable[[], lt.Drafter | None]] = {
        "none": lambda: None,
        "NGramDrafter": lt.NGramDrafter,
        "SuffixDrafter": lt.SuffixDrafter,
        'SuffixDrafter, n_max="auto"': lambda: lt.SuffixDrafter(n_max="auto"),
    }
    results: dict[str, Any] = {}
    for n_seq in (1, 8):
        with model.context(n_ctx=8192, n_seq_max=n_seq, n_threads=arguments.threads) as context:
            for title, prompts in texts.items():
                ratios: dict[str, list[float]] = {name: [] for name in drafters}
                for _ in range(arguments.rounds):
                    seconds = {}
                    for name, make in drafters.items():
                        drafter = make()

                        def run(drafter: lt.Drafter | None = drafter, prompts: Any = prompts) -> None:
                            list(lt.generate(context, prompts, drafter, max_tokens=arguments.tokens))

                        seconds[name] = timed(run)
                    for name in drafters:
                        ratios[name].append(seconds["none"] / seconds[name])
                results[f"{title}, {n_seq} at once"] = {
                    name: median(values) for name, values in ratios.items() if name != "none"
                }
    return results


def cost() -> dict[str, float]:
    """Time of adding a token and of a draft, on text that is new and on one token repeated."""
    rng = np.random.default_rng(0)
    results: dict[str, float] = {}
    for name, text in (("random", rng.integers(0, 49152, 300_000)), ("one token", np.full(300_000, 7))):
        drafter = lt.SuffixDrafter()
        batches = [lt.Batch.of(part.tolist()) for part in text.reshape(-1, 1000)]

        def add(drafter: lt.Drafter = drafter, batches: Any = batches) -> None:
            for batch in batches:
                drafter.process(batch)
                drafter.reset(0)

        results[f"ns to add a token, {name}"] = round(timed(add) / len(text) * 1e9)
        drafter.process(batches[0])
        request = {0: lt.DraftRequest(int(text[0]), 1000, 64)}
        start = time.perf_counter()
        for _ in range(1000):
            drafter.draft(request)
        results[f"microseconds of a draft, called from Python, {name}"] = round(
            (time.perf_counter() - start) * 1e3, 1
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--options", action="store_true", help="replay with other options of SuffixDrafter")
    arguments = parser.parse_args()
    if not REPLAY.exists():
        sys.exit(f"bench/text_drafters.py: there is no {REPLAY}; run `make bench-text-drafters`")
    with lt.Model(fetch("smollm2")) as model:
        chat = answered(model, chat_prompts(model), arguments.tokens, ignore_eos=False)
        loops = answered(model, list(LOOPS), arguments.tokens, ignore_eos=True)
        texts = {
            "a file with a name changed": (edits(model), 0),
            "a list, repeated": (lists(model), 0),
            "the model's own loops": (loops, 0),
            "chat": (chat, 0),
            "the same chat again": ([*chat, *chat], len(chat)),
        }
        ours: dict[str, Any] = {"NGramDrafter": lt.NGramDrafter, "SuffixDrafter": lt.SuffixDrafter}
        if arguments.options:
            for factor in (0.5, 1.0, 2.0, 4.0):
                for p_min in (0.0, 0.1, 0.3, 0.5):
                    for n_max in (16, 64):
                        options: Any = {"max_spec_factor": factor, "p_min": p_min, "n_max": n_max}
                        ours[f"SuffixDrafter {options}"] = lambda options=options: lt.SuffixDrafter(**options)
        results: dict[str, Any] = {
            "machine": machine(),
            "tokens per round": tokens_per_round(texts, ours),
            "cost": cost(),
        }
        if not arguments.options:
            prompts = chat_prompts(model)[:8]
            results["tokens per second / without a drafter"] = speeds(
                arguments,
                model,
                {
                    "chat": prompts,
                    "chat, twice": [*prompts, *prompts],
                    "loops": [tokens_of(model, loop) for loop in LOOPS],
                },
            )
    for key, value in results.items():
        if not isinstance(value, dict):
            print(f"{key}: {value}")
            continue
        print(key)
        for title, found in value.items():
            print(f"    {title}" if isinstance(found, dict) else f"    {title}: {found}")
            for label, figure in found.items() if isinstance(found, dict) else ():
                print(f"        {label}: {figure}")
    if not arguments.options:
        write_results("text_drafters", results)


if __name__ == "__main__":
    main()
