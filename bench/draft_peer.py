"""The engine's own program for drafting beside ours, with the same files."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_figures import spread
from draft_setup import ROOT, Row, questions
from draft_speed import run_after_prompts
from rigged_drafts import random_eagle3

import llamatap as lt
from llamatap.drafting.model_drafters import named_drafter

QUANTIZE = ROOT / "build" / "fidelity" / "quantize"
#: The engine's own program, linked with the engine of the package (bench/peer).
PEER = ROOT / "build" / "peer" / "llama-speculative-simple"
#: The engine's numbers for file types.
F16, Q4_0 = 1, 2
#: How the threads of the engine's program wait: spinning (its default), or asleep, as ours do.
WAITS: dict[str, tuple[object, ...]] = {"": (), ", --poll 0": ("--poll", 0, "--poll-draft", 0)}


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
