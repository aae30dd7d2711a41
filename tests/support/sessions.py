"""Helpers of the session tests: prompts with options of their own, and each one's result alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, SAMPLING, Guessing, nearly, ragged
from support.numerics import relative
from support.tiny import TinyLlama
from support.tiny_models import drafters

import llamatap as lt

CUT: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 16, "n_batch": 32, **EXACT}


@dataclass(frozen=True)
class Workload:
    """A target, drafters for it, and prompts, each with its own options and what it generates alone."""

    model: lt.Model
    other: Path
    eagle3: Path
    prompts: list[list[int]]
    options: list[dict[str, Any]]
    alone: list[lt.Generation]


#: Options of each prompt: states, stops and sampling in any combination.
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 25, "seed": 5, **SAMPLING["drawn"]},
    {"max_tokens": 20, "states": "full", "layers": [1, -1]},
    {"max_tokens": 18, "states": "last", "layers": "norm", "seed": 6, **SAMPLING["drawn"]},
    {"max_tokens": 35, "logprobs": 3, "seed": 2**32 - 2, **SAMPLING["penalties"]},
    {"max_tokens": 9, "prompt_states": True, "layers": [0, "norm", -1]},
    {"max_tokens": 22, "states": "full", "prompt_states": True, "logprobs": 0},
    {"max_tokens": 1, "states": "last"},
    {"max_tokens": 40, "seed": 7, **SAMPLING["drawn"]},
    {"max_tokens": 12, "states": "full", "layers": [2, 2, -2], "seed": 8, **SAMPLING["penalties"]},
    {"max_tokens": 3, "prompt_states": True, "layers": 3},
    {"max_tokens": 16},
]
LENGTHS = (9, 1, 40, 16, 23, 71, 2, 5, 33, 12, 90, 7)


@contextmanager
def session_workload(folder: Path) -> Iterator[Workload]:
    tiny = TinyLlama()
    with lt.Model(tiny.write(folder / "target.gguf")) as model:
        prompts = ragged(np.random.default_rng(8), model.n_vocab, LENGTHS)
        options = [{"ignore_eos": True, "seed": 0, **one} for one in OPTIONS]
        # Where some texts end: a string, a token.
        with model.context(**CUT) as context:
            first, second = (next(lt.generate(context, prompts[at], **options[at])) for at in (0, 8))
            options[0]["stop"] = ["never so", next(x for x in first.text[4:] if x not in first.text[:4])]
            options[8]["stop_tokens"] = [int(second.tokens[11])]
            alone = [
                next(lt.generate(context, prompt, **own))
                for prompt, own in zip(prompts, options, strict=True)
            ]
        assert {one.finish_reason for one in alone} == {"stop", "length"}
        assert 3 < len(alone[0].tokens) < 30
        yield Workload(
            model,
            nearly(tiny, folder / "other.gguf", noise=0.05),
            drafters.write_eagle3(folder / "eagle3.gguf"),
            prompts,
            options,
            alone,
        )


def drafter_of(kind: str, workload: Workload, context: lt.Context) -> Any:
    if kind == "ngram":
        return lt.NGramDrafter(2, 1)
    if kind == "model":
        return lt.ModelDrafter(context, workload.other, n_max=3)
    if kind == "guessing":
        texts = [[*p, *one.tokens.tolist()] for p, one in zip(workload.prompts, workload.alone, strict=True)]
        return Guessing(workload.model.n_vocab, texts, wrong=0.2)
    if kind == "eagle3":
        spec = lt.SpeculativeContext(context, workload.eagle3, n_threads=1)
        return [lt.Eagle3Drafter(spec, n_max=3), drafter_of("guessing", workload, context)]
    return None


def check(workload: Workload, at: int, found: lt.Generation) -> None:
    """Check a generation against the prompt's result alone, and its states against extraction."""
    options, alone = workload.options[at], workload.alone[at]
    assert found.prompt.tolist() == workload.prompts[at]
    assert found.tokens.tolist() == alone.tokens.tolist()
    assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
    assert (found.logprobs is None) == ("logprobs" not in options)
    for one, other in zip(found.logprobs or [], alone.logprobs or [], strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(one.top) == options["logprobs"]
    text = [*workload.prompts[at], *found.tokens.tolist()]
    layers = options.get("layers", -2)
    with lt.Extractor(workload.model, **EXACT) as extractor:
        expected = extractor(text, layers).array
    n = len(found.tokens)
    wanted = {"full": n, "last": 1}.get(options.get("states", ""))
    for states, rows in (
        (found.states, None if wanted is None else slice(len(text) - wanted, None)),
        (found.prompt_states, slice(len(text) - n) if options.get("prompt_states") else None),
    ):
        assert (states is None) == (rows is None)
        if states is not None and rows is not None:
            assert states.tokens.tolist() == text[rows]
            assert states.array.shape == expected[rows].shape
            assert max(relative(a, b) for a, b in zip(states.array, expected[rows], strict=True)) < 1e-4


def finals(session: lt.Session) -> dict[int, lt.Generation]:
    """Run a session to its end; the final generations by index."""
    found = {}
    while session.pending:
        for event in session.step():
            if event.final is not None:
                found[event.index] = event.final
    return found
