"""Request and response bodies of ``POST /v1/hidden_states``.

The first form of the endpoint is from heylookitsanllm's specification, for image models whose text encoder is
a language model: https://github.com/fblissjr/heylookitsanllm
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from llamatap.serve.fields import Body, Prompts, Texts
from llamatap.serve.payload import Encoding
from llamatap.serve.workers.tasks import Dtype, Pooling

__all__ = ["HiddenStatesListResponse", "HiddenStatesRequest", "HiddenStatesResponse"]


def _layer_number(value: Any) -> Any:
    if value == "norm":
        raise PydanticCustomError(
            "norm_layer",
            'Input should be a valid integer, found "norm": here -1 is the last state, normed',
        )
    return value


#: A layer as transformers counts.
LayerNumber: TypeAlias = Annotated[int, BeforeValidator(_layer_number)]


class HiddenStatesRequest(Body):
    """Prompts, and which of their states to return."""

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
        None, description="used instead of input with a preset: the raw user prompt"
    )
    preset: str | None = Field(
        None, description="applies an image model's template to the prompt, and chooses its layer and rows"
    )
    layer: LayerNumber | None = Field(
        None,
        description="index into transformers' hidden_states of the model's architecture: k enters block k, n "
        "(or -1) is the last, normed (for Mamba, Mamba 2 and RWKV-6, k leaves block k); default -2",
    )
    layers: Annotated[list[LayerNumber], Field(fail_fast=True, max_length=4096)] | None = Field(
        None, description="several layers; the result is [seq_len, n_layers, hidden_dim]"
    )
    max_length: int | None = Field(None, ge=1, description="longer prompts are cut on the right; default 512")
    pooling: Pooling | None = Field(None, description="one vector per prompt instead of one per token")
    dtype: Dtype | None = Field(None, description="default float32")
    encoding_format: Encoding = Field(
        "float",
        description="nested lists; base64 of the row-major bytes; or a safetensors file as the body",
    )
    return_attention_mask: bool = Field(False, description="an all-ones mask: there is no padding")
    return_tokens: bool = Field(False, description="also the ids and texts of the tokens")
    user: str | None = Field(None, description="accepted and ignored")


class HiddenStates(BaseModel):
    """The states of one prompt."""

    hidden_states: list[Any] | str
    shape: list[int]
    truncated: bool = Field(description="whether the prompt was cut to max_length")
    attention_mask: list[int] | None = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None


class IndexedHiddenStates(HiddenStates):
    """The states of one prompt of several."""

    index: int


class SharedFields(BaseModel):
    """Fields that describe the states of all prompts."""

    model: str
    layer: int | None = None
    layers: list[int | None] | None = None
    dtype: str
    encoding_format: str | None = None
    pooling: str | None = None
    preset: str | None = None
    provenance: dict[str, Any]


class HiddenStatesResponse(HiddenStates, SharedFields):
    """The states of a single prompt."""


class HiddenStatesListResponse(SharedFields):
    """The states of a list of prompts."""

    data: list[IndexedHiddenStates]
