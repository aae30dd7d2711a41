"""Samplers: the shorter way for a temperature alone chooses what the engine's chain chooses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.tiny import TinyLlama

import llamatap as lt

#: A bias of 0 changes no logit, and goes through the engine's chain.
THROUGH_THE_CHAIN = {0: 0.0}


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    """A vocabulary of a usual size."""
    tiny = TinyLlama(n_layer=1, n_embd=32, n_vocab=50_001, n_head=2)
    with lt.Model(tiny.write(tmp_path_factory.mktemp("wordy") / "tiny.gguf", tokenizer=False)) as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.8, 1.0, 5.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_a_temperature_alone_draws_what_the_engine_draws(
    wordy: lt.Model, temperature: float, scale: float
) -> None:
    rng = np.random.default_rng(0)
    short = lt.Sampler(wordy, temperature=temperature, seed=7)
    chain = lt.Sampler(wordy, temperature=temperature, seed=7, logit_bias=THROUGH_THE_CHAIN)
    for number in range(200):
        logits = (rng.standard_normal(wordy.n_vocab) * scale).astype(np.float32)
        # Ties and excluded tokens.
        logits[rng.integers(0, wordy.n_vocab, 5)] = logits.max()
        logits[rng.integers(0, wordy.n_vocab, 5)] = -np.inf
        assert short.sample_logits(logits) == chain.sample_logits(logits)
        if number == 100:
            short.reset()
            chain.reset()


def test_an_error_draws_no_number(wordy: lt.Model) -> None:
    rng = np.random.default_rng(0)
    one, other = (lt.Sampler(wordy, temperature=0.8, seed=3) for _ in range(2))
    for bad in (np.nan, np.inf):
        with pytest.raises(lt.InvalidInputError, match="NaN or infinity"):
            one.sample_logits(np.full(wordy.n_vocab, bad, np.float32))
    with pytest.raises(lt.InvalidInputError, match="no token possible"):
        one.sample_logits(np.full(wordy.n_vocab, -np.inf, np.float32))
    with pytest.raises(lt.InvalidInputError, match="overflow"):
        lt.Sampler(wordy, temperature=1e-3).sample_logits(np.full(wordy.n_vocab, 3e38, np.float32))
    logits = rng.standard_normal(wordy.n_vocab).astype(np.float32)
    assert [one.sample_logits(logits) for _ in range(9)] == [other.sample_logits(logits) for _ in range(9)]
