"""Generating text: continuous batches, with or without a drafter, the same tokens either way."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap._check import flag, integer
from llamatap._loop import Loop, check_free
from llamatap._prompts import Input, is_single, prompt_tokens
from llamatap._sequence import Options, Prompt
from llamatap._text import TextStream
from llamatap.context import Context
from llamatap.drafters import AnyDrafter, as_drafter, specs_of
from llamatap.errors import ContextFullError, InvalidInputError, UnsupportedError
from llamatap.generation import Event, Generation
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.sampler import Sampler, SamplerOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerateOptions", "generate"]

# The most sequences of a context that is made for a model.
_MOST_SEQUENCES = 8


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


def _strings(name: str, values: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be a str or a list of them, not {values!r}")
    found = (values,) if isinstance(values, str) else tuple(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise InvalidInputError(f"{name} must be a str or a list of them, none empty; found {value!r}")
    return found


def _stop_tokens(model: Model, tokens: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes)):
        raise InvalidInputError(f"stop_tokens must be a list of token ids, not {tokens!r}")
    return tuple(integer("a stop token", token, 0, model.n_vocab - 1) for token in tokens)


def _pieces(model: Model) -> Callable[[int], bytes]:
    native = model.native
    try:
        native.piece(0, False)
    except UnsupportedError:
        return lambda token: b""
    return lambda token: native.piece(token, False)


def _capacities(model: Model, prompts: Sequence[NDArray[np.int32]], max_tokens: int) -> list[int]:
    """The places that texts may take: no more than what the model was trained with, or a prompt has."""
    return [min(len(prompt) + max_tokens, max(model.n_ctx_train, len(prompt))) for prompt in prompts]


def _context_for(model: Model, capacities: Sequence[int]) -> Context:
    n_seq_max = min(len(capacities), _MOST_SEQUENCES) if model.native.batches_sequences else 1
    return model.context(n_ctx=sum(sorted(capacities)[-n_seq_max:]), n_seq_max=n_seq_max)


class GenerateOptions(SamplerOptions, total=False):
    """The keyword arguments of :func:`generate`, but for ``stream``."""

    max_tokens: int
    stop: str | Iterable[str]
    stop_tokens: Iterable[int]
    ignore_eos: bool
    logprobs: int | None
    states: Literal["last", "full"] | None
    layers: Iterable[LayerId] | LayerId | None
    rejection: bool


@overload
def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Generator[Generation, None, None]: ...


@overload
def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: Literal[True],
    **options: Unpack[GenerateOptions],
) -> Generator[Event, None, None]: ...


@overload
def generate(
    model_or_context: Model | Context,
    prompts: Input | Sequence[Input],
    drafter: AnyDrafter = None,
    *,
    stream: bool,
    **options: Unpack[GenerateOptions],
) -> Generator[Generation, None, None] | Generator[Event, None, None]: ...


def generate(
    model_or_context: Model | Context,
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
    seed: int | None = None,
    stop: str | Iterable[str] = (),
    stop_tokens: Iterable[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    states: Literal["last", "full"] | None = None,
    layers: Iterable[LayerId] | LayerId | None = None,
    rejection: bool = False,
    stream: bool = False,
) -> Generator[Generation, None, None] | Generator[Event, None, None]:
    """Generate text after prompts, all at once: prompts enter as others end, and one decode of the target
    serves all of them.

    :param model_or_context: a context with an empty memory, which is empty again afterwards; or a model,
        which gets a context of its own, sized to the work.
    :param prompts: a str, token ids, or a list of either.
    :param drafter: a :class:`Drafter` (several in a list are asked in turn), or a function from token ids to
        those that may follow, such as llama-cpp-python's draft models. The tokens are the same without one:
        the target chooses every token itself, and a draft is used as far as it is equal. But the engine
        rounds otherwise when it computes several tokens at once: near-ties may fall the other way, rarely
        with float32 weights on a CPU, now and then with quantised ones.
    :param max_tokens: of each prompt, a stop token included. With a model, texts are no longer than what it
        was trained with (:attr:`Model.n_ctx_train`), and end there as in a full context.
    :param temperature: 0 takes the most likely token. This and the others up to ``penalty_last_n``: as of
        :class:`Sampler`; penalties see the prompt too.
    :param seed: of the random numbers. The prompt at index i has a seed of its own,
        ``(seed + i * 0x9E3779B1) % (2**32 - 1)``. None draws one.
    :param stop: strings that end a text; they are not part of it.
    :param stop_tokens: tokens that end a text, besides the model's own end-of-generation tokens.
    :param ignore_eos: go on after end-of-generation tokens.
    :param logprobs: how many of the most likely tokens to report at each; None for no log-probabilities.
    :param states: the target's states of the generated tokens, from the same passes: of each (``"full"``), or
        of the last (``"last"``). Only the final token, which no pass has computed, costs one more decode.
        At the end of a full context there is no place for the last token, so its row is missing.
    :param layers: which states, as of :meth:`Context.tap`; None for (-2,), as there. Only with ``states``.
    :param rejection: accept drafted tokens by rejection sampling, for drafters that draw their tokens
        (``temperature`` of theirs above 0): the same distribution, other tokens, more of them accepted.
    :param stream: give an :class:`Event` for each token as it comes, rather than a :class:`Generation` for
        each prompt, in the order of the prompts.
    :raises InvalidInputError: an argument is wrong, the context holds tokens, or a drafter gives what is
        none.
    :raises BusyError: another generation is going on in the context or with the drafter, or another thread
        uses the context.
    :raises ContextFullError: a prompt is longer than the context.
    :raises UnsupportedError: the model generates no text.

    A generation has the context's memory, and the drafter, for itself: until it ends, what would change the
    memory raises BusyError. It ends with its last result, or with the iterator: ``close()``, or leaving a
    loop, frees the memory. What a drafter raises comes out, and the context can be used again.

    Prompts enter in pieces of ``n_batch`` tokens at most, beside the texts that are under way.
    """
    chosen = as_drafter(drafter)
    if not isinstance(model_or_context, (Model, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, Model) else model_or_context.model
    if states is not None and not (isinstance(states, str) and states in ("last", "full")):
        raise InvalidInputError(f"states must be 'last', 'full' or None, not {states!r}")
    options = Options(
        integer("max_tokens", max_tokens, 1),
        _strings("stop", stop),
        _stop_tokens(model, stop_tokens),
        flag("ignore_eos", ignore_eos),
        None if logprobs is None else integer("logprobs", logprobs, 0, 1024),
        states,
        layer_ids.normalize((-2,) if layers is None else layers, model.n_layer),
        flag("rejection", rejection),
    )
    flag("stream", stream)
    if layers is not None and states is None:
        raise InvalidInputError("layers= says which states to give; say states='last' or 'full' as well")
    if rejection and chosen is not None and not chosen.draws:
        raise InvalidInputError(
            "rejection=True needs a drafter that draws its tokens; make it (of several, each) with a "
            "temperature above 0"
        )
    inputs = cast("Sequence[Input]", [prompts] if is_single(prompts, "prompts") else prompts)
    texts = [prompt_tokens(model, prompt, None) for prompt in inputs]
    if isinstance(model_or_context, Context):
        context = model_or_context
        capacities = [len(tokens) + options.max_tokens for tokens in texts]
    else:
        capacities = _capacities(model, texts, options.max_tokens)
        context = _context_for(model, capacities)
    if chosen is not None and any(spec.target is not context for spec in specs_of(chosen)):
        raise InvalidInputError("the drafter was made for another context; give generate() its target")
    native = context.native
    if not native.has_memory or not native.causal:
        raise UnsupportedError(f"{model.arch} models do not generate text")
    check_free(context, chosen)
    room = min(native.n_ctx_seq, native.position_limit)
    base = secrets.randbits(31) if seed is None else integer("seed", seed, 0, 2**32 - 2)
    sampling: SamplerOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "penalty_last_n": penalty_last_n,
    }
    piece = _pieces(model)
    sequences = []
    for index, tokens in enumerate(texts):
        if len(tokens) > room:
            raise ContextFullError(
                f"prompt {index} has {len(tokens)} tokens; the context has room for {room} (n_ctx)"
            )
        # Far apart, so that no prompt has the numbers of another one's with a seed nearby.
        sampling["seed"] = (base + index * 0x9E3779B1) % (2**32 - 1)
        sampler = Sampler(model, **sampling)
        if (repeat_penalty, frequency_penalty, presence_penalty) != (1.0, 0.0, 0.0):
            for token in tokens[-penalty_last_n:].tolist():
                sampler.accept(token)
        capacity = min(capacities[index], room)
        sequences.append(Prompt(index, tokens, sampler, TextStream(piece, options.stop), capacity))
    events = Loop(context, sequences, chosen, options).events()
    return events if stream else _in_order(events, len(sequences))
