"""Drafts of a given acceptance, for a model of another shape."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from draft_figures import spread
from draft_setup import Row, chat_context
from draft_speed import run_after_prompts
from rigged_drafts import SHAPES, RiggedDrafter, random_eagle3, random_target

import llamatap as lt
from llamatap.drafting.speculative_context import load_draft


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
