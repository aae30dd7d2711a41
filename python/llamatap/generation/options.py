"""Options of a generation request: their checks, and making the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap._native import native_of
from llamatap._options import Option, checked_options, read_options
from llamatap._validate import integer, shown
from llamatap.context import Context
from llamatap.drafting.drafter import Drafter
from llamatap.errors import ContextFullError, InvalidInputError, UnsupportedError
from llamatap.generation.request import Request, RequestOptions
from llamatap.generation.results import Generation
from llamatap.generation.text_stream import TextStream
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel
from llamatap.sampler import Sampler, SamplingOptions

__all__ = ["GenerateOptions", "new_request", "request_capacity", "split_options", "token_bytes"]


def _strings(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be a str or a list of them, not {shown(values)}")
    found = (values,) if isinstance(values, str) else tuple(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise InvalidInputError(
                f"{name} must be a str or a list of them, none empty; found {shown(value)}"
            )
    return found


def _callback(name: str, value: Callable[[Generation], object]) -> Callable[[Generation], object]:
    if not callable(value):
        raise InvalidInputError(f"{name} must be a function of a Generation, not {shown(value)}")
    return value


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of :func:`generate` except ``stream``, and of :meth:`Session.add`."""

    max_tokens: Annotated[
        int,
        Option(
            128,
            "maximum number of generated tokens per prompt, including a stop token; 0, allowed only with "
            "``prompt_logprobs`` or ``prompt_states``, computes only the prompts. With a model, texts end at "
            "the length that it was trained with (:attr:`Model.n_ctx_train`), as in a full context",
            low=0,
        ),
    ]
    stop: Annotated[
        str | Iterable[str],
        Option((), "strings that end a text; the text does not include them", check=_strings),
    ]
    stop_tokens: Annotated[
        Iterable[int],
        Option((), "tokens that end a text, besides the model's end-of-generation tokens"),
    ]
    ignore_eos: Annotated[bool, Option(False, "continue after end-of-generation tokens")]
    logprobs: Annotated[
        int | None,
        Option(
            None,
            "number of most likely tokens to report at each token; None for no log-probabilities. They come "
            "from the unmodified logits, before ``logit_bias``, penalties and temperature",
            low=0,
            high=1024,
        ),
    ]
    prompt_logprobs: Annotated[
        int | None,
        Option(
            None,
            "the same at each token of the prompt except the first, given the tokens before it. All rows of "
            "the prompt then pass through the output head, at most ``n_ubatch`` of them at a time",
            low=0,
            high=1024,
        ),
    ]
    states: Annotated[
        Literal["last", "full"] | None,
        Option(
            None,
            'the target\'s states of the generated tokens, from the same passes: of all (``"full"``), or of '
            'the last (``"last"``). Only the final token, which no pass has computed, costs one more decode. '
            "At the end of a full context the last token does not fit, so its row is missing",
        ),
    ]
    prompt_states: Annotated[
        bool,
        Option(
            False,
            "the target's states of the prompt's tokens, from its prefill; with or without ``states``",
        ),
    ]
    layers: Annotated[
        Iterable[LayerId] | LayerId | None,
        Option(
            None,
            "layers of the states, as in :meth:`Context.tap`; None for (-2,), as there. Only with ``states`` "
            "or ``prompt_states``",
        ),
    ]
    on_states: Annotated[
        Callable[[Generation], object] | None,
        Option(
            None,
            "called with each :class:`Generation` as soon as its text is finished, in the generating thread, "
            "in the order in which texts finish: for collecting states during generation. Cancelled texts "
            "come with the rows that they have. Only with ``states`` or ``prompt_states``. Its exceptions "
            "are "
            "raised to the caller, like those of a drafter; its time counts in no statistics",
            check=_callback,
        ),
    ]
    rejection: Annotated[
        bool,
        Option(
            False,
            "accept drafted tokens by rejection sampling, for drafters that sample their tokens (with a "
            "``temperature`` above 0): the same distribution, but other tokens, more of them accepted",
        ),
    ]


