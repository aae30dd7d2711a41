"""Targets, prompts and drafters of the benchmarks of drafting."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

import llamatap as lt
from llamatap.drafting.model_drafters import named_drafter
from llamatap.drafting.speculative_context import load_draft
from llamatap.loaded_model import LoadedModel

ROOT = Path(__file__).parents[1]
PROMPTS = Path(__file__).parent / "prompts"
#: Drafters without a file, and what they draft at most by default.
TEXT_DRAFTERS = {"ngram": 8, "suffix": 64}
NMax = int | Literal["auto"]
Row = dict[str, Any]


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
