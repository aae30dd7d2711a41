"""Generating text: continuous batches, with or without a drafter, the same tokens either way."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from llamatap._native import native_of
from llamatap._validate import flag, integer
from llamatap.context import Context
from llamatap.drafting.drafter import AnyDrafter, as_drafter
from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import Input, is_single, prompt_tokens
from llamatap.generation.options import GenerateOptions, checked_options, new_prompt, room_of
from llamatap.generation.results import Event, Generation
from llamatap.generation.scheduler import Scheduler
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerateOptions", "generate"]

# The most sequences of a context that is made for a model.
_MOST_SEQUENCES = 8


def _events(loop: Scheduler) -> Generator[Event, None, None]:
    events: Sequence[Event] = ()
    with loop:
        while loop.waiting or loop.live:
            events = loop.round()
            # The last events come after the context is released.
            if loop.waiting or loop.live:
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


def _capacities(model: LoadedModel, prompts: Sequence[NDArray[np.int32]], max_tokens: int) -> list[int]:
    """The most positions of each request: prompt and max_tokens, up to the model's training length, or up to
    the prompt's own where that is longer."""
    return [min(len(prompt) + max_tokens, max(model.n_ctx_train, len(prompt))) for prompt in prompts]


def _context_for(model: LoadedModel, capacities: Sequence[int]) -> Context:
    n_seq_max = min(len(capacities), _MOST_SEQUENCES) if native_of(model).batches_sequences else 1
    return Context(model, n_ctx=sum(sorted(capacities)[-n_seq_max:]), n_seq_max=n_seq_max)


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


def generate(
    model_or_context: LoadedModel | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    penalty_last_n: int = 64,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Iterable[str] = (),
    stop_tokens: Iterable[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    states: Literal["last", "full"] | None = None,
    prompt_states: bool = False,
    layers: Iterable[LayerId] | LayerId | None = None,
    on_states: Callable[[Generation], object] | None = None,
    rejection: bool = False,
    stream: bool = False,
) -> Generator[Generation, None, None] | Generator[Event, None, None]:
    """Generate text after prompts by continuous batching: prompts are admitted as others end, and one decode
    of the target serves all in-flight requests.

    :param model_or_context: a context with an empty memory, which is empty again afterwards; or a model,
        which gets a context of its own, sized to the work.
    :param prompts: a str, token ids, or a list of either.
    :param drafter: a :class:`Drafter` (several in a list are asked in turn), or a function from token ids to
        those that may follow, such as llama-cpp-python's draft models. The tokens are the same without one:
        the target chooses every token itself, and a draft is used as far as it is equal. But the engine
        rounds otherwise when it computes several tokens at once: near-ties may fall the other way, rarely
        with float32 weights on a CPU, now and then with quantised ones.
    :param max_tokens: of each prompt, a stop token included; 0, only with ``prompt_logprobs`` or
        ``prompt_states``, computes the prompts alone. With a model, texts are no longer than what it
        was trained with (:attr:`Model.n_ctx_train`), and end there as in a full context.
    :param temperature: 0 takes the most likely token. This and the others up to ``logit_bias``: as of
        :class:`Sampler`; penalties see the prompt too.
    :param seed: of the random numbers. The prompt at index i has a seed of its own,
        ``(seed + i * 0x9E3779B1) % (2**32 - 1)``. None draws one.
    :param stop: strings that end a text; they are not part of it.
    :param stop_tokens: tokens that end a text, besides the model's own end-of-generation tokens.
    :param ignore_eos: go on after end-of-generation tokens.
    :param logprobs: how many of the most likely tokens to report at each; None for no log-probabilities.
        They are of the logits as they are, whatever ``logit_bias``, penalties and temperature are.
    :param prompt_logprobs: the same at each token of the prompt but the first, given those before it. Its
        rows pass through the output head then, ``n_ubatch`` of them at a time at most.
    :param states: the target's states of the generated tokens, from the same passes: of each (``"full"``), or
        of the last (``"last"``). Only the final token, which no pass has computed, costs one more decode.
        At the end of a full context there is no place for the last token, so its row is missing.
    :param prompt_states: the target's states of the prompt's tokens as well, from the passes that it enters
        with; or alone, without ``states``.
    :param layers: which states, as of :meth:`Context.tap`; None for (-2,), as there. Only with ``states`` or
        ``prompt_states``.
    :param on_states: called with each :class:`Generation` as soon as its text is finished, whatever its turn
        among the prompts, in the thread that generates: where states go that are collected while texts are
        made. :attr:`Generation.states` and :attr:`Generation.prompt_states` say which tokens their rows are
        of. Cancelled texts come with the rows that they have. Only with ``states`` or ``prompt_states``. What
        it raises comes out, like what a drafter raises; the time that it takes is in none of the statistics.
    :param rejection: accept drafted tokens by rejection sampling, for drafters that draw their tokens
        (``temperature`` of theirs above 0): the same distribution, other tokens, more of them accepted.
    :param stream: give an :class:`Event` for each token as it comes, rather than a :class:`Generation` for
        each prompt, in the order of the prompts.
    :raises InvalidInputError: an argument is wrong, the context holds tokens, or a drafter returns no valid
        draft.
    :raises BusyError: another generation is going on in the context or with the drafter, or another thread
        uses the context.
    :raises ContextFullError: a prompt is longer than the context.
    :raises UnsupportedError: the model generates no text.
    :raises NotFiniteError: its logits hold NaN or infinity.

    A generation has the context's memory, and the drafter, for itself: until it ends, what would change the
    memory raises BusyError. It ends with its last result, or with the iterator: ``close()``, or leaving a
    loop, frees the memory. Exceptions of a drafter are raised, and the context can be used again.

    Prefill is in pieces of ``n_batch`` tokens at most, beside the decode of in-flight requests.
    """
    chosen = as_drafter(drafter)
    if not isinstance(model_or_context, (LoadedModel, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, LoadedModel) else model_or_context.model
    flag("stream", stream)
    options, sampling = checked_options(
        model,
        chosen,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        penalty_last_n=penalty_last_n,
        logit_bias=logit_bias,
        stop=stop,
        stop_tokens=stop_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        states=states,
        prompt_states=prompt_states,
        layers=layers,
        on_states=on_states,
        rejection=rejection,
    )
    inputs = cast("Sequence[Input]", [prompts] if is_single(prompts, "prompts") else prompts)
    texts = [prompt_tokens(model, prompt, None) for prompt in inputs]
    if isinstance(model_or_context, Context):
        context = model_or_context
        rooms = [room_of(context)] * len(texts)
    else:
        capacities = _capacities(model, texts, options.max_tokens)
        context = _context_for(model, capacities)
        room = room_of(context)
        rooms = [min(capacity, room) for capacity in capacities]
    loop = Scheduler(context, chosen)
    base = secrets.randbits(31) if seed is None else integer("seed", seed, 0, 2**32 - 2)
    for index, (tokens, room) in enumerate(zip(texts, rooms, strict=True)):
        # Seeds far apart: no prompt gets the random numbers of another call with a nearby seed.
        sampling["seed"] = (base + index * 0x9E3779B1) % (2**32 - 1)
        prompt = new_prompt(model, index, tokens, room, options, sampling, f"prompt {index}")
        loop.waiting.append(prompt)
    events = _events(loop)
    return events if stream else _in_order(events, len(texts))
