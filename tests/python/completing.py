"""What tests of the text endpoints share: the real client, and what the package itself generates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
from generating import EXACT, log_softmax
from numpy.typing import NDArray
from serving import Running

import llamatap as lt
from llamatap._engine_context import EngineContext

#: Untyped: requests are also wrong, and answers hold more than OpenAI's.
Client = Any


@contextlib.contextmanager
def client_of(server: Running, key: str = "none") -> Iterator[Client]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def async_client(server: Running) -> Client:
    """To be used in an ``async with``."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def alone(model: lt.Model, prompts: Any, **options: Any) -> list[lt.Generation]:
    """What the package generates in a context for itself, one text after another."""
    with model.context(n_ctx=2048, n_seq_max=1, **EXACT) as context:
        return list(lt.generate(context, prompts, **options))


def logprobs_by_hand(
    model: lt.Model, prompt: Sequence[int], tokens: Sequence[int]
) -> list[NDArray[np.float64]]:
    """At each token, the log-probabilities of all."""
    found = []
    with model.context(n_ctx=1024, **EXACT) as context:
        context.decode(lt.Batch.of(list(prompt)))
        for i, token in enumerate(tokens):
            found.append(log_softmax(context.logits()))
            context.decode(lt.Batch.of([token], pos0=len(prompt) + i))
    return found


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every decode of a context take so long at least."""
    decode = EngineContext.decode

    def slowly(context: EngineContext, batch: lt.Batch) -> None:
        time.sleep(seconds)
        decode(context, batch)

    monkeypatch.setattr(EngineContext, "decode", slowly)


def wait_until_free(server: Running, seconds: float = 5) -> None:
    """Until no prompt waits and no text goes on."""
    deadline = time.monotonic() + seconds
    while server.worker.waiting:
        assert time.monotonic() < deadline, f"{server.worker.waiting} prompts are still there"
        time.sleep(0.01)
