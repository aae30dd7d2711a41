"""Targets whose memory can roll back a few tokens only, or none.

Hybrid and recurrent models, which hold a state beside or instead of a cache, and sliding windows that keep no
more than the window. After a draft that was rejected, everything must be as if it had never been.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import architecture_checks
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, log_softmax, ragged, seed_of
from support.numerics import relative
from support.tiny import TinyGemma3, TinyQwen35
from support.tiny_models.registry import FILES

import llamatap as lt

MAX_TOKENS = 18
LENGTHS = (5, 23, 40)
SEED = 13
#: For some architectures the engine reads GELU or the like from a table, which magnifies rounding.
BOUND = 5e-4


@dataclass(frozen=True)
class Target:
    model: lt.Model
    options: dict[str, Any]  # of contexts
    prompts: list[list[int]]
    expected: dict[str, list[list[int]]]

    def context(self, n_seq_max: int, **more: Any) -> lt.Context:
        return self.model.context(**{"n_ctx": 512, "n_seq_max": n_seq_max, **EXACT, **self.options, **more})

    def guessing(self, sampling: str = "greedy", **options: Any) -> Guessing:
        texts = [[*p, *t] for p, t in zip(self.prompts, self.expected[sampling], strict=True)]
        return Guessing(self.model.n_vocab, texts, **options)


#: name of a file: options of contexts
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35, four tokens back": ("tiny-qwen35", {"n_rs_seq": 4}),
    "qwen35, one token back": ("tiny-qwen35", {"n_rs_seq": 1, "kv_unified": False}),
    "qwen35, small ubatches": ("tiny-qwen35", {"n_rs_seq": 4, "n_ubatch": 9, "n_batch": 16}),
    "qwen35, saved": ("tiny-qwen35", {}),
    "qwen35, saved, apart": ("tiny-qwen35", {"kv_unified": False}),
    "gemma3, window": ("tiny-gemma3", {"swa_full": False}),
    "gemma3, window, small ubatches": ("tiny-gemma3", {"swa_full": False, "n_ubatch": 8, "n_batch": 16}),
    "gemma3, all kept": ("tiny-gemma3", {"swa_full": True}),
    "gemma3, all kept, small ubatches": ("tiny-gemma3", {"swa_full": True, "n_ubatch": 4}),
    "gemma3, all kept, small batches": ("tiny-gemma3", {"swa_full": True, "n_batch": 4}),
    "gemma3, all kept, few outputs": ("tiny-gemma3", {"swa_full": True, "n_outputs_max": 4}),
    "rwkv7, saved": ("rwkv7", {}),
    "jamba, saved": ("jamba", {}),
    "mamba, saved": ("mamba", {}),
    "falcon-h1, saved": ("falcon-h1", {}),
}
OF_THE_ENGINE = ("jamba", "mamba", "falcon-h1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("hybrid")

    def path_of(name: str) -> Path:
        if name not in OF_THE_ENGINE:
            path = folder / f"{name}.gguf"
            if not path.exists():
                own = {"tiny-qwen35": TinyQwen35, "tiny-gemma3": TinyGemma3}
                make: Any = own.get(name) or FILES[name]
                make().write(path)
            return path
        if not architecture_checks.WRITER.exists():
            pytest.skip("the writer of models is not built; `make test` builds it")
        path = folder / f"{name}-dense.gguf"
        if not path.exists():
            command = [str(architecture_checks.WRITER), "-o", str(folder), "-s", "1", "-a", name]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        return path

    return path_of


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, files: Callable[[str], Path]) -> Iterator[Target]:
    name, options = TARGETS[request.param]
    with lt.Model(files(name)) as model:
        prompts = ragged(np.random.default_rng(17), model.n_vocab, LENGTHS)
        prompts.append(prompts[0] * 6)
        kept = {key: value for key, value in options.items() if key == "swa_full"}
        expected = {
            sampling: [
                by_hand(model, prompt, MAX_TOKENS, seed=seed_of(SEED, i), options=kept, **SAMPLING[sampling])
                for i, prompt in enumerate(prompts)
            ]
            for sampling in ("greedy", "drawn")
        }
        yield Target(model, options, prompts, expected)


def run(target: Target, context: lt.Context, drafter: Any, sampling: str, **options: Any) -> Any:
    return list(
        lt.generate(
            context,
            target.prompts,
            drafter,
            **{
                "max_tokens": MAX_TOKENS,
                "seed": SEED,
                "ignore_eos": True,
                **SAMPLING[sampling],
                **options,
            },
        )
    )


@pytest.mark.sampled(22)
@pytest.mark.parametrize(("sampling", "n_seq_max"), [("greedy", 1), ("drawn", 3)])
def test_tokens_are_those_without_a_drafter(sampling: str, n_seq_max: int, target: Target) -> None:
    """Drafts of any length that are always, often or seldom wrong, for several sequences."""
    drafters: dict[str, Any] = {
        "none": None,
        "ngram": lt.NGramDrafter(2, 1, n_max=4),
        "wrong": target.guessing(sampling, wrong=1.0, longest=4),
        "half": target.guessing(sampling, wrong=0.4, longest=4),
        "right": target.guessing(sampling, wrong=0.05, longest=9),
        "function": lambda tokens: tokens[-3:],
    }
    with target.context(n_seq_max) as context:
        accepted = {}
        for name, drafter in drafters.items():
            found = run(target, context, drafter, sampling)
            assert [one.tokens.tolist() for one in found] == target.expected[sampling], name
            assert is_empty(context)
            drafted = sum(one.stats.drafted for one in found)
            accepted[name] = sum(one.stats.accepted for one in found)
            assert (drafted == 0) == (name == "none")
            assert accepted[name] < drafted or name in ("none", "right")
    assert accepted["half"] > 5


@pytest.mark.sampled(6)
def test_what_comes_after_a_rejection_is_what_a_fresh_prefill_gives(target: Target) -> None:
    """All logits of all tokens. https://github.com/ggml-org/llama.cpp/pull/20080"""
    with target.context(2) as context:
        drafter = target.guessing(wrong=0.5, longest=4)
        found = run(target, context, drafter, "greedy", logprobs=1024)
        rejected = sum(one.stats.drafted - one.stats.accepted for one in found)
        assert rejected > 5
    with target.context(1, n_rs_seq=0) as fresh:
        for prompt, one in zip(target.prompts, found, strict=True):
            assert one.logprobs is not None
            for i in range(0, MAX_TOKENS, 3):
                fresh.decode(lt.Batch.of([*prompt, *one.tokens.tolist()[:i]]))
                expected = log_softmax(fresh.logits())
                fresh.memory.clear()
                values = np.empty(target.model.n_vocab)
                for token, value in one.logprobs[i].top:
                    values[token] = value
                assert relative(values, expected) < BOUND


