"""Model drafters beside recurrent and hybrid targets: a rejected draft must leave no trace.

That holds for the target's memory and for the draft's own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import architecture_checks
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, ragged, seed_of
from support.tiny import TinyLlama, TinyQwen35
from support.tiny_models import drafters

import llamatap as lt

MAX_TOKENS = 20
SEED = 31
#: Targets: architectures of the engine's own files, and one of ours.
OF_THE_ENGINE = ("jamba", "mamba", "falcon-h1")
#: name: the file, and options of the context.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35, four tokens back": ("qwen35", {"n_rs_seq": 4}),
    "qwen35, one token back": ("qwen35", {"n_rs_seq": 1, "kv_unified": False}),
    "qwen35, saved": ("qwen35", {}),
    **{f"{name}, saved": (name, {}) for name in OF_THE_ENGINE},
}


@dataclass(frozen=True)
class Target:
    model: lt.Model
    options: dict[str, Any]
    prompts: list[list[int]]
    expected: Mapping[str, list[list[int]]]
    eagle3: Path
    small: Path

    def context(self, n_seq_max: int) -> lt.Context:
        return self.model.context(n_ctx=512, n_seq_max=n_seq_max, **EXACT, **self.options)

    def run(self, context: lt.Context, drafter: Any, **options: Any) -> list[lt.Generation]:
        return list(
            lt.generate(
                context,
                self.prompts,
                drafter,
                max_tokens=MAX_TOKENS,
                seed=SEED,
                ignore_eos=True,
                **options,
            )
        )

    def guessing(self, sampling: str, **options: Any) -> Guessing:
        texts = [[*p, *t] for p, t in zip(self.prompts, self.expected[sampling], strict=True)]
        return Guessing(self.model.n_vocab, texts, **options)


def target_file(name: str, folder: Path) -> Path:
    if name == "qwen35":
        return TinyQwen35().write(folder / "target.gguf")
    if not architecture_checks.WRITER.exists():
        pytest.skip("the writer of models is not built; `make test` builds it")
    command = [str(architecture_checks.WRITER), "-o", str(folder), "-s", "1", "-a", name]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / f"{name}-dense.gguf"


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    name, options = TARGETS[request.param]
    folder = tmp_path_factory.mktemp("hybrid")
    with lt.Model(target_file(name, folder)) as model:
        n_vocab = model.n_vocab
        prompts = ragged(np.random.default_rng(19), n_vocab, (5, 23, 1, 40))
        expected = {
            sampling: [
                by_hand(model, prompt, MAX_TOKENS, seed=seed_of(SEED, i), **SAMPLING[sampling])
                for i, prompt in enumerate(prompts)
            ]
            for sampling in ("greedy", "drawn")
        }
        layers = (1, model.n_layer // 2, model.n_layer) if name == "qwen35" else (0, 1, 2)
        eagle3 = drafters.write_eagle3(
            folder / "eagle3.gguf", n_embd_target=model.n_embd, target_layers=layers, n_vocab=n_vocab
        )
        small = TinyLlama(n_layer=2, n_vocab=n_vocab, seed=2)
        small_path = small.write(folder / "small.gguf", tokenizer=name == "qwen35")
        yield Target(model, options, prompts, expected, eagle3, small_path)


def eagle3(target: Target, context: lt.Context, **options: Any) -> lt.Drafter:
    spec = lt.SpeculativeContext(context, target.eagle3, n_ubatch=16, **EXACT)
    return lt.Eagle3Drafter(spec, n_max=4, **options)


def model(target: Target, context: lt.Context, **options: Any) -> lt.Drafter:
    spec = lt.SpeculativeContext(context, target.small, n_ubatch=16, as_model=True, **EXACT)
    return lt.ModelDrafter(context, spec, n_max=4, **options)


KINDS: list[Callable[..., lt.Drafter]] = [eagle3, model]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("sampling", "n_seq_max"), [("greedy", 1), ("drawn", 3)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tokens_are_those_without_a_drafter(
    kind: Callable[..., lt.Drafter], sampling: str, n_seq_max: int, target: Target
) -> None:
    """The drafter works alone, and behind one that is often right, so that drafts are accepted in part."""
    with target.context(n_seq_max) as context:
        drafter = kind(target, context)
        for one in (drafter, drafter, [target.guessing(sampling, wrong=0.4, longest=4), drafter]):
            found = target.run(context, one, **SAMPLING[sampling])
            assert [one.tokens.tolist() for one in found] == target.expected[sampling]
            assert is_empty(context)
            assert all(one.stats.drafted > 10 for one in found)
        assert sum(one.stats.accepted for one in found) > 5


class Telling(Guessing):
    """A drafter that gives distributions, most of the probability on the drafted token."""

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Mapping[int, lt.Draft]:
        found = {}
        for seq, draft in super().draft(requests).items():
            rows = np.full((len(draft.tokens), self.n_vocab), 0.3 / self.n_vocab, np.float32)
            rows[range(len(draft.tokens)), draft.tokens] += 0.7
            found[seq] = lt.Draft(draft.tokens, None, rows)
        return found


@pytest.mark.sampled(18)
@pytest.mark.parametrize("kind", [*KINDS, None], ids=["eagle3", "model", "own"])
def test_the_most_likely_tokens_with_rejection(kind: Any, target: Target) -> None:
    """Greedy, and drawn from the one most likely token."""
    with target.context(2) as context:
        for options in ({}, {"temperature": 1.0, "top_k": 1}):
            if kind is None:
                texts = target.guessing("greedy").known
                drafter: lt.Drafter = Telling(target.model.n_vocab, texts, wrong=0.3, longest=4)
            else:
                drafter = kind(target, context, temperature=0.5)
            found = target.run(context, drafter, rejection=True, **options)
            assert [one.tokens.tolist() for one in found] == target.expected["greedy"]
            assert is_empty(context)
            assert all(one.stats.drafted > 3 for one in found)
        if kind is None:
            assert sum(one.stats.accepted for one in found) > 10
