"""Cost and benefit of drafting: our loop, the engine's own program, several sequences, memory.

    make bench-drafting
    python bench/speculation.py [--rounds N] [--tokens N] [--threads N]    (after make has built its parts)

Figures are medians of ratios within a round, in which every variant runs once. Files are made here: SmolLM2
as float16 with a 4-bit copy of itself as the draft model (most of a draft is accepted), with EAGLE-3 weights
drawn at random (none is), and tiny models whose next token is a table. Writes JSON to bench/results/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import machine, median, timed, write_results

import llamatap as lt
from llamatap._native import native_of
from llamatap.fetch import fetch

TESTS = Path(__file__).parents[1] / "tests"
BUILD = Path(__file__).parents[1] / "build"
QUANTIZE = BUILD / "fidelity" / "quantize"
#: The engine's own program, linked with the engine of the package (bench/peer).
PEER = BUILD / "peer" / "llama-speculative-simple"
#: The engine's numbers for file types.
F16, Q4_0 = 1, 2
N_MAX = 3
#: How the threads of the engine's program wait: spinning (its default), or asleep, as ours do.
WAITS: dict[str, tuple[object, ...]] = {
    "as it comes": (),
    "--poll 0": ("--poll", 0, "--poll-draft", 0),
}
PROMPT = "The history of the lighthouse begins with fires on hills. Later, people built towers of stone, and"


def quantized(source: Path, target: Path, file_type: int) -> Path:
    subprocess.run([QUANTIZE, source, target, str(file_type)], check=True, capture_output=True)
    return target


def random_eagle3(path: Path, target: lt.Model, *, heads: int, heads_kv: int, n_ff: int) -> Path:
    """Write a drafter of the usual size for such a model, with random weights; it inherits the embedding
    and the head."""
    rng = np.random.default_rng(0)
    n = target.n_embd
    kv = n // heads * heads_kv
    writer = gguf.GGUFWriter(path, "eagle3")
    keys: dict[str, Any] = {
        "context_length": 2048,
        "embedding_length": n,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "vocab_size": target.n_vocab,
        "target_hidden_size": n,
    }
    for key, value in keys.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("eagle3.rope.freq_base", 1e5)
    writer.add_array("eagle3.target_layers", [2, target.n_layer // 2, target.n_layer - 3])
    source = gguf.GGUFReader(target.path)
    for key, field in source.fields.items():
        if key.startswith("tokenizer.") and "chat" not in key:
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)

    def draw(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))
        writer.add_tensor(name, values.astype(np.float16))

    draw("fc.weight", n, 3 * n)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))
    draw("blk.0.attn_q.weight", n, 2 * n)
    draw("blk.0.attn_k.weight", kv, 2 * n)
    draw("blk.0.attn_v.weight", kv, 2 * n)
    draw("blk.0.attn_output.weight", n, n)
    draw("blk.0.ffn_gate.weight", n_ff, n)
    draw("blk.0.ffn_up.weight", n_ff, n)
    draw("blk.0.ffn_down.weight", n, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Pair:
    """A target and a drafter, generating the same text over and over."""

    def __init__(self, model: lt.Model, draft: Path, n_max: int, threads: int | None, n_tokens: int) -> None:
        self.context = model.context(n_ctx=1024, n_threads=threads)
        self.spec = lt.SpeculativeContext(self.context, draft, n_threads=threads)
        self.drafter = lt.load_drafter(self.context, self.spec, n_max=n_max)
        self.n_tokens = n_tokens
        self.last: lt.Generation | None = None

    def first_text(self) -> str:
        """The target's first tokens, chosen so that tokenizing their text gives them again."""
        first = next(lt.generate(self.context, PROMPT, max_tokens=1, ignore_eos=True))
        model = self.context.model
        again = model.tokenize(PROMPT + first.text)
        assert again.tolist() == [*model.tokenize(PROMPT), *first.tokens]
        return first.text

    def run(self, drafter: lt.Drafter | None) -> tuple[float, float]:
        """(seconds, seconds of them in the engine) of the rounds after the prompt."""
        natives = (native_of(self.context), native_of(self.spec).context)
        events = lt.generate(
            self.context, PROMPT, drafter, max_tokens=self.n_tokens, ignore_eos=True, stream=True
        )
        next(events)  # the prompt's own pass
        before = sum(native.engine_seconds for native in natives)

        def rest() -> None:
            for event in events:
                self.last = event.final or self.last

        seconds = timed(rest)
        return seconds, sum(native.engine_seconds for native in natives) - before


