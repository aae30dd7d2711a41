"""Speed of drafting and what it consists of: passes, drafts, overhead, sequences together, memory."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import median, timed
from draft_figures import break_even, spread
from draft_setup import ROOT, TEXT_DRAFTERS, Drafters, NMax, Row, asked, chat_context, questions
from rigged_drafts import random_eagle3

import llamatap as lt
from llamatap._native import native_of

PROMPT = "The history of the lighthouse begins with fires on hills. Later, people built towers of stone, and"


def run_after_prompts(
    context: lt.Context, prompts: Sequence[list[int]], drafter: lt.Drafter | None, **options: Any
) -> tuple[float, list[lt.Generation]]:
    """(seconds after the first tokens, the results) of prompts that run at once."""
    events = lt.generate(context, list(prompts), drafter, stream=True, **options)
    results = []
    start = 0.0
    for event in events:
        start = start or time.perf_counter()
        if event.final is not None:
            results.append(event.final)
    return time.perf_counter() - start, results


def speed(arguments: argparse.Namespace, label: str, model: lt.Model) -> list[Row]:
    rows: list[Row] = []
    for n_seq in arguments.sequences:
        with chat_context(arguments, model, n_seq) as context:
            drafters = Drafters(arguments, context)
            # As many of each file; one sequence at a time answers four.
            texts = [text for name in ("own", "hand") for _, text in questions(name, max(n_seq // 2, 2))]
            once = [asked(model, text) for text in texts]
            lengths = arguments.n_max
            variants: list[tuple[str, NMax]] = [(name, n) for name in drafters.names for n in lengths]
            for temperature in arguments.temperatures:
                for title, times in (("own and hand", 1), ("again", 2)):
                    chosen = [
                        (name, n) for name, n in variants if times == 1 or name == "suffix" or n == "auto"
                    ]
                    rows += [
                        {"target": label, "sequences": n_seq, "temperature": temperature, "prompts": title}
                        | row
                        for row in speeds(arguments, context, drafters, chosen, once, times, temperature)
                    ]
    return rows


def speeds(
    arguments: argparse.Namespace,
    context: lt.Context,
    drafters: Drafters,
    variants: Sequence[tuple[str, NMax]],
    prompts: Sequence[list[int]],
    times: int,
    temperature: float,
) -> Iterator[Row]:
    """Tokens per second of each variant relative to no drafter in the same round."""
    groups = [prompts[i : i + context.n_seq_max] for i in range(0, len(prompts), context.n_seq_max)] * times
    options = {"max_tokens": arguments.tokens, "temperature": temperature, "seed": 1}

    def run(drafter: lt.Drafter | None) -> tuple[float, list[lt.Generation]]:
        found = [run_after_prompts(context, group, drafter, **options) for group in groups]
        return sum(seconds for seconds, _ in found), [one for _, results in found for one in results]

    def rate(seconds: float, results: Sequence[lt.Generation]) -> float:
        return sum(len(one.tokens) - 1 for one in results) / seconds

    run(None)
    plain: list[float] = []
    ratios: dict[tuple[str, NMax], list[float]] = {variant: [] for variant in variants}
    last: dict[tuple[str, NMax], tuple[float, list[lt.Generation]]] = {}
    for _ in range(arguments.rounds):
        plain.append(rate(*run(None)))
        for variant in variants:
            last[variant] = run(drafters.make(*variant))
            ratios[variant].append(rate(*last[variant]) / plain[-1])
    yield {"drafter": "none", "n_max": "", "tokens per second": spread(plain)}
    for variant in variants:
        _, results = last[variant]
        rounds = sum(one.stats.rounds for one in results)
        yield {
            "drafter": variant[0],
            "n_max": variant[1],
            "relative to none": spread(ratios[variant]),
            "tokens per round": round(sum(len(one.tokens) - 1 for one in results) / max(rounds, 1), 3),
            "draft seconds per round": sum(one.stats.draft_seconds for one in results) / max(rounds, 1),
        }


def cost(arguments: argparse.Namespace, label: str, model: lt.Model) -> list[Row]:
    rows: list[Row] = []
    for n_seq in arguments.sequences:
        with chat_context(arguments, model, n_seq) as context:
            curve = pass_seconds(arguments, context)
            drafters = Drafters(arguments, context)
            row = {"target": label, "sequences": n_seq}
            rows.append(
                row
                | {
                    "milliseconds of a pass of 1 token a sequence": round(curve[1] * 1e3, 2),
                    "a pass of 1..9, relative to it": [round(curve[k] / curve[1], 3) for k in sorted(curve)],
                }
            )
            limits = [n for n in arguments.n_max if isinstance(n, int) and n + 1 in curve]
            spent: dict[str, dict[int, float]] = {"a drafter that costs nothing": dict.fromkeys(limits, 0.0)}
            for name in drafters.names:
                if name not in TEXT_DRAFTERS:
                    spent[name] = {
                        n: draft_seconds(arguments, context, drafters.make(name, n)) for n in limits
                    }
            for name, seconds in spent.items():
                pays = {f"n_max {n}": round(break_even(curve, n, seconds[n] * n_seq), 3) for n in limits}
                rows.append(row | {"break-even tokens per round with": name} | pays)
    return rows


def pass_seconds(arguments: argparse.Namespace, context: lt.Context) -> dict[int, float]:
    """Median seconds of a pass by its number of tokens for each sequence, after 128 tokens."""
    n_seq, start = context.n_seq_max, 128
    tokens = context.model.tokenize(PROMPT)

    def batch(begin: int, count: int) -> lt.Batch:
        made = lt.Batch()
        for seq in range(n_seq):
            for position in range(begin, begin + count):
                made.add(int(tokens[position % len(tokens)]), position, seq, True)
        return made

    for begin in range(0, start, 32):
        context.decode(batch(begin, 32))
    found: dict[int, list[float]] = {n: [] for n in range(1, 10)}
    # The first round warms up.
    for number in range(2 * arguments.rounds + 3):
        for n, seconds in found.items():
            seconds.append(timed(partial(context.decode, batch(start, n))))
            for seq in range(n_seq):
                context.memory.remove(seq, start)
            if number == 0:
                seconds.clear()
    context.memory.clear()
    return {n: float(np.median(seconds)) for n, seconds in found.items()}


def draft_seconds(arguments: argparse.Namespace, context: lt.Context, drafter: lt.Drafter) -> float:
    """Seconds of a drafter in a round of one sequence, its processing of the target's batch included."""
    prompts = [asked(context.model, text) for _, text in questions("own", context.n_seq_max)]
    _, results = run_after_prompts(context, prompts, drafter, max_tokens=arguments.tokens)
    rounds = sum(one.stats.rounds for one in results)
    return sum(one.stats.draft_seconds for one in results) / max(rounds, 1)