def split_options(
    model: LoadedModel, drafter: Drafter | None, options: GenerateOptions, caller: str
) -> tuple[RequestOptions, SamplingOptions]:
    """Split keyword arguments into the checked options of a request and those of its sampler, defaults filled
    in.

    :param caller: the function that was called, as errors name it.
    :raises InvalidInputError: an option is wrong.
    :raises TypeError: there is no such option.
    """
    chosen: dict[str, Any] = {**checked_options(GenerateOptions, options, caller)}
    sampling: dict[str, Any] = {name: chosen.pop(name) for name in read_options(SamplingOptions)}
    with_states = chosen["states"] is not None or chosen["prompt_states"]
    # max_tokens=0 generates nothing: something of the prompt must be requested.
    fewest = 0 if chosen["prompt_logprobs"] is not None or chosen["prompt_states"] else 1
    integer("max_tokens", chosen["max_tokens"], fewest)
    chosen["stop_tokens"] = _token_ids(model, chosen["stop_tokens"])
    layers = layer_ids.normalize((-2,) if chosen["layers"] is None else chosen["layers"], model.n_layer)
    for name, what in (("layers", "says which states to give"), ("on_states", "takes states")):
        if chosen[name] is not None and not with_states:
            raise InvalidInputError(
                f"{name}= {what}; also give states='last', states='full' or prompt_states=True"
            )
    chosen["layers"] = layers
    if chosen["rejection"] and drafter is not None and not drafter.draws:
        raise InvalidInputError(
            "rejection=True needs a drafter that samples its tokens; create it (each, if several) with a "
            "temperature above 0"
        )
    return RequestOptions(**chosen), cast("SamplingOptions", sampling)


def request_capacity(context: Context) -> int:
    """Maximum number of positions of the context's memory for one request."""
    native = native_of(context)
    return min(native.n_ctx_seq, native.position_limit)


def check_trained_length(model: LoadedModel, n_tokens: int, name: str, advice: str) -> None:
    """Check that a prompt, in a context that is sized to it, is not longer than the model was trained for.

    :param name: the prompt's name in the error.
    :param advice: what else helps than a shorter prompt.
    :raises ContextFullError: it is longer.
    """
    if n_tokens > model.n_ctx_train > 0:
        raise ContextFullError(
            f"{name} has {n_tokens} tokens; the model was trained for {model.n_ctx_train}: cut the prompt, "
            f"or {advice}"
        )


def new_request(
    model: LoadedModel,
    index: int,
    tokens: NDArray[np.int32],
    capacity: int,
    options: RequestOptions,
    sampling: SamplingOptions,
    name: str = "the prompt",
) -> Request:
    """Make a request, not admitted yet.

    :param index: number of the prompt in results and events.
    :param tokens: int32 ``(n,)``: the prompt.
    :param capacity: maximum number of positions for the prompt and its generated tokens.
    :param sampling: all options of the sampler, with the request's own seed.
    :param name: the prompt's name in errors.
    :raises InvalidInputError: an option of the sampler is wrong.
    :raises ContextFullError: the prompt alone is longer than ``capacity``.
    """
    sampler = Sampler(model, **sampling)
    if len(tokens) > capacity:
        raise ContextFullError(
            f"{name} has {len(tokens)} tokens; the context has room for {capacity} (n_ctx)"
        )
    declared = read_options(SamplingOptions)
    if any(sampling[option] != declared[option].default for option in _PENALTIES):
        # Penalties see the prompt too.
        for token in tokens[-sampling["penalty_last_n"] :].tolist():
            sampler.accept(token)
    text = TextStream(token_bytes(model), options.stop)
    return Request(index, tokens, options, sampler, text, min(len(tokens) + options.max_tokens, capacity))


#: Sampling options that look at recent tokens; they are off by default.
_PENALTIES: tuple[Literal["repeat_penalty", "frequency_penalty", "presence_penalty"], ...] = (
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _token_ids(model: LoadedModel, tokens: object) -> tuple[int, ...]:
    if not isinstance(tokens, Iterable) or isinstance(tokens, (str, bytes)):
        raise InvalidInputError(f"stop_tokens must be a list of token ids, not {shown(tokens)}")
    return tuple(integer("a stop token", token, 0, model.n_vocab - 1) for token in tokens)


def token_bytes(model: LoadedModel) -> Callable[[int], bytes]:
    """Function from a token to its bytes in the text; empty for special tokens, and without a vocabulary."""
    native = native_of(model)
    try:
        native.piece(0, False)
    except UnsupportedError:
        return lambda token: b""
    return lambda token: native.piece(token, False)
