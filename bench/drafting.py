"""Drafting: tokens per round, acceptance, speed, break-even, and the engine's own program beside ours.

    make bench-drafting
    python bench/drafting.py [--quick] [--part PART ...] [--eagle3 FILE] [--mtp FILE]
    python bench/drafting.py --synthetic 0.5 0.7 0.9 [--shape tiny|qwen3-4b]

Prompts are those of bench/prompts: 64 questions that SmolLM2 wrote itself (own.jsonl, sampled as by
`llamatap conversations`, with a seed of their own), and 64 written by hand: chat, code, lists, translation
(hand.jsonl). Parts:

- acceptance: the model's own answers are decoded without drafts, and after each token every drafter is asked
  what it would have drafted. So one pass over the prompts gives the rounds of all drafters and draft lengths,
  all along the same texts. Figures count answers only. They are exact: other processes do not change them.
- speed: tokens per second after the prompts, relative to no drafter, within interleaved rounds. "again" are
  the same prompts twice, with one drafter.
- cost: seconds of a pass of the target by its number of tokens, and the tokens per round from which drafts
  pay, without and with the drafter's own time.
- peer: the engine's own program, llama-speculative-simple, with the same files.
- overhead: time of generation in relation to the engine calls in it.
- together: eight sequences in one context against one after another, on a tiny model.
- memory: of a draft context, by number of sequences.

`--synthetic` measures what drafts with given acceptance rates would bring to a model of another shape, with
random weights: a rigged drafter replays the target's own tokens, each right with that probability, in the
time of an EAGLE-3 pass of that width. Parts may run one at a time: bench/results/<--output>.json keeps the
others. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from common import RESULTS, machine, median, timed, write_results
from draft_figures import Counts, WatchedText, break_even, in_loops, markdown, right_tokens, spread
from rigged_drafts import SHAPES, RiggedDrafter, random_eagle3, random_target

import llamatap as lt
from llamatap._native import native_of
from llamatap.drafting.model_drafters import named_drafter
from llamatap.drafting.speculative_context import load_draft
from llamatap.fetch import fetch
from llamatap.loaded_model import LoadedModel

ROOT = Path(__file__).parents[1]
PROMPTS = Path(__file__).parent / "prompts"
QUANTIZE = ROOT / "build" / "fidelity" / "quantize"
#: The engine's own program, linked with the engine of the package (bench/peer).
PEER = ROOT / "build" / "peer" / "llama-speculative-simple"
#: The engine's numbers for file types.
F16, Q4_0 = 1, 2
#: How the threads of the engine's program wait: spinning (its default), or asleep, as ours do.
WAITS: dict[str, tuple[object, ...]] = {"": (), ", --poll 0": ("--poll", 0, "--poll-draft", 0)}
PARTS = ("acceptance", "speed", "cost", "peer", "overhead", "together", "memory")
#: Drafters without a file, and what they draft at most by default.
TEXT_DRAFTERS = {"ngram": 8, "suffix": 64}
PROMPT = "The history of the lighthouse begins with fires on hills. Later, people built towers of stone, and"
NMax = int | Literal["auto"]
Row = dict[str, Any]


# Models, prompts, drafters.


def open_target(arguments: argparse.Namespace, weights: str) -> lt.Model:
    """The target as its file has it, or dequantised to float16."""
    options: dict[str, Any] = {} if weights == "file" else {"weights": weights}
    return lt.Model(arguments.target, n_gpu_layers=arguments.gpu_layers, **options)


def label_of(model: lt.Model, weights: str) -> str:
    return model.file_type if weights == "file" else weights.upper()


def questions(name: str, count: int) -> list[tuple[str, str]]:
    """(kind, text) of `count` prompts of a file, evenly from all of it."""
    rows = [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]
    chosen = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return [(rows[i]["kind"], rows[i]["text"]) for i in chosen]


def asked(model: LoadedModel, text: str) -> list[int]:
    """The tokens of a question in the model's chat template."""
    return list(map(int, model.tokenize(model.apply_chat_template([{"role": "user", "content": text}]))))


