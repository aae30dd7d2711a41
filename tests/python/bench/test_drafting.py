"""bench/drafting.py: drafts that are watched along a text are those of generation with that drafter, and a
rigged drafter is right as often as it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_acceptance import watched
from draft_figures import Counts
from rigged_drafts import SHAPES, RiggedDrafter, random_eagle3, random_target
from support.generation import EXACT, ragged
from support.tiny_models import drafters

import llamatap as lt


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_watched_drafts_are_those_of_generation(
    n_seq_max: int, temperature: float, tmp_path: Path, tiny_model: lt.Model
) -> None:
    prompts = [list(prompt) for prompt in ragged(np.random.default_rng(1), tiny_model.n_vocab, (6, 31, 2))]
    options: Any = {"max_tokens": 40, "temperature": temperature, "seed": 1}
    with tiny_model.context(n_ctx=1024, n_seq_max=n_seq_max, **EXACT) as context:
        file = drafters.write_eagle3(tmp_path / "eagle3.gguf")
        spec = lt.SpeculativeContext(context, file, n_threads=1)
        made = {"eagle3": lt.load_drafter(context, spec, n_max=4), "ngram": lt.NGramDrafter(2, 1, n_max=4)}
        found = watched(context, made, prompts, **options)
        for n_max in (1, 3):
            for name in made:
                counts = Counts()
                for _, texts in found:
                    counts.add(texts[name], n_max)
                drafter: lt.Drafter = lt.NGramDrafter(2, 1, n_max=n_max)
                if name == "eagle3":
                    drafter = lt.load_drafter(context, spec, n_max=n_max)
                # With one seed for a call, each prompt's is that of its index in the call.
                groups = [prompts[i : i + n_seq_max] for i in range(0, len(prompts), n_seq_max)]
                real = [one for group in groups for one in lt.generate(context, group, drafter, **options)]
                assert [one.tokens.tolist() for one in real] == [tokens for tokens, _ in found]
                assert counts.rounds == sum(one.stats.rounds for one in real)
                assert sum(counts.accepted_at) == sum(one.stats.accepted for one in real)
                assert sum(counts.drafted_at) == sum(one.stats.drafted for one in real)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_rigged_drafts_are_right_as_often_as_told(rate: float, tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    with lt.Model(random_target(tmp_path / "target.gguf", shape)) as model:
        file = random_eagle3(tmp_path / "eagle3.gguf", model, heads=4, heads_kv=2, n_ff=96, n_draft_vocab=64)
        prompts = [[first, 9, 8, 7] for first in range(2)]
        with model.context(n_ctx=1024, n_seq_max=2, n_threads=1) as context:
            texts = [one.tokens.tolist() for one in lt.generate(context, prompts, max_tokens=200)]
            inner = lt.Eagle3Drafter(lt.SpeculativeContext(context, file, n_threads=1), n_max=3)
            rigged = RiggedDrafter(inner, dict(enumerate(texts)), rate, shape.n_vocab)
            found = list(lt.generate(context, prompts, rigged, max_tokens=200))
    assert [one.tokens.tolist() for one in found] == texts
    drafted = sum(one.stats.drafted_at[0] for one in found)
    assert sum(one.stats.accepted_at[0] for one in found) / drafted == pytest.approx(rate, abs=0.12)
