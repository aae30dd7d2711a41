"""The response to a request for hidden states: JSON, or a safetensors file."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Response
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.serve.errors import ApiError
from llamatap.serve.hidden_states.checked_request import DEFAULT_LAYER, CheckedRequest
from llamatap.serve.payload import PiecewiseResponse, as_base64, as_lists, as_safetensors, json_pieces
from llamatap.states import States

__all__ = ["make_response"]


def make_response(request: CheckedRequest, found: Sequence[States]) -> Response:
    """The response with the states of each prompt. Long work: run it off the event loop.

    :raises ApiError: 422, states contain NaN or infinity.
    """
    for states in found:
        _check_finite(states)
    fields = _shared_fields(request, found[0])
    # A single layer has no layer axis.
    arrays = [states.array[..., 0, :] if _is_flat(request) else states.array for states in found]
    if request.body.encoding_format == "safetensors":
        return _file(request, found, arrays, fields)
    return _json(request, found, arrays, fields)


def _check_finite(states: States) -> None:
    if layers := states.nonfinite_layers():
        advice = "float16 overflows above 65504" if states.array.dtype == np.float16 else "the file is broken"
        raise ApiError(
            422,
            "model_error",
            "not_finite",
            f"the states of layers {layers} (llamatap layer ids) contain NaN or infinity: {advice}",
        )


def _is_flat(request: CheckedRequest) -> bool:
    return request.body.layers is None and len(request.wanted.layers) == 1


def _shared_fields(request: CheckedRequest, states: States) -> dict[str, Any]:
    """The fields that describe the states of all prompts."""
    body, numbers = request.body, _layer_numbers(request)
    fields: dict[str, Any] = {"model": request.worker.name}
    fields |= {"layer": numbers[0]} if _is_flat(request) else {"layers": numbers}
    fields["dtype"] = request.wanted.dtype
    if body.encoding_format != "float":
        fields["encoding_format"] = body.encoding_format
    if body.pooling is not None:
        fields["pooling"] = body.pooling
    if request.preset is not None:
        fields["preset"] = request.preset.name
    of_one_prompt = ("window", "max_length", "prompt_tokens", "truncated")
    fields["provenance"] = {
        key: value for key, value in states.provenance.items() if key not in of_one_prompt
    }
    return fields


def _layer_numbers(request: CheckedRequest) -> Sequence[int | None]:
    """Layer ids in transformers' numbering; ids from the request unchanged.

    None stands for a layer of a preset that transformers has no id for, such as H_n of Llama.
    """
    body = request.body
    if body.layers is not None:
        return body.layers
    if request.preset is None:
        return [DEFAULT_LAYER if body.layer is None else body.layer]
    return [_transformers_number(request.worker.model, layer) for layer in request.wanted.layers]


def _transformers_number(model: Model, layer: LayerId) -> int | None:
    try:
        (number,) = layer_ids.translate_for(model, [layer], target="transformers")
    except InvalidInputError:
        return None
    return int(number)


def _json(
    request: CheckedRequest, found: Sequence[States], arrays: Sequence[NDArray[Any]], fields: dict[str, Any]
) -> Response:
    encode = as_base64 if request.body.encoding_format == "base64" else as_lists
    data: list[dict[str, Any]] = []
    fragments = []
    for i, (states, array) in enumerate(zip(found, arrays, strict=True)):
        data.append(({} if request.single else {"index": i}) | _entry(request, states, array))
        fragments.append((data[-1], "hidden_states", encode(array)))
    # For a single input, its entry is the whole body.
    content = data[0] if request.single else {"data": data}
    content |= fields
    return PiecewiseResponse(json_pieces(content, fragments), "application/json")


def _entry(request: CheckedRequest, states: States, array: NDArray[Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "hidden_states": None,
        "shape": list(array.shape),
        "truncated": states.truncated,
    }
    if request.body.return_attention_mask:
        entry["attention_mask"] = [1] * len(states)
    if request.body.return_tokens:
        ids = states.tokens.tolist()
        entry["token_ids"] = ids
        model = request.worker.model
        # Without a tokenizer, tokens have no text.
        with contextlib.suppress(UnsupportedError):
            entry["tokens"] = [model.token_bytes(token).decode(errors="replace") for token in ids]
    return entry


def _file(
    request: CheckedRequest, found: Sequence[States], arrays: Sequence[NDArray[Any]], fields: dict[str, Any]
) -> Response:
    tensors: dict[str, NDArray[Any]] = {}
    for i, (states, array) in enumerate(zip(found, arrays, strict=True)):
        end = "" if request.single else f".{i}"
        tensors[f"hidden_states{end}"] = array
        tensors[f"token_ids{end}"] = states.tokens.astype(np.int64)
        if request.body.return_attention_mask:
            tensors[f"attention_mask{end}"] = np.ones(len(states), np.int64)
    truncated = [states.truncated for states in found]
    fields["truncated"] = truncated[0] if request.single else truncated
    return PiecewiseResponse([as_safetensors(tensors, fields)], "application/octet-stream")
