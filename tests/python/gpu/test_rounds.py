"""Texts that come and go on a GPU: every pass has another number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, relative

import llamatap as lt

pytestmark = pytest.mark.skipif(
    not any(device["kind"] == "gpu" for device in lt.build_config()["devices"]),
    reason="needs a GPU and a build for it",
)

LAYERS: tuple[lt.LayerId, ...] = (1, 3)


@pytest.fixture(scope="module")
def cpu(tiny_path: Path) -> Iterator[lt.Model]:
    with lt.Model(tiny_path) as model:
        yield model


def generated(
    model: lt.Model, prompts: list[list[int]], seed: int, **options: Any
) -> dict[int, lt.Generation]:
    """All texts, by their prompts; new ones come in while others are under way."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(prompts)).tolist()
    added: list[int] = []
    done: dict[int, lt.Generation] = {}
    with model.context(n_ctx=2048, n_seq_max=8, **EXACT) as context, lt.Session(context) as session:
        while order or session.pending:
            for _ in range(int(rng.integers(0, 3))):
                if order:
                    added.append(order.pop())
                    length = 6 + added[-1] % 5
                    session.add(prompts[added[-1]], max_tokens=length, ignore_eos=True, **options)
            for event in session.step():
                if event.final is not None:
                    done[added[event.index]] = event.final
    return done


def row_errors(found: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    return np.array([relative(one, other) for one, other in zip(found, expected, strict=True)])


@pytest.mark.parametrize("n_gpu_layers", [-1, 3])
def test_no_pass_is_computed_wrong(tiny_path: Path, cpu: lt.Model, n_gpu_layers: int) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 259, n).tolist() for n in rng.integers(1, 200, 40)]
    options: dict[str, Any] = {"states": "full", "prompt_states": True, "layers": LAYERS}
    wrong = 0
    with (
        lt.Model(tiny_path, n_gpu_layers=n_gpu_layers) as model,
        lt.Extractor(cpu, **EXACT) as extractor,
    ):
        for seed in range(20):
            for index, text in generated(model, prompts, seed, **options).items():
                expected = extractor([*prompts[index], *text.tokens.tolist()], LAYERS).array
                assert text.prompt_states is not None
                assert text.states is not None
                found = np.concatenate((text.prompt_states.array, text.states.array))
                wrong += int((row_errors(found, expected) > 5e-2).sum())
    assert wrong == 0


def test_no_token_is_drawn_from_wrong_logits(tiny_path: Path, cpu: lt.Model) -> None:
    """Nothing is tapped here: the engine's own logits, against those of a text computed at once."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 259, n).tolist() for n in rng.integers(1, 100, 40)]
    wrong = 0
    with lt.Model(tiny_path, n_gpu_layers=-1) as model:
        for seed in range(20):
            for index, text in generated(model, prompts, seed, logprobs=0).items():
                tokens = text.tokens.tolist()
                with cpu.context(n_ctx=512, **EXACT) as context:
                    batch = lt.Batch()
                    whole = [*prompts[index], *tokens]
                    for position, token in enumerate(whole):
                        batch.add(token, position, 0, True)
                    context.decode(batch)
                    assert text.logprobs is not None
                    for i, one in enumerate(text.logprobs):
                        logits = context.logits(len(prompts[index]) - 1 + i).astype(np.float64)
                        shifted = logits - logits.max()
                        logprob = shifted[tokens[i]] - np.log(np.exp(shifted).sum())
                        wrong += abs(one.logprob - logprob) > 0.3
    assert wrong == 0
