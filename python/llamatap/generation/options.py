"""RequestOptions of a generation request: checks, and making the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap._native import native_of
from llamatap._validate import flag, integer, shown
from llamatap.context import Context
from llamatap.drafting.drafter import Drafter
from llamatap.errors import ContextFullError, InvalidInputError, UnsupportedError
from llamatap.generation.request import Request, RequestOptions
from llamatap.generation.results import Generation
from llamatap.generation.text_stream import TextStream
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel
from llamatap.sampler import Sampler, SamplerOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerateOptions", "checked_options", "new_prompt", "pieces_of", "room_of"]


class GenerateOptions(SamplerOptions, total=False):
    """The keyword arguments of :func:`generate`, but for ``stream``; those of :meth:`Session.add`."""

    max_tokens: int
    stop: str | Iterable[str]
    stop_tokens: Iterable[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    states: Literal["last", "full"] | None
    prompt_states: bool
    layers: Iterable[LayerId] | LayerId | None
    on_states: Callable[[Generation], object] | None
    rejection: bool


def checked_options(
    model: LoadedModel,
    drafter: Drafter | None,
    *,
    max_tokens: int = 128,
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
    **sampling: Unpack[SamplerOptions],
) -> tuple[RequestOptions, SamplerOptions]:
    """Split keyword arguments into the checked options of a request and those of its sampler, which checks
    them itself.

    :raises InvalidInputError: one is wrong.
    """
    if states is not None and not (isinstance(states, str) and states in ("last", "full")):
        raise InvalidInputError(f"states must be 'last', 'full' or None, not {shown(states)}")
    # max_tokens=0 generates nothing: something of the prompt must be wanted.
    fewest = 0 if prompt_logprobs is not None or flag("prompt_states", prompt_states) else 1
    options = RequestOptions(
        integer("max_tokens", max_tokens, fewest),
        _strings("stop", stop),
        _stop_tokens(model, stop_tokens),
        flag("ignore_eos", ignore_eos),
        None if logprobs is None else integer("logprobs", logprobs, 0, 1024),
        None if prompt_logprobs is None else integer("prompt_logprobs", prompt_logprobs, 0, 1024),
        states,
        flag("prompt_states", prompt_states),
        layer_ids.normalize((-2,) if layers is None else layers, model.n_layer),
        on_states,
        flag("rejection", rejection),
    )
    if on_states is not None and not callable(on_states):
        raise InvalidInputError(f"on_states must be a function of a Generation, not {shown(on_states)}")
    for name, value in (
        ("layers= says which states to give", layers),
        ("on_states= takes states", on_states),
    ):
        if value is not None and states is None and not prompt_states:
            raise InvalidInputError(f"{name}; say states='last', states='full' or prompt_states=True as well")
    if rejection and drafter is not None and not drafter.draws:
        raise InvalidInputError(
            "rejection=True needs a drafter that draws its tokens; make it (of several, each) with a "
            "temperature above 0"
        )
    return options, sampling


def room_of(context: Context) -> int:
    """The most positions of the context's memory that one request may take."""
    return min(native_of(context).n_ctx_seq, native_of(context).position_limit)


def new_prompt(
    model: LoadedModel,
    index: int,
    tokens: NDArray[np.int32],
    room: int,
    options: RequestOptions,
    sampling: SamplerOptions,
    name: str = "the prompt",
) -> Request:
    """A new request, not admitted yet.

    :param tokens: int32 ``(n,)``.
    :param room: the positions that the prompt and its generated tokens may take.
    :param sampling: options of the sampler, with the request's own seed.
    :param name: the prompt's name in errors.
    :raises InvalidInputError: an option of the sampler is wrong.
    :raises ContextFullError: the prompt alone does not fit into ``room``.
    """
    sampler = Sampler(model, **sampling)
    if len(tokens) > room:
        raise ContextFullError(f"{name} has {len(tokens)} tokens; the context has room for {room} (n_ctx)")
    if any(sampling.get(key, off) != off for key, off in _PENALTIES.items()):
        for token in tokens[-sampling.get("penalty_last_n", 64) :].tolist():
            sampler.accept(token)
    text = TextStream(pieces_of(model), options.stop)
    return Request(index, tokens, options, sampler, text, min(len(tokens) + options.max_tokens, room))


#: Each as it is when it is off.
_PENALTIES = {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def _strings(name: str, values: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be a str or a list of them, not {shown(values)}")
    found = (values,) if isinstance(values, str) else tuple(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise InvalidInputError(
                f"{name} must be a str or a list of them, none empty; found {shown(value)}"
            )
    return found


def _stop_tokens(model: LoadedModel, tokens: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes)):
        raise InvalidInputError(f"stop_tokens must be a list of token ids, not {shown(tokens)}")
    return tuple(integer("a stop token", token, 0, model.n_vocab - 1) for token in tokens)


def pieces_of(model: LoadedModel) -> Callable[[int], bytes]:
    """Function from a token to its bytes in the text; empty for special tokens, and without a vocabulary."""
    native = native_of(model)
    try:
        native.piece(0, False)
    except UnsupportedError:
        return lambda token: b""
    return lambda token: native.piece(token, False)