@pytest.mark.sampled(6)
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_text_may_end_inside_of_a_draft(n_seq_max: int, target: Target) -> None:
    """The others go on, and waiting prompts take its place."""
    for wrong, places in ((0.05, (6,)), (0.5, (1, 11))):
        for place in places:
            stops = {tokens[place] for tokens in target.expected["greedy"]}
            expected = [
                tokens[: next(i for i, token in enumerate(tokens) if token in stops) + 1]
                for tokens in target.expected["greedy"]
            ]
            with target.context(n_seq_max) as context:
                drafter = target.guessing(wrong=wrong, longest=6)
                found = run(target, context, drafter, "greedy", stop_tokens=stops)
                assert is_empty(context)
            assert [one.tokens.tolist() for one in found] == expected
            assert [one.finish_reason for one in found] == ["stop"] * len(expected)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("wrong", [0.05, 0.5, 1.0])
def test_states_of_tokens_are_those_of_the_whole_text(wrong: float, target: Target) -> None:
    """Rows recomputed after a rejection do not get into the states."""
    layers: list[lt.LayerId] = [0, 1, -1]
    with target.context(2) as context:
        drafter = target.guessing(wrong=wrong, longest=4)
        found = run(target, context, drafter, "greedy", states="full", layers=layers)
        last = run(target, context, drafter, "greedy", states="last", layers=layers)
        assert is_empty(context)
    with lt.Extractor(target.model, n_ctx=512, **EXACT) as extractor:
        for prompt, tokens, one, end in zip(
            target.prompts, target.expected["greedy"], found, last, strict=True
        ):
            expected = extractor([*prompt, *tokens], layers).array[len(prompt) :]
            assert one.tokens.tolist() == tokens
            assert one.states is not None
            assert relative(one.states.array, expected) < BOUND
            assert end.states is not None
            assert relative(end.states.array, expected[-1:]) < BOUND


@pytest.mark.sampled(4)
def test_a_full_context_ends_a_text(target: Target) -> None:
    """The last drafts leave room for the target's own token, and what is taken back is computed again."""
    prompt = (target.prompts[1] * 12)[:240]
    kept = {key: value for key, value in target.options.items() if key == "swa_full"}
    tokens = by_hand(target.model, prompt, 17, options={"n_ctx": 512, **kept})
    for wrong in (0.0, 0.6):
        with target.context(1, n_ctx=256) as context:
            drafter = Guessing(target.model.n_vocab, [[*prompt, *tokens, 9, 9, 9]], wrong=wrong)
            (found,) = lt.generate(context, prompt, drafter, max_tokens=99, ignore_eos=True)
            assert is_empty(context)
        assert found.tokens.tolist() == tokens
        assert found.finish_reason == "context"


