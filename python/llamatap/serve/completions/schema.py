"""Requests for completions: the supported part of OpenAI's API, and extensions of it.

https://platform.openai.com/docs/api-reference; ``return_token_ids``, ``prompt_logprobs``,
``add_generation_prompt`` and ``continue_final_message`` are vLLM's, ``return_hidden_states`` is SGLang's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from llamatap._options import read_options
from llamatap.generation.api import GenerateOptions
from llamatap.serve.fields import Biases, Body, Ids, Prompts

__all__ = ["ROLES", "ChatRequest", "CompletionRequest", "ModelCard", "ModelList", "Sampling"]


class Unserved:
    """Annotation of a field of OpenAI's API, or of servers like it, that is not supported. Clients send many
    such fields with values that have no effect; these are accepted.

    :param values: such values, besides null.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values

    def _check(self, value: Any) -> Any:
        # 0 is not False, and 1 not True.
        if value is None or any(value == one and type(value) is type(one) for one in self.values):
            return value
        raise PydanticCustomError("unserved", "is not supported here")

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.values], "description": "not served"}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


#: Nearly 0 is 0, as in vLLM: logits divided by it would overflow.
_Temperature: TypeAlias = Annotated[
    float, Field(ge=0, le=100), AfterValidator(lambda value: value if value >= 1e-5 else 0.0)
]
#: vLLM writes -1 for all tokens; here it is 0.
_TopK: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda value: max(value, 0))]


def _option(name: str, **own: Any) -> Any:
    """A field that is an option of :func:`llamatap.generate`, with the option's description and range.

    :param own: arguments of pydantic's ``Field``; bounds in it are OpenAI's or vLLM's range in place of the
        option's.
    """
    option = read_options(GenerateOptions)[name]
    bounds = {"ge": option.low, "gt": option.above, "le": option.high}
    own = {key: bound for key, bound in bounds.items() if bound is not None} | own
    return Field(None, description=option.plain_help, **own)


class Sampling(Body):
    """Fields that completions of both kinds share.

    A field that is an option of :func:`llamatap.generate` has the option's name, and an alias if OpenAI or
    vLLM use another name.
    """

    model: str = Field(description="a name of GET /v1/models")
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: _Temperature | None = Field(
        None,
        description="default 1; below 1e-5 the most likely token is taken",
    )
    top_p: float | None = _option("top_p")
    top_k: _TopK | None = Field(None, description="sample from the k most likely tokens; 0 or -1: from all")
    min_p: float | None = _option("min_p")
    frequency_penalty: float | None = _option("frequency_penalty", ge=-2, le=2)
    presence_penalty: float | None = _option("presence_penalty", ge=-2, le=2)
    repeat_penalty: float | None = _option("repeat_penalty", alias="repetition_penalty", le=10)
    logit_bias: Biases | None = Field(
        None, description="by token id, -100..100: added to its logit before all else"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="random seed")
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = Field(
        None, description="stop strings; the text does not include them"
    )
    stop_tokens: Annotated[Ids, Field(max_length=256)] | None = _option("stop_tokens", alias="stop_token_ids")
    ignore_eos: bool | None = _option("ignore_eos")
    n: int | None = Field(None, ge=1, le=16, description="texts for each prompt")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report this many of the most likely tokens at each token of the prompt; not with stream",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="also return the token ids of the prompt and the text"
    )
    return_hidden_states: bool | Literal["last"] | None = Field(
        None,
        description='true: the states of the prompt, then of each token; "last": only of the last token',
    )
    layer: int | None = Field(
        None,
        description="layer of return_hidden_states, as transformers counts it for the architecture; default "
        "-1: the last, normed",
    )
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    include_stop_str_in_output: Annotated[Any, Unserved(False)] = None
    min_tokens: Annotated[Any, Unserved(0)] = None
    response_format: Annotated[Any, Unserved({"type": "text"})] = None
    skip_special_tokens: Annotated[Any, Unserved(True)] = None
    spaces_between_special_tokens: Annotated[Any, Unserved(True)] = None
    allowed_token_ids: Annotated[Any, Unserved()] = None
    bad_words: Annotated[Any, Unserved([])] = None
    length_penalty: Annotated[Any, Unserved(1, 1.0)] = None
    priority: Annotated[Any, Unserved(0)] = None
    return_tokens_as_token_ids: Annotated[Any, Unserved(False)] = None
    truncate_prompt_tokens: Annotated[Any, Unserved()] = None
    use_beam_search: Annotated[Any, Unserved(False)] = None

    def generate_options(self) -> GenerateOptions:
        """The options of :func:`llamatap.generate` in the request."""
        given = {name: getattr(self, name, None) for name in read_options(GenerateOptions)}
        options = cast("GenerateOptions", {name: value for name, value in given.items() if value is not None})
        options.setdefault("temperature", 1.0)
        return options


class CompletionRequest(Sampling):
    """A request of ``/v1/completions``: continue prompts."""

    prompt: Prompts = Field(description="text, token ids, or a list of either")
    max_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="default 16; 0 only with echo or prompt_logprobs"
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="report this many of the most likely tokens at each token"
    )
    echo: bool | None = Field(
        None, description="begin with the prompt, and with its logprobs if they are requested"
    )
    best_of: int | None = Field(None, ge=1, description="1, or equal to n: only n texts are generated")
    suffix: Annotated[Any, Unserved("")] = None
    add_special_tokens: Annotated[Any, Unserved(True)] = None


class TextPart(Body):
    type: Literal["text"]
    text: str


#: Roles of messages in OpenAI's API.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(
        json_schema_extra={"anyOf": [{"enum": [*ROLES]}, {"description": "one that the chat template names"}]}
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=1024)] | None = None


class ChatRequest(Sampling):
    """A request of ``/v1/chat/completions``: answer a conversation, with the model's own chat template."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the template")
    add_special_tokens: Annotated[Any, Unserved(False)] = None
    echo: Annotated[Any, Unserved(False)] = None
    audio: Annotated[Any, Unserved()] = None
    function_call: Annotated[Any, Unserved("none", "auto")] = None
    functions: Annotated[Any, Unserved([])] = None
    modalities: Annotated[Any, Unserved(["text"])] = None
    parallel_tool_calls: Annotated[Any, Unserved(True, False)] = None
    prediction: Annotated[Any, Unserved()] = None
    reasoning_effort: Annotated[Any, Unserved()] = None
    tool_choice: Annotated[Any, Unserved("none", "auto")] = None
    tools: Annotated[Any, Unserved([])] = None
    verbosity: Annotated[Any, Unserved()] = None
    web_search_options: Annotated[Any, Unserved()] = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["llamatap"] = "llamatap"
    max_model_len: int
    n_layer: int
    n_embd: int


class ModelList(BaseModel):
    """The models that are served, in the order of the command line."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
