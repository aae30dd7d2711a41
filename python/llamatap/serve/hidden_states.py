"""``POST /v1/hidden_states``: the states of prompts, in the layer numbering of Hugging Face's
``hidden_states``.

The endpoint's first form is that of heylookitsanllm's specification, for image models whose text encoder is a
language model: https://github.com/fblissjr/heylookitsanllm
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from llamatap import layers as layer_ids
from llamatap.errors import ContextFullError, InvalidInputError, UnsupportedError
from llamatap.extraction.inputs import cut_tokens
from llamatap.layers import LayerId
from llamatap.presets import Preset
from llamatap.serve.disconnect import unless_gone
from llamatap.serve.errors import ApiError, ErrorResponse
from llamatap.serve.fields import Body, Prompts, Texts
from llamatap.serve.payload import (
    Encoding,
    PiecewiseResponse,
    as_base64,
    as_lists,
    as_safetensors,
    bytes_of,
    json_pieces,
)
from llamatap.serve.state import Server, server_of
from llamatap.serve.worker import Extraction, ModelWorker
from llamatap.states import DTYPES, States

__all__ = ["router"]

router = APIRouter()


class HiddenStatesRequest(Body):
    """Prompts, and which of their states are wanted."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "The capital of France is", "model": "NAME", "layer": -2}]}
    )

    model: str = Field(description="a name of GET /v1/models")
    input: Prompts | None = Field(
        None,
        description="text with its chat template applied, token ids, or a list of either; special tokens in "
        "a text are recognised",
    )
    prompt: str | Texts | None = Field(
        None, description="in place of input, with preset: what a person would type"
    )
    preset: str | None = Field(
        None, description="applies an image model's template to the prompt, and chooses its layer and rows"
    )
    layer: int | None = Field(
        None,
        description="as transformers counts the hidden_states of the model's architecture: k enters block k, "
        "n (or -1) is the last, normed (of Mamba, Mamba 2 and RWKV-6, k leaves block k); default -2",
    )
    layers: Annotated[list[int], Field(fail_fast=True, max_length=4096)] | None = Field(
        None, description="several: the result is [seq_len, n_layers, hidden_dim]"
    )
    max_length: int | None = Field(None, ge=1, description="longer prompts are cut on the right; default 512")
    pooling: Literal["mean", "last", "max"] | None = Field(
        None, description="one vector over the tokens in place of one a token"
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(None, description="default float32")
    encoding_format: Encoding = Field(
        "float",
        description="nested lists; base64 of the row-major bytes; or a safetensors file as the body",
    )
    return_attention_mask: bool = Field(False, description="ones, for all rows are of real tokens")
    return_tokens: bool = Field(False, description="the ids and texts of the rows' tokens, too")
    user: str | None = Field(None, description="changes nothing")


class HiddenStates(BaseModel):
    """The states of one prompt."""

    hidden_states: list[Any] | str
    shape: list[int]
    truncated: bool = Field(description="whether the prompt was cut to max_length")
    attention_mask: list[int] | None = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None


class HiddenStatesAt(HiddenStates):
    """The states of one prompt of several."""

    index: int


class _About(BaseModel):
    """Fields that all states of a request share."""

    model: str
    layer: int | None = None
    layers: list[int | None] | None = None
    dtype: str
    encoding_format: str | None = None
    pooling: str | None = None
    preset: str | None = None
    provenance: dict[str, Any]


class HiddenStatesResponse(HiddenStates, _About):
    """The states of one prompt, and what they are of."""


class HiddenStatesListResponse(_About):
    """The states of a list of prompts."""

    data: list[HiddenStatesAt]


class _Work:
    """A request, checked: its prompts, and how the answer is made."""

    def __init__(self, server: Server, worker: ModelWorker, body: HiddenStatesRequest) -> None:
        self.body = body
        self.worker = worker
        self.model = worker.model
        preset = self._preset(server)
        self.preset = preset
        given = body.input if preset is None else body.prompt
        is_list = isinstance(given, list) and not (given and isinstance(given[0], int))
        if is_list and len(given or ()) > server.options.max_inputs:
            raise ApiError.invalid(
                f"{len(given or ())} inputs; this server takes {server.options.max_inputs} in a request",
                "too_many_inputs",
            )
        inputs = self._inputs()
        self.single = not isinstance(inputs, list)
        many: list[str | NDArray[np.int32]] = inputs if isinstance(inputs, list) else [inputs]
        self.layers = self._layers()
        self.depth = max(layer_ids.slots(self.layers, self.model.n_layer))
        longest = server.options.max_length
        # A preset's own length is part of it; without one it takes the whole text.
        default = min(512, longest) if preset is None else preset.max_length or longest
        self.max_length = body.max_length or default
        if self.max_length > longest:
            raise ApiError.invalid(f"max_length is {self.max_length}; this server takes {longest} at most")
        if preset is not None and preset.max_length is not None and self.max_length > preset.max_length:
            raise ApiError.invalid(
                f"max_length is {self.max_length}; preset {preset.name} takes {preset.max_length} at most"
            )
        self.jobs: list[Extraction] = []
        for index, one in enumerate(many):
            where = "" if self.single else f"input {index}: "
            try:
                self._add(server, one)
            except ContextFullError as error:
                raise ContextFullError(f"{where}{error}") from None
            except InvalidInputError as error:
                raise InvalidInputError(f"{where}{error}") from None
        self._check_size(server.options.max_response_bytes)

    def _preset(self, server: Server) -> Preset | None:
        body = self.body
        if body.preset is None:
            if body.prompt is not None:
                raise ApiError.invalid("prompt needs a preset; a text as it is goes into input")
            return None
        if body.prompt is None or body.input is not None:
            raise ApiError.invalid("a preset takes a prompt, and no input: it applies the template itself")
        if body.layer is not None or body.layers is not None:
            raise ApiError.invalid("a preset chooses the layers; leave out layer and layers")
        preset = server.preset(body.preset)
        preset.check(self.model)
        return preset

    def _inputs(self) -> str | NDArray[np.int32] | list[str | NDArray[np.int32]]:
        body = self.body
        if self.preset is not None:
            assert body.prompt is not None
            prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            texts: list[str | NDArray[np.int32]] = [self.preset.render(self.model, one) for one in prompts]
            return texts[0] if isinstance(body.prompt, str) else self._not_empty(texts)
        if body.input is None:
            raise ApiError.invalid(
                "input is missing: a text, token ids, or a list of either", "missing_field"
            )
        if isinstance(body.input, str):
            return body.input
        if body.input and isinstance(body.input[0], int):
            return np.array(body.input, np.int32)
        found = [one if isinstance(one, str) else np.array(one, np.int32) for one in body.input]
        return self._not_empty(found)

    def _not_empty(self, inputs: list[str | NDArray[np.int32]]) -> list[str | NDArray[np.int32]]:
        if not inputs:
            raise ApiError.invalid("there is nothing in the list of prompts")
        return inputs

    def _layers(self) -> tuple[LayerId, ...]:
        body, model = self.body, self.model
        if body.layer is not None and body.layers is not None:
            raise ApiError.invalid("give layer or layers, not both")
        if self.preset is not None:
            return layer_ids.normalize(self.preset.layer_ids(model), model.n_layer)
        wanted = body.layers if body.layers is not None else [-2 if body.layer is None else body.layer]
        if len(wanted) > (most := 2 * (model.n_layer + 1)):
            raise ApiError.invalid(
                f"{len(wanted)} layers; {self.worker.name} has {model.n_layer + 1}, of which {most} are given"
            )
        found = layer_ids.translate_for(model, wanted, source="transformers")
        return layer_ids.normalize(found, model.n_layer)

    def _add(self, server: Server, one: str | NDArray[np.int32]) -> None:
        whole = server.tokens(self.model, one)
        tokens = cut_tokens(self.model, one, whole, self.max_length)
        limit = self.worker.longest
        if len(tokens) > limit > 0:
            raise ContextFullError(
                f"the prompt has {len(tokens)} tokens; {self.worker.name} was trained for {limit}: cut it "
                "with max_length"
            )
        window = None
        if self.preset is not None:
            window = self.preset.rows
            self.preset.check_rows(len(tokens))
        self.jobs.append(
            Extraction(
                tokens,
                len(whole),
                self.layers,
                self.depth,
                self.body.dtype or "float32",
                self.body.pooling,
                window,
            )
        )

    @property
    def _n_numbers(self) -> int:
        rows = sum(1 if self.body.pooling else len(job.tokens) for job in self.jobs)
        return rows * len(self.layers) * self.model.n_embd

    @property
    def _itemsize(self) -> int:
        return int(DTYPES[self.jobs[0].dtype].itemsize)

    @property
    def n_bytes(self) -> int:
        """The most memory that the answer takes until it is sent."""
        return bytes_of(self._n_numbers, self._itemsize, self.body.encoding_format)

    def _check_size(self, limit: int) -> None:
        size = self._n_numbers * self._itemsize
        if size > limit:
            raise ApiError(
                413,
                "invalid_request_error",
                "response_too_large",
                f"the states would take {size} bytes; this server gives {limit} at most in a response: ask "
                "for fewer tokens or layers, or for float16",
            )

    def _numbers(self) -> Sequence[int | None]:
        """The layers as transformers counts them; a request's own numbers as it gave them.

        None for layers of a preset that transformers has no number for, such as H_n of Llama.
        """
        body = self.body
        if body.layers is not None:
            return body.layers
        if self.preset is None:
            return [-2 if body.layer is None else body.layer]
        return [self._number(layer) for layer in self.layers]

    def _number(self, layer: LayerId) -> int | None:
        try:
            (number,) = layer_ids.translate_for(self.model, [layer], target="transformers")
        except InvalidInputError:
            return None
        return int(number)

    @property
    def _is_flat(self) -> bool:
        """Whether there is one layer, and so no axis of layers."""
        return self.body.layers is None and len(self.layers) == 1

    def response(self, found: Sequence[States]) -> Response:
        """The answer; off the event loop, for it is long work."""
        body = self.body
        for states in found:
            if layers := states.nonfinite_layers():
                advice = "float16 ends at 65504" if body.dtype == "float16" else "the file is broken"
                raise ApiError(
                    422,
                    "model_error",
                    "not_finite",
                    f"the states of layers {layers} (as llamatap counts) hold NaN or infinity: {advice}",
                )
        numbers = self._numbers()
        fields: dict[str, Any] = {"model": self.worker.name}
        fields |= {"layer": numbers[0]} if self._is_flat else {"layers": numbers}
        fields["dtype"] = self.jobs[0].dtype
        if body.encoding_format != "float":
            fields["encoding_format"] = body.encoding_format
        if body.pooling is not None:
            fields["pooling"] = body.pooling
        if self.preset is not None:
            fields["preset"] = self.preset.name
        fields["provenance"] = _common_provenance(found[0])
        arrays = [states.array[..., 0, :] if self._is_flat else states.array for states in found]
        if body.encoding_format == "safetensors":
            return self._file(found, arrays, fields)
        encode = as_base64 if body.encoding_format == "base64" else as_lists
        data: list[dict[str, Any]] = []
        fragments = []
        for i, (states, array) in enumerate(zip(found, arrays, strict=True)):
            data.append(({} if self.single else {"index": i}) | self._entry(states, array))
            fragments.append((data[-1], "hidden_states", encode(array)))
        # For a single input its entry is the answer.
        content = data[0] if self.single else {"data": data}
        content |= fields
        return PiecewiseResponse(json_pieces(content, fragments), "application/json")

    def _entry(self, states: States, array: NDArray[Any]) -> dict[str, Any]:
        body = self.body
        entry: dict[str, Any] = {
            "hidden_states": None,
            "shape": list(array.shape),
            "truncated": states.truncated,
        }
        if body.return_attention_mask:
            entry["attention_mask"] = [1] * len(states)
        if body.return_tokens:
            ids = states.tokens.tolist()
            entry["token_ids"] = ids
            # A file without a tokenizer has no texts of them.
            with contextlib.suppress(UnsupportedError):
                entry["tokens"] = [self.model.token_bytes(one).decode(errors="replace") for one in ids]
        return entry

    def _file(
        self, found: Sequence[States], arrays: Sequence[NDArray[Any]], fields: dict[str, Any]
    ) -> Response:
        tensors: dict[str, NDArray[Any]] = {}
        for i, (states, array) in enumerate(zip(found, arrays, strict=True)):
            end = "" if self.single else f".{i}"
            tensors[f"hidden_states{end}"] = array
            tensors[f"token_ids{end}"] = states.tokens.astype(np.int64)
            if self.body.return_attention_mask:
                tensors[f"attention_mask{end}"] = np.ones(len(states), np.int64)
        truncated = [states.truncated for states in found]
        fields["truncated"] = truncated[0] if self.single else truncated
        return PiecewiseResponse([as_safetensors(tensors, fields)], "application/octet-stream")


def _common_provenance(states: States) -> dict[str, Any]:
    """The provenance that all prompts of a request share."""
    own = ("window", "max_length", "prompt_tokens", "truncated")
    return {key: value for key, value in states.provenance.items() if key not in own}


@router.post(
    "/v1/hidden_states",
    response_model=HiddenStatesResponse | HiddenStatesListResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "the states"},
        **{status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 422, 429, 500, 503)},
    },
)
async def hidden_states(request: Request, body: HiddenStatesRequest) -> Response:
    """The hidden states of prompts."""
    server = server_of(request)
    worker = server.worker(body.model)

    async def answer() -> Response:
        work = await server.threads.run(lambda: _Work(server, worker, body))
        await server.budget.take(request, work.n_bytes)
        found = await worker.extract(work.jobs)
        return await server.encoders.run(lambda: work.response(found))

    return await unless_gone(request, answer())