def peer_speed(
    arguments: argparse.Namespace, target: Path, draft: Path, kind: str, prompt_text: str, *options: object
) -> dict[str, float]:
    """Run the engine's own program on the same files: tokens a second after the prompt, drafted, accepted.

    It drafts after the last token of its prompt, where ours drafts after the first token that it sampled: the
    prompt that it gets ends with that token, and it generates one token less.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompt:
        prompt.write(prompt_text)
        prompt.flush()
        command = [
            *(PEER, "-m", target, "-md", draft, "--spec-type", kind, "-f", prompt.name),
            *("--spec-draft-n-max", N_MAX, "--spec-draft-p-min", 0, "-n", arguments.tokens - 1, "--temp", 0),
            *("-c", 1024, "-t", arguments.threads or 2, "-td", arguments.threads or 2, "--ignore-eos"),
            *options,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    text = done.stdout + done.stderr
    found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", text)
    if found is None:
        sys.exit(f"{PEER} said nothing that this program understands:\n{text[-2000:]}")
    counts = {
        name: float(value) for name, value in re.findall(r"(n_draft|n_drafted|n_accept)\s*=\s*(\d+)", text)
    }
    return {"tokens": float(found[1]), "tokens_per_second": float(found[1]) / float(found[2]), **counts}


def against_engine(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from support.tiny import write_as_f32

    exact = write_as_f32(fetch("smollm2"), folder / "f32.gguf")
    target = quantized(exact, folder / "target-f16.gguf", F16)
    small = quantized(exact, folder / "draft-q4_0.gguf", Q4_0)
    results: dict[str, Any] = {}
    with lt.Model(target) as model:
        eagle3 = random_eagle3(folder / "eagle3.gguf", model, heads=9, heads_kv=3, n_ff=1536)
        for name, draft, kind in (
            ("model (Q4_0 of itself)", small, "draft-simple"),
            ("EAGLE-3 (random weights)", eagle3, "draft-eagle3"),
        ):
            pair = Pair(model, draft, N_MAX, arguments.threads, arguments.tokens)
            prompt = PROMPT + pair.first_text()
            plain, ours, overhead = [], [], []
            peers: dict[str, list[dict[str, float]]] = {wait: [] for wait in WAITS}
            for _ in range(arguments.rounds):
                plain.append((arguments.tokens - 1) / pair.run(None)[0])
                seconds, engine = pair.run(pair.drafter)
                overhead.append(seconds / engine)
                ours.append((arguments.tokens - 1) / seconds)
                for wait, options in WAITS.items():
                    peers[wait].append(peer_speed(arguments, target, draft, kind, prompt, *options))
            assert pair.last is not None
            stats = pair.last.stats
            results[name] = {
                "tokens per second, plain": median(plain),
                "tokens per second, drafted": median(ours),
                "time / engine calls": median(overhead),
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "tokens per round": round(stats.tokens_per_round, 3),
            }
            for wait, runs in peers.items():
                speeds = [run["tokens_per_second"] for run in runs]
                ratios = [mine / theirs for mine, theirs in zip(ours, speeds, strict=True)]
                results[name][f"tokens per second / llama-speculative-simple, {wait}"] = median(ratios)
                results[name][f"llama-speculative-simple, {wait}"] = {
                    **runs[-1],
                    "tokens_per_second": median(speeds),
                }
    return results


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time of generation in relation to the engine calls in it, after the prompts' own pass: SmolLM2 as
    published, one sequence and eight, greedy and sampled, with and without a drafter."""
    drafters: dict[str, Callable[[], lt.Drafter | None]] = {
        "plain": lambda: None,
        "n-grams": lt.NGramDrafter,
        "suffixes": lt.SuffixDrafter,
    }
    results: dict[str, float] = {}
    with lt.Model(fetch("smollm2")) as model:
        for n in (1, 8):
            context = model.context(n_ctx=1024 * n, n_seq_max=n, n_threads=arguments.threads)
            native = native_of(context)
            ratios: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for temperature in (0.0, 0.8):
                    for name, make in drafters.items():
                        events = lt.generate(
                            context,
                            [PROMPT] * n,
                            make(),
                            max_tokens=arguments.tokens,
                            ignore_eos=True,
                            temperature=temperature,
                            seed=1,
                            stream=True,
                        )
                        next(events)
                        before = native.engine_seconds
                        seconds = timed(partial(deque, events, maxlen=0))
                        label = f"{n} at once, temperature {temperature}, {name}"
                        ratios.setdefault(label, []).append(seconds / (native.engine_seconds - before))
            results |= {label: median(values) for label, values in ratios.items()}
    return results