def overhead(arguments: argparse.Namespace, label: str, model: lt.Model) -> list[Row]:
    """Time of generation in relation to the engine calls in it, after the prompts' own pass."""
    rows: list[Row] = []
    for n_seq in arguments.sequences:
        with chat_context(arguments, model, n_seq) as context:
            drafters = Drafters(arguments, context)
            for temperature in arguments.temperatures:
                ratios: dict[str, list[float]] = {}
                for _ in range(arguments.rounds):
                    for name in ("none", *drafters.names):
                        drafter = None if name == "none" else drafters.make(name)
                        natives = [native_of(context)]
                        if isinstance(drafter, lt.SpeculativeDrafter):
                            natives.append(native_of(drafter.spec).context)
                        events = lt.generate(
                            context,
                            [PROMPT] * n_seq,
                            drafter,
                            max_tokens=arguments.tokens,
                            ignore_eos=True,
                            temperature=temperature,
                            seed=1,
                            stream=True,
                        )
                        next(events)
                        before = sum(native.engine_seconds for native in natives)
                        seconds = timed(partial(deque, events, maxlen=0))
                        engine = sum(native.engine_seconds for native in natives) - before
                        ratios.setdefault(name, []).append(seconds / engine)
                rows.append(
                    {"target": label, "sequences": n_seq, "temperature": temperature}
                    | {name: median(values) for name, values in ratios.items()}
                )
    return rows


