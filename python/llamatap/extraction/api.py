""":func:`extract`, and the extractor that it keeps for each model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from numpy.typing import DTypeLike, NDArray

from llamatap._native import native_of
from llamatap.context import Context
from llamatap.errors import ContextFullError, InvalidInputError
from llamatap.extraction.compute import compute
from llamatap.extraction.extractor import Extractor
from llamatap.extraction.inputs import Input, Window
from llamatap.extraction.request import ExtractionRequest, Pooling
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel, kept_with
from llamatap.states import States

__all__ = ["extract"]


def _extractor_of(model: LoadedModel) -> Extractor:
    # Its reference to the model is weak: models are too large to wait for the collection of a cycle.
    proxy: LoadedModel = model if isinstance(model, weakref.ProxyType) else weakref.proxy(model)
    return kept_with(model, Extractor, lambda: Extractor(proxy))


@overload
def extract(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
    model_or_context: LoadedModel | Context,
    inputs: Input,
    layers: Iterable[LayerId] | LayerId = ...,
    *,
    dtype: DTypeLike | str | None = ...,
    max_length: int | None = ...,
    window: Window | None = ...,
    pool: Pooling | None = ...,
    out: NDArray[Any] | None = ...,
    cancelled: Callable[[], bool] | None = ...,
) -> States: ...


@overload
def extract(
    model_or_context: LoadedModel | Context,
    inputs: Sequence[Input],
    layers: Iterable[LayerId] | LayerId = ...,
    *,
    dtype: DTypeLike | str | None = ...,
    max_length: int | None = ...,
    window: Window | Sequence[Window | None] | None = ...,
    pool: Pooling | None = ...,
    out: Sequence[NDArray[Any]] | None = ...,
    cancelled: Callable[[], bool] | None = ...,
) -> list[States]: ...


def extract(
    model_or_context: LoadedModel | Context,
    inputs: Input | Sequence[Input],
    layers: Iterable[LayerId] | LayerId = (-2,),
    *,
    dtype: DTypeLike | str | None = None,
    max_length: int | None = None,
    window: Window | Sequence[Window | None] | None = None,
    pool: Pooling | None = None,
    out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> States | list[States]:
    """Compute the hidden states of prompts at the requested layers.

    :param model_or_context: for a Model, a context is created that is sized to the prompts and kept for the
        next call. A Context must be empty, and is empty afterwards.
    :param inputs: a text, token ids, or a list of either; a list gives a list. Texts are tokenised with
        special tokens added and parsed.
    :param layers: ids 0..n, negative from the end (-1 is H_n, pre-norm; -2 is what enters the last
        block), ``"norm"`` for norm(H_n); any subset, in any order, repeats kept. :mod:`llamatap.layers` says
        what they are in a post-norm encoder (BERT), which has no ``"norm"``.
    :param dtype: float32 (the default without ``out``), float16 or bfloat16; converted while copying, rounded
        to nearest even.
    :param max_length: truncate prompts on the right to this many tokens. A text keeps the EOS that the
        tokenizer adds.
    :param window: positions [start, stop) to return, as in a slice; one window, or one for each input.
        Positions outside take no memory.
    :param pool: "mean", "last" or "max" over the window instead of a row per token; never normalised.
    :param out: a C-contiguous array (or memmap) to write into, ``(n_tokens, n_layers, n_embd)``, or
        ``(n_layers, n_embd)`` with ``pool``; a list of them for a list of inputs.
    :param cancelled: a function such as ``threading.Event().is_set``, called in this thread before each batch
        and about every 50 ms while the engine computes. Once it returns True, extraction ends; on a GPU,
        after the current pass of ``n_ubatch`` tokens.
    :returns: :class:`llamatap.States`, or a list of them, in the order of the inputs.
    :raises InvalidInputError: an argument is wrong; nothing was computed.
    :raises ContextFullError: a prompt is too long; with both numbers.
    :raises OutOfMemoryError: the states, or the context for them, do not fit into memory; with both numbers.
        Nothing was allocated.
    :raises UnsupportedError: the model carries no single residual stream, or is neither a language
        model nor an encoder (encoder-decoders, drafters), or has no final norm for ``"norm"``.
    :raises BusyError: another thread uses the context.
    :raises ClosedError: the model or the context was closed.
    :raises CancelledError: ``cancelled`` returned True. The values in ``out`` are then undefined; the
        context is as it was before.

    Nothing after the last requested layer is computed, not even the output head. Short prompts share batches.
    Runs without the GIL; Ctrl-C ends it.
    """
    if not isinstance(model_or_context, (LoadedModel, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, LoadedModel) else model_or_context.model
    request = ExtractionRequest(model, inputs, layers, dtype, max_length, window, pool, out, cancelled)
    if isinstance(model_or_context, LoadedModel):
        return _extractor_of(model).run(request)
    room = native_of(model_or_context).n_ctx_seq
    if request.longest_prompt > room:
        raise ContextFullError(
            f"a prompt of {request.longest_prompt} tokens does not fit into a context of {room} per sequence "
            "(n_ctx); cut it with max_length, or make a larger context"
        )
    return request.result(compute(request, model_or_context, range(len(request.jobs))))