class Drafters:
    """Drafters for a context, by name; those with a file share a draft context."""

    def __init__(self, arguments: argparse.Namespace, context: lt.Context) -> None:
        self.context = context
        files = {"eagle3": arguments.eagle3, "mtp": arguments.mtp, **dict(arguments.drafter)}
        self.files: dict[str, Path] = {name: Path(file) for name, file in files.items() if file is not None}
        self.names = [
            name for name in (*TEXT_DRAFTERS, *self.files) if name in (arguments.drafters or [name])
        ]
        self._gpu_layers: int = arguments.gpu_layers
        self._specs: dict[str, lt.SpeculativeContext] = {}

    def make(self, name: str, n_max: NMax | None = None) -> lt.Drafter:
        """A new drafter.

        :param n_max: None for the drafter's own limit.
        """
        options: Any = {} if n_max is None else {"n_max": n_max}
        if name in TEXT_DRAFTERS:
            return named_drafter(self.context, name, **options)
        return lt.load_drafter(self.context, self._spec(name), **options)

    def _spec(self, name: str) -> lt.SpeculativeContext:
        if name not in self._specs:
            draft = load_draft(self.context.model, self.files[name], n_gpu_layers=self._gpu_layers)
            self._specs[name] = lt.SpeculativeContext(self.context, draft)
        return self._specs[name]


@contextmanager
def chat_context(arguments: argparse.Namespace, model: lt.Model, n_seq: int) -> Iterator[lt.Context]:
    """A context for answers to the prompts, each sequence with a cache of its own."""
    with model.context(
        n_ctx=n_seq * (512 + arguments.tokens),
        n_seq_max=n_seq,
        n_threads=arguments.threads,
        kv_unified=n_seq == 1,
    ) as context:
        yield context


# Acceptance.


class Watcher(lt.Drafter):
    """Asks several drafters after each token, notes their drafts, and lets the target decode without them."""

    def __init__(self, drafters: Mapping[str, lt.Drafter]) -> None:
        self.drafters = drafters
        self.target_layers = tuple(dict.fromkeys(i for one in drafters.values() for i in one.target_layers))
        self.draws = False
        #: By drafter and sequence: the draft after each token.
        self.drafts: dict[str, dict[int, list[list[int]]]] = {name: {} for name in drafters}
        self._ended: dict[int, dict[str, list[list[int]]]] = {}

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        for one in self.drafters.values():
            one.process(batch, states.select(one.target_layers) if states and one.target_layers else None)

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
        for name, one in self.drafters.items():
            found = one.draft(requests)
            for seq in requests:
                draft = found[seq].tokens.tolist() if seq in found else []
                self.drafts[name].setdefault(seq, []).append(draft)
        return {}

    def accept(self, seq: int, n: int) -> None:
        for one in self.drafters.values():
            one.accept(seq, n)

    def reset(self, seq: int) -> None:
        for one in self.drafters.values():
            one.reset(seq)


def watched(
    context: lt.Context, drafters: Mapping[str, lt.Drafter], prompts: Sequence[list[int]], **options: Any
) -> list[tuple[list[int], dict[str, WatchedText]]]:
    """The texts after the prompts, with the drafts of every drafter after each token.

    As many prompts run at once as the context has sequences; prompt i of such a group is in sequence i.
    """
    results = []
    for begin in range(0, len(prompts), context.n_seq_max):
        watcher = Watcher(drafters)
        group = list(prompts[begin : begin + context.n_seq_max])
        for seq, found in enumerate(lt.generate(context, group, watcher, **options)):
            tokens = found.tokens.tolist()
            loops = in_loops(tokens)
            texts = {}
            for name in drafters:
                drafts = watcher.drafts[name].get(seq, [])
                # There is no request where no token would have fitted.
                drafts += [[]] * (len(tokens) - 1 - len(drafts))
                rest = [right_tokens(draft, tokens[i + 1 :]) for i, draft in enumerate(drafts)]
                texts[name] = WatchedText(rest[: max(len(tokens) - 1, 0)], loops)
            results.append((tokens, texts))
    return results