def together(arguments: argparse.Namespace) -> list[Row]:
    """Speed-up of eight sequences in one context over one after the other, on a tiny model; and that of the
    engine's passes alone: eight passes of one row, and of four as with drafts, against one pass of all."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.tiny import TinyLlama

    tiny = TinyLlama(n_layer=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.n_vocab, 8 + i).tolist() for i in range(8)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with lt.Model(tiny.write(folder / "tiny.gguf", tokenizer=False)) as model:
            draft = random_eagle3(folder / "eagle3.gguf", model, heads=4, heads_kv=2, n_ff=96)

            def work(n_seq_max: int, drafted: bool) -> Callable[[], object]:
                context = model.context(n_ctx=2048, n_seq_max=n_seq_max, n_threads=arguments.threads)
                spec = lt.SpeculativeContext(context, draft, n_threads=arguments.threads)
                drafter = lt.Eagle3Drafter(spec, n_max=3) if drafted else None
                return lambda: list(
                    lt.generate(context, prompts, drafter, max_tokens=arguments.tokens // 2, ignore_eos=True)
                )

            for title, drafted in (("drafted", True), ("plain", False)):
                alone, all_of_them = work(1, drafted), work(8, drafted)
                ratios = []
                for _ in range(arguments.rounds):
                    first = timed(alone)
                    ratios.append(first / timed(all_of_them))
                rows.append({"8 sequences together / one after another": title, "speed-up": spread(ratios)})
            for n_rows in (1, 4):
                title = f"the engine's passes, rows of a sequence: {n_rows}"
                speed_up = passes_together(arguments, model, n_rows)
                rows.append({"8 sequences together / one after another": title, "speed-up": speed_up})
    return rows


def passes_together(arguments: argparse.Namespace, model: lt.Model, rows: int) -> dict[str, float]:
    ratios = []
    with model.context(n_ctx=2048, n_seq_max=8, n_threads=arguments.threads) as context:
        positions = [0] * 8

        def decode(seqs: range) -> None:
            batch = lt.Batch()
            for seq in seqs:
                for _ in range(rows):
                    batch.add(5, positions[seq], seq, True)
                    positions[seq] += 1
            context.decode(batch)

        for _ in range(20):
            one = sum(timed(partial(decode, range(seq, seq + 1))) for seq in range(8))
            ratios.append(one / timed(lambda: decode(range(8))))
    return spread(ratios)


def memory(arguments: argparse.Namespace) -> list[Row]:
    """Memory that a draft context adds to a process, by number of sequences."""
    program = (
        "import sys, llamatap as lt; from pathlib import Path\n"
        "def rss():\n"
        "    return int(Path('/proc/self/status').read_text().partition('VmRSS:')[2].split()[0])\n"
        "context = lt.Model(sys.argv[1]).context(n_ctx=4096, n_seq_max=int(sys.argv[3]))\n"
        "before = rss(); spec = lt.SpeculativeContext(context, sys.argv[2])\n"
        "spec.memory.clear(); print((rss() - before) / 1024)"
    )
    rows: list[Row] = []
    with lt.Model(arguments.target) as model, model.context(n_ctx=64) as context:
        files = Drafters(arguments, context).files
    for name, file in files.items():
        row: Row = {"MiB of a draft context": name}
        for n in (1, 8, 32):
            command = [sys.executable, "-c", program, arguments.target, file, str(n)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row[f"{n} sequences"] = round(float(done.stdout), 1)
        rows.append(row)
    return rows
