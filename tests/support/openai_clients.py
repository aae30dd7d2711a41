"""Helpers of the text endpoint tests: OpenAI's client, and the same text generated in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, log_softmax
from support.servers import Running

import llamatap as lt
from llamatap._engine_context import EngineContext

#: Untyped: requests are also wrong, and answers hold more than OpenAI's.
Client = Any


@contextlib.contextmanager
def client_of(server: Running, key: str = "none") -> Iterator[Client]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def async_client(server: Running) -> Client:
    """OpenAI's asynchronous client, for an ``async with``."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def alone(model: lt.Model, prompts: Any, **options: Any) -> list[lt.Generation]:
    """Generate in a context of its own, one text after another."""
    with model.context(n_ctx=2048, n_seq_max=1, **EXACT) as context:
        return list(lt.generate(context, prompts, **options))


def logprobs_by_hand(
    model: lt.Model, prompt: Sequence[int], tokens: Sequence[int]
) -> list[NDArray[np.float64]]:
    """Log-probabilities of all tokens, at each token."""
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
    """Wait until no request waits or is in flight."""
    deadline = time.monotonic() + seconds
    while server.worker.waiting:
        assert time.monotonic() < deadline, f"{server.worker.waiting} prompts are still there"
        time.sleep(0.01)


def spelling(model: lt.Model, token: int) -> str:
    data = model.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