def acceptance(arguments: argparse.Namespace, label: str, model: lt.Model) -> list[Row]:
    rows: list[Row] = []
    numbers = [n for n in arguments.n_max if isinstance(n, int)]
    longest = max(numbers)
    with chat_context(arguments, model, 8) as context:
        drafters = Drafters(arguments, context)
        for temperature in arguments.temperatures:
            # A drafter's cache starts empty with each kind of sampling.
            made = {name: drafters.make(name, TEXT_DRAFTERS.get(name, longest)) for name in drafters.names}
            for file in ("own", "hand"):
                asked_for = questions(file, arguments.prompts)
                found = watched(
                    context,
                    made,
                    [asked(model, text) for _, text in asked_for],
                    max_tokens=arguments.tokens,
                    temperature=temperature,
                    seed=1,
                )
                kinds = dict.fromkeys([file, *(kind for kind, _ in asked_for)])
                for kind in kinds:
                    texts = [
                        one for one, (own, _) in zip(found, asked_for, strict=True) if kind in (file, own)
                    ]
                    n_tokens = sum(len(tokens) for tokens, _ in texts)
                    n_looping = sum(int(in_loops(tokens).sum()) for tokens, _ in texts)
                    for name in made:
                        own_length = TEXT_DRAFTERS.get(name)
                        for n_max in [*numbers, *([own_length] if own_length else [])]:
                            counts = Counts()
                            for _, drafts in texts:
                                counts.add(drafts[name], n_max)
                            rows.append(
                                {
                                    "target": label,
                                    "temperature": temperature,
                                    "prompts": kind,
                                    "drafter": name,
                                    "n_max": n_max,
                                    **counts.figures(),
                                    "generated tokens": n_tokens,
                                    "of them in loops": round(n_looping / max(n_tokens, 1), 3),
                                }
                            )
    return rows


# Speed.


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


# Cost.


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


# The engine's own program.


def quantized(source: Path, target: Path, file_type: int) -> Path:
    subprocess.run([QUANTIZE, source, target, str(file_type)], check=True, capture_output=True)
    return target


