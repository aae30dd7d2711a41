"""generate(): continue prompts by continuous batching, with or without a drafter."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from llamatap._native import native_of
from llamatap._options import takes_options
from llamatap._validate import flag
from llamatap.context import Context
from llamatap.drafting.any_drafter import AnyDrafter, as_drafter
from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import Input, is_single, prompt_tokens
from llamatap.generation.options import (
    GenerateOptions,
    check_trained_length,
    new_request,
    request_capacity,
    split_options,
)
from llamatap.generation.results import Event, Generation
from llamatap.generation.scheduler import Scheduler
from llamatap.loaded_model import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerateOptions", "generate"]

# Maximum number of sequences in a context that is created here.
_MOST_SEQUENCES = 8
# How much more memory sequences with caches of their own may take than one cache for all.
_MOST_OWN_CACHES = 1.5
# Cells by which the engine sizes caches.
_CACHE_STEP = 256


def _events(scheduler: Scheduler) -> Generator[Event, None, None]:
    events: Sequence[Event] = ()
    with scheduler:
        while scheduler.queue:
            events = scheduler.round()
            # The last events come after the context is released.
            if scheduler.queue:
                yield from events
    yield from events


def _in_order(events: Generator[Event, None, None], n_prompts: int) -> Generator[Generation, None, None]:
    done: dict[int, Generation] = {}
    upcoming = 0
    with contextlib.closing(events):
        for event in events:
            if event.final is not None:
                done[event.index] = event.final
            while upcoming in done:
                yield done.pop(upcoming)
                upcoming += 1
    assert upcoming == n_prompts


def _context_for(
    model_or_context: LoadedModel | Context, prompts: Sequence[NDArray[np.int32]], max_tokens: int
) -> tuple[Context, list[int]]:
    """The context to generate in, and the maximum number of positions of each request. For a model that is
    the prompt plus ``max_tokens``, limited to the trained length; the new context has room for as many
    requests as run at once.

    :raises ContextFullError: a prompt for a model is longer than that was trained for.
    """
    if isinstance(model_or_context, Context):
        return model_or_context, [request_capacity(model_or_context)] * len(prompts)
    model = model_or_context
    for index, prompt in enumerate(prompts):
        advice = f"give a context of more than {len(prompt)} tokens, model.context(n_ctx=...), for the model"
        check_trained_length(model, len(prompt), f"prompt {index}", advice)
    wanted = [min(len(prompt) + max_tokens, model.n_ctx_train or 2**31 - 1) for prompt in prompts]
    n_seq_max = min(len(wanted), _MOST_SEQUENCES) if native_of(model).batches_sequences else 1
    together, longest = sum(sorted(wanted)[-n_seq_max:]), max(wanted, default=0)
    # In one cache for all, each sequence's attention goes over the cells of the others too: eight texts of
    # 800 tokens take 1.2 times as long. Caches of their own are as large as the longest text.
    unified = n_seq_max * longest > _MOST_OWN_CACHES * together
    # The engine rounds caches to whole steps, and warns where it has to.
    own = -(-longest // _CACHE_STEP) * _CACHE_STEP
    n_ctx = together if unified else n_seq_max * own
    context = Context(model, n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=unified)
    most = request_capacity(context)
    return context, [min(capacity, most) for capacity in wanted]


@overload
def generate(
    model_or_context: LoadedModel | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Generator[Generation, None, None]: ...


@overload
def generate(
    model_or_context: LoadedModel | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: Literal[True],
    **options: Unpack[GenerateOptions],
) -> Generator[Event, None, None]: ...


@overload
def generate(
    model_or_context: LoadedModel | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: bool,
    **options: Unpack[GenerateOptions],
) -> Generator[Generation, None, None] | Generator[Event, None, None]: ...


@takes_options(GenerateOptions)
def generate(
    model_or_context: LoadedModel | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: bool = False,
    **options: Unpack[GenerateOptions],
) -> Generator[Generation, None, None] | Generator[Event, None, None]:
    """Generate text after prompts by continuous batching: prompts are admitted as others end, and one decode
    of the target serves all in-flight requests.

    :param model_or_context: a context with an empty memory, which is empty again afterwards; or a model, for
        which a context of the right size is created, at most the trained length for each prompt.
    :param prompts: a str, token ids, or a list of either.
    :param drafter: a :class:`Drafter` (several in a list are asked in turn), or a function from token ids to
        guesses of the next ones, such as llama-cpp-python's draft models. The tokens are the same without a
        drafter: the target chooses every token itself, and accepts a draft as far as it matches. But the
        engine rounds differently when it computes several tokens at once: near-ties may be decided
        differently, rarely with float32 weights on a CPU, sometimes with quantised ones.
    :param stream: yield an :class:`Event` for each token as it is generated, instead of a :class:`Generation`
        for each prompt, in the order of the prompts.
    :options:
    :raises InvalidInputError: an argument is wrong, the context holds tokens, or a drafter returns no valid
        draft.
    :raises BusyError: another generation uses the context or the drafter, or another thread uses the context.
    :raises ContextFullError: a prompt is longer than the context; or, for a model, than it was trained for.
    :raises UnsupportedError: the model generates no text.
    :raises NotFiniteError: its logits contain NaN or infinity.

    A generation owns the context's memory and the drafter: until it ends, calls that would change the memory
    raise BusyError. It ends with its last result, or with the iterator: ``close()``, or leaving a loop, frees
    the memory. Exceptions of a drafter are raised, and the context can be used again.

    Prompts are prefilled in chunks of at most ``n_batch`` tokens, in the same passes as in-flight requests.
    Penalties see the prompt too. The prompt at index i has its own seed, ``(seed + i * 0x9E3779B1) % (2**32 -
    1)``.
    """
    chosen = as_drafter(drafter)
    if not isinstance(model_or_context, (LoadedModel, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, LoadedModel) else model_or_context.model
    flag("stream", stream)
    checked, sampling = split_options(model, chosen, options, "generate()")
    inputs = cast("Sequence[Input]", [prompts] if is_single(prompts, "prompts") else prompts)
    texts = [prompt_tokens(model, prompt, None) for prompt in inputs]
    context, capacities = _context_for(model_or_context, texts, checked.max_tokens)
    scheduler = Scheduler(context, chosen)
    seed = sampling["seed"]
    base = secrets.randbits(31) if seed is None else seed
    for index, (tokens, capacity) in enumerate(zip(texts, capacities, strict=True)):
        # Seeds far apart: no prompt gets the random numbers of another call with a nearby seed.
        sampling["seed"] = (base + index * 0x9E3779B1) % (2**32 - 1)
        scheduler.queue.add(new_request(model, index, tokens, capacity, checked, sampling, f"prompt {index}"))
    events = _events(scheduler)
    return events if stream else _in_order(events, len(texts))