@pytest.mark.sampled(4)
def test_a_text_that_is_cancelled_or_left_frees_the_memory(target: Target) -> None:
    with target.context(2) as context:
        for how in ("cancel", "close"):
            drafter = target.guessing(wrong=0.5, longest=4)
            stream: Any = lt.generate(
                context, target.prompts, drafter, max_tokens=MAX_TOKENS, states="last", stream=True
            )
            for count, event in enumerate(stream):
                if count == 20 and how == "close":
                    break
                if event.index == 1 and how == "cancel":
                    event.cancel()
            stream.close()
            assert is_empty(context)
        found = run(target, context, drafter, "greedy")
        assert [one.tokens.tolist() for one in found] == target.expected["greedy"]


@pytest.mark.parametrize("n_seq_max", [1, 2])
@pytest.mark.parametrize("n_outputs_max", [2, 3, 6])
@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_calls_of_few_outputs_take_drafts_too(
    n_rs_seq: int, n_outputs_max: int, n_seq_max: int, files: Callable[[str], Path]
) -> None:
    """An engine call of fewer outputs than drafts have cuts them, as small ubatches do."""
    with lt.Model(files("tiny-qwen35")) as model:
        prompts = [[5, 6, 7, 8], [50, 60, 70]]
        expected = [by_hand(model, prompt, MAX_TOKENS) for prompt in prompts]
        texts = [[*p, *t] for p, t in zip(prompts, expected, strict=True)]
        options = {"n_rs_seq": n_rs_seq, "n_outputs_max": n_outputs_max, "n_seq_max": n_seq_max, **EXACT}
        with model.context(n_ctx=256, **options) as context:
            drafter = Guessing(model.n_vocab, texts, wrong=0.5, longest=4)
            found = lt.generate(context, prompts, drafter, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert [one.tokens.tolist() for one in found] == expected


@pytest.mark.parametrize(("n_seq_max", "n_ubatch"), [(3, 6), (4, 7), (5, 8), (5, 9), (5, 10)])
def test_an_ubatch_that_is_too_small_is_refused_with_the_context(
    n_seq_max: int, n_ubatch: int, files: Callable[[str], Path]
) -> None:
    """A context that was created works with as many sequences as it says."""
    with lt.Model(files("tiny-qwen35")) as model:
        try:
            context = model.context(n_ctx=512, n_rs_seq=4, n_seq_max=n_seq_max, n_ubatch=n_ubatch, **EXACT)
        except lt.InvalidInputError:
            return
        prompts = ragged(np.random.default_rng(2), model.n_vocab, [20] * n_seq_max)
        found = list(lt.generate(context, prompts, max_tokens=3, ignore_eos=True))
        assert [one.tokens.tolist() for one in found] == [by_hand(model, prompt, 3) for prompt in prompts]


@pytest.mark.parametrize("n_ubatch", [8, 16])
@pytest.mark.parametrize("swa_full", [True, False])
def test_a_batch_of_two_ubatches_loses_nothing_of_a_window(
    swa_full: bool, n_ubatch: int, files: Callable[[str], Path], rng: np.random.Generator
) -> None:
    """The engine finds places for all ubatches beforehand. One for the second may be that of a token which
    leaves the window with the first, and the first still needs those before it."""
    with lt.Model(files("tiny-gemma3")) as model:
        one, other, gone = ragged(rng, model.n_vocab, (9, 5, 8))
        batch = lt.Batch()
        for position in range(5, 9):
            batch.add(one[position], position, 0, output=True)
        for position in range(5):
            batch.add(other[position], position, 1, output=True)
        options = {"n_ctx": 512, "n_batch": 16, "n_ubatch": n_ubatch, "swa_full": swa_full, **EXACT}
        with model.context(n_seq_max=2, **options) as context:
            context.decode(lt.Batch.of(one[:1]))
            context.decode(lt.Batch.of(gone, seq=1))
            context.decode(lt.Batch.of(one[1:5], pos0=1))
            context.memory.remove(1)
            context.decode(batch)
            found = [context.logits(row) for row in range(9)]
        texts = [one[: i + 1] for i in range(5, 9)] + [other[: i + 1] for i in range(5)]
        for text, logits in zip(texts, found, strict=True):
            with model.context(n_ctx=512, **EXACT) as context:
                context.decode(lt.Batch.of(text))
                assert relative(logits, context.logits()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("small", ["n_ubatch", "n_batch", "n_outputs_max"])
def test_drafts_over_windows_fit_what_is_computed_at_once(
    small: str, files: Callable[[str], Path], rng: np.random.Generator
) -> None:
    with lt.Model(files("tiny-gemma3")) as model:
        options = {"n_ctx": 1024, "n_seq_max": 4, small: 4, **EXACT}
        with model.context(**options) as context:
            for seed in range(6):
                prompts = ragged(rng, model.n_vocab, rng.integers(1, 20, 7).tolist())
                plain = [one.tokens.tolist() for one in lt.generate(context, prompts, max_tokens=16)]
                texts = [[*prompt, *text] for prompt, text in zip(prompts, plain, strict=True)]
                found = lt.generate(
                    context, prompts, Guessing(model.n_vocab, texts, seed=seed), max_tokens=16
                )
                assert [one.tokens.tolist() for one in found] == plain