def peer_run(
    arguments: argparse.Namespace, files: Sequence[object], n_max: int, prompt: str, *options: object
) -> dict[str, float]:
    """Run the engine's own program: tokens a second after the prompt, drafted, accepted.

    It drafts after the last token of its prompt, where ours drafts after the first token that it sampled: the
    prompt that it gets ends with that token, and it generates one token less.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(prompt)
        file.flush()
        threads = arguments.threads or 2
        command = [
            *(PEER, *files, "-f", file.name, "--spec-draft-n-max", n_max, "--spec-draft-p-min", 0),
            *("-n", arguments.tokens - 1, "--temp", 0, "-c", 1024, "-t", threads, "-td", threads),
            *("--ignore-eos", "-ngl", arguments.gpu_layers, "-ngld", arguments.gpu_layers, *options),
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    text = done.stdout + done.stderr
    found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", text)
    if found is None:
        sys.exit(f"{PEER} said nothing that this program understands:\n{text[-2000:]}")
    counts = dict(re.findall(r"(n_drafted|n_accept)\s*=\s*(\d+)", text))
    return {
        "tokens per second": float(found[1]) / float(found[2]),
        "drafted": int(counts["n_drafted"]),
        "accepted": int(counts["n_accept"]),
    }


def peer(arguments: argparse.Namespace) -> list[Row]:
    """Our tokens per second relative to those of the engine's program, with the same files: float16 targets,
    one sequence, greedy, texts that end at no end token."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.tiny import write_as_f32

    from llamatap.convert import to_gguf

    rows: list[Row] = []
    n_max = min(3, max(n for n in arguments.n_max if isinstance(n, int)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = write_as_f32(arguments.target, folder / "f32.gguf")
        target = quantized(exact, folder / "target-f16.gguf", F16)
        # A 4-bit copy of the target: most of its drafts are accepted.
        cases = {"model (Q4_0 of itself)": (quantized(exact, folder / "q4_0.gguf", Q4_0), "draft-simple")}
        exact.unlink()
        if arguments.eagle3 is not None:
            cases["eagle3"] = (Path(arguments.eagle3), "draft-eagle3")
        else:
            with lt.Model(target) as model:
                draft = random_eagle3(folder / "eagle3.gguf", model, heads=9, heads_kv=3, n_ff=1536)
            cases["eagle3 (random weights)"] = (draft, "draft-eagle3")
        if arguments.mtp is not None:
            whole = to_gguf(arguments.mtp, target, folder / "whole.gguf", whole=True)
            cases["mtp, one file"] = (whole.path, "draft-mtp")
        for title, (draft, kind) in cases.items():
            own_file = kind == "draft-mtp"
            with lt.Model(
                draft if own_file else target, load_mtp=own_file, n_gpu_layers=arguments.gpu_layers
            ) as model:
                rows.append({"drafter": title} | peer_case(arguments, model, draft, kind, n_max))
    return rows


def peer_case(
    arguments: argparse.Namespace, model: lt.Model, draft: Path, kind: str, n_max: int
) -> dict[str, Any]:
    with model.context(n_ctx=1024, n_threads=arguments.threads) as context:
        name = "mtp" if kind == "draft-mtp" else str(draft)
        drafter = named_drafter(context, name, n_gpu_layers=arguments.gpu_layers, n_max=n_max)
        files = ["-m", model.path, "-md", draft, "--spec-type", kind]
        ratios: dict[str, list[float]] = {}
        counts = dict.fromkeys(("our drafted", "accepted", "its drafted", "accepted of them"), 0)
        for _, text in questions("own", 4):
            prompt = model.apply_chat_template([{"role": "user", "content": text}])
            options: Any = {"max_tokens": arguments.tokens, "ignore_eos": True}
            first = next(lt.generate(context, prompt, max_tokens=1, ignore_eos=True))
            if model.tokenize(prompt + first.text).tolist() != [*first.prompt, *first.tokens]:
                continue
            for number in range(arguments.rounds):
                plain, _ = run_after_prompts(context, [model.tokenize(prompt).tolist()], None, **options)
                seconds, results = run_after_prompts(
                    context, [model.tokenize(prompt).tolist()], drafter, **options
                )
                ratios.setdefault("tokens per second / plain", []).append(plain / seconds)
                ours = (arguments.tokens - 1) / seconds
                for wait, extra in WAITS.items():
                    found = peer_run(arguments, files, n_max, prompt + first.text, *extra)
                    ratios.setdefault(f"tokens per second / llama-speculative-simple{wait}", []).append(
                        ours / found["tokens per second"]
                    )
                if number == 0:
                    stats = results[0].stats
                    counts["our drafted"] += stats.drafted
                    counts["accepted"] += stats.accepted
                    counts["its drafted"] += int(found["drafted"])
                    counts["accepted of them"] += int(found["accepted"])
    return {"n_max": n_max, **{name: spread(values) for name, values in ratios.items()}, **counts}


# Overhead, sequences together, memory.


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


# Drafts with a given acceptance, for a model of another shape.


def synthetic(arguments: argparse.Namespace) -> list[Row]:
    shape = SHAPES[arguments.shape]
    rows: list[Row] = []
    numbers = [n for n in arguments.n_max if isinstance(n, int)]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        target = random_target(Path(name) / "target.gguf", shape)
        with lt.Model(target, n_gpu_layers=arguments.gpu_layers) as model:
            file = random_eagle3(
                Path(name) / "eagle3.gguf",
                model,
                heads=shape.n_head,
                heads_kv=shape.n_head_kv,
                n_ff=shape.n_ff,
                n_draft_vocab=min(32_000, shape.n_vocab // 2),
            )
            for n_seq in arguments.sequences:
                prompts = [[int(first), *rng.integers(0, shape.n_vocab, 31)] for first in range(n_seq)]
                options = {"max_tokens": arguments.tokens, "ignore_eos": True}
                with chat_context(arguments, model, n_seq) as context:
                    draft = load_draft(model, file, n_gpu_layers=arguments.gpu_layers)
                    spec = lt.SpeculativeContext(context, draft)
                    _, texts = run_after_prompts(context, prompts, None, **options)
                    known = {int(one.prompt[0]): one.tokens.tolist() for one in texts}
                    variants = [(rate, n) for rate in arguments.synthetic for n in numbers]
                    ratios: dict[tuple[float, int], list[float]] = {one: [] for one in variants}
                    stats: dict[tuple[float, int], list[lt.Stats]] = {}
                    for _ in range(arguments.rounds):
                        plain, _ = run_after_prompts(context, prompts, None, **options)
                        for rate, n_max in variants:
                            inner = lt.Eagle3Drafter(spec, n_max=n_max)
                            rigged = RiggedDrafter(inner, known, rate, shape.n_vocab)
                            seconds, found = run_after_prompts(context, prompts, rigged, **options)
                            ratios[rate, n_max].append(plain / seconds)
                            stats[rate, n_max] = [one.stats for one in found]
                    rows += [
                        {
                            "shape": arguments.shape,
                            "sequences": n_seq,
                            "acceptance asked": rate,
                            "n_max": n_max,
                            "tokens per round": round(
                                sum(one.tokens - 1 for one in stats[rate, n_max])
                                / sum(one.rounds for one in stats[rate, n_max]),
                                3,
                            ),
                            "relative to none": spread(ratios[rate, n_max]),
                        }
                        for rate, n_max in variants
                    ]
                    spec.close()
    return rows


def draft_length(text: str) -> NMax:
    return "auto" if text == "auto" else int(text)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, rounds and variants")
    parser.add_argument("--synthetic", nargs="+", type=float, metavar="RATE", help="only rigged drafts")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the target of --synthetic")
    parser.add_argument("--target", type=Path, help="a GGUF file (default: smollm2, fetched)")
    parser.add_argument("--weights", nargs="+", default=["f16", "file"], help="(default: f16 file)")
    models = ROOT / "models"
    for name, file in (("eagle3", "smollm2-eagle3.gguf"), ("mtp", "smollm2-mtp.safetensors")):
        known = models / file
        parser.add_argument(f"--{name}", type=Path, default=known if known.exists() else None, metavar="FILE")
    parser.add_argument(
        "--drafter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FILE"),
        help="another drafter's file; repeatable",
    )
    parser.add_argument("--drafters", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--n-max", nargs="+", type=draft_length, help="(default: 1 2 3 4 auto)")
    parser.add_argument("--temperatures", nargs="+", type=float, help="(default: 0 0.8)")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8], help="(default: 1 8)")
    parser.add_argument("--prompts", type=int, help="of each file (default: 64)")
    parser.add_argument("--tokens", type=int, help="of each answer (default: 128)")
    parser.add_argument("--rounds", type=int, help="interleaved (default: 5)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="-1 for all (default: 0)")
    parser.add_argument("--output", default="drafting", metavar="NAME", help="of the file in bench/results/")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.n_max = arguments.n_max or ([3, "auto"] if quick else [1, 2, 3, 4, "auto"])
    arguments.temperatures = arguments.temperatures or ([0.0] if quick else [0.0, 0.8])
    arguments.prompts = arguments.prompts or (16 if quick else 64)
    arguments.tokens = arguments.tokens or (64 if quick else 128)
    arguments.rounds = arguments.rounds or (2 if quick else 5)
    if quick and arguments.part is PARTS:
        arguments.part = ("acceptance", "speed", "cost")
    if not any(isinstance(n, int) for n in arguments.n_max):
        parser.error("--n-max needs a number, too")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """The parts' names and rows, as they come."""
    if arguments.synthetic:
        yield f"synthetic, {arguments.shape}", synthetic(arguments)
        return
    by_target: dict[str, Callable[[argparse.Namespace, str, lt.Model], list[Row]]] = {
        "acceptance": acceptance,
        "speed": speed,
        "cost": cost,
        "overhead": overhead,
    }
    others = {"peer": peer, "together": together, "memory": memory}
    if "peer" in arguments.part and not (PEER.exists() and QUANTIZE.exists()):
        print(f"no {PEER.name}: `make bench-drafting` builds it\n", file=sys.stderr)
        others.pop("peer")
    found: dict[str, list[Row]] = {}
    for weights in arguments.weights:
        with open_target(arguments, weights) as model:
            for part in arguments.part:
                if part in by_target:
                    found.setdefault(part, []).extend(
                        by_target[part](arguments, label_of(model, weights), model)
                    )
    yield from found.items()
    for part in arguments.part:
        if part in others:
            yield part, others[part](arguments)


def tables(part: str, rows: Sequence[Row]) -> Iterator[str]:
    """The rows as tables; for acceptance without the kinds of prompts by hand, and the first 8 positions."""
    if part == "acceptance":
        hidden = ("rounds", "drafted", "generated tokens")
        rows = [
            {
                key: value[:8] if isinstance(value, list) else value
                for key, value in row.items()
                if key not in hidden
            }
            for row in rows
            if row["prompts"] in ("own", "hand")
        ]
    # Rows with other columns have a table of their own.
    while rows:
        columns = set(rows[0])
        yield markdown(row for row in rows if set(row) == columns)
        rows = [row for row in rows if set(row) != columns]


def main() -> None:
    arguments = read_arguments()
    if arguments.target is None and not arguments.synthetic:
        arguments.target = fetch("smollm2")
    path = RESULTS / f"{arguments.output}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    settings = {key: value for key, value in vars(arguments).items() if key not in ("part", "output")}
    for part, rows in measure(arguments):
        print(f"## {part}\n")
        for table in tables(part, rows):
            print(f"{table}\n", flush=True)
        results[part] = {
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "settings": json.loads(json.dumps(settings, default=str)),
            "rows": rows,
        }
        write_results(arguments.output, results)


if __name__ == "__main__":
    main()
