"""Events of a request's new tokens, and its result."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llamatap._engine_context import EngineContext
from llamatap.generation.request import Request
from llamatap.generation.results import Event, Generation, TokenLogprobs

__all__ = ["new_events"]


def new_events(request: Request, engine: EngineContext) -> Iterator[Event]:
    """Events of the tokens not yet reported, except tokens whose requested states are still to come. A text
    that ends without a new token (cancelled, ``max_tokens=0``) gives one event without a token.

    :param engine: the context that generates, for the provenance of states.
    """
    done = request.finish_reason is not None
    full = request.options.states == "full"
    states_kept = request.kept.generated
    known = len(states_kept) if full and not done else len(request.tokens)
    if done and request.n_given == known:
        final = _generation(request, engine)
        first = _prompt_logprobs(request) if known == 0 else None
        yield Event(request.index, -1, request.pieces[-1], None, None, final, request.cancelled.set, first)
    while request.n_given < known:
        i = request.n_given
        request.n_given += 1
        last = done and i + 1 == len(request.tokens)
        states = None
        if full and i < len(states_kept):
            states = request.kept.states_of_generated(engine, [states_kept[i]], [request.tokens[i]])
        elif last and not full and states_kept:
            states = request.kept.states_of_generated(engine, states_kept, request.tokens[-1:])
        yield Event(
            request.index,
            request.tokens[i],
            request.pieces[i],
            states,
            request.logprobs[i] if request.options.logprobs is not None else None,
            _generation(request, engine) if last else None,
            request.cancelled.set,
            _prompt_logprobs(request) if i == 0 else None,
        )


def _generation(request: Request, engine: EngineContext) -> Generation:
    assert request.finish_reason is not None
    options, kept = request.options, request.kept
    with_states = request.tokens[-1:] if options.states == "last" else request.tokens
    return Generation(
        request.index,
        request.prompt,
        np.array(request.tokens, np.int32),
        request.text.text,
        request.finish_reason,
        kept.states_of_generated(engine, kept.generated, with_states[: len(kept.generated)]),
        kept.states_of_prompt(engine, request.prompt[: request.n_prefilled])
        if options.prompt_states
        else None,
        request.logprobs if options.logprobs is not None else None,
        request.stats,
        _prompt_logprobs(request),
    )


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    return None if request.options.prompt_logprobs is None else request.prompt_logprobs