def together(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Speed-up of eight sequences in one context over one after the other, on a tiny model; and that of the
    engine's passes alone: eight passes of one row, and of four as with drafts, against one pass of all."""
    from support.tiny import TinyLlama

    tiny = TinyLlama(n_layer=5)
    target = tiny.write(folder / "tiny.gguf", tokenizer=False)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.n_vocab, 8 + i).tolist() for i in range(8)]
    with lt.Model(target) as model:
        draft = random_eagle3(folder / "tiny-eagle3.gguf", model, heads=4, heads_kv=2, n_ff=96)

        def work(n_seq_max: int, drafted: bool) -> Callable[[], object]:
            context = model.context(n_ctx=2048, n_seq_max=n_seq_max, n_threads=arguments.threads)
            spec = lt.SpeculativeContext(context, draft, n_threads=arguments.threads)
            drafter = lt.Eagle3Drafter(spec, n_max=3) if drafted else None
            return lambda: list(
                lt.generate(context, prompts, drafter, max_tokens=arguments.tokens // 2, ignore_eos=True)
            )

        results = {}
        for name, drafted in (("drafted", True), ("plain", False)):
            alone, all_of_them = work(1, drafted), work(8, drafted)
            ratios = []
            for _ in range(arguments.rounds):
                first = timed(alone)
                ratios.append(first / timed(all_of_them))
            results[f"8 sequences together / one after another, {name}"] = median(ratios)
        for rows in (1, 4):
            results[f"the same of the engine's passes, rows of a sequence: {rows}"] = passes(
                model, arguments, rows
            )
    return results


def passes(model: lt.Model, arguments: argparse.Namespace, rows: int) -> float:
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
    return median(ratios)


def memory(folder: Path) -> dict[str, Any]:
    """Memory that a draft context adds to a process, by number of sequences."""
    program = (
        "import sys, llamatap as lt; from pathlib import Path\n"
        "def rss():\n"
        "    return int(Path('/proc/self/status').read_text().partition('VmRSS:')[2].split()[0])\n"
        "n = int(sys.argv[3])\n"
        "context = lt.Model(sys.argv[1]).context(n_ctx=4096, n_seq_max=n)\n"
        "before = rss(); spec = lt.SpeculativeContext(context, sys.argv[2])\n"
        "spec.memory.clear(); print((rss() - before) / 1024)"
    )
    results = {}
    for n in (1, 8, 32):
        done = subprocess.run(
            [sys.executable, "-c", program, folder / "target-f16.gguf", folder / "eagle3.gguf", str(n)],
            capture_output=True,
            text=True,
            check=True,
        )
        results[f"MiB of an EAGLE-3 draft context, {n} sequences"] = round(float(done.stdout), 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    for program in (QUANTIZE, PEER):
        if not program.exists():
            sys.exit(f"bench/speculation.py: there is no {program}; run `make bench-drafting`")
    sys.path.insert(0, str(TESTS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "machine": machine(),
            "engine": against_engine(arguments, folder),
            "overhead": {"time / engine calls": overhead(arguments)},
            **together(arguments, folder),
            **memory(folder),
        }
    for key, value in results.items():
        if isinstance(value, dict):
            for title, figures in value.items():
                print(title)
                for label, figure in figures.items():
                    print(f"    {label}: {figure}")
        else:
            print(f"{key}: {value}")
    write_results("speculation", results)


if __name__ == "__main__":
    main()
