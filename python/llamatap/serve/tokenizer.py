"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM serves them. lm-eval and other scoring
harnesses count tokens with them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from llamatap.model import Model
from llamatap.serve.app_state import app_state_of
from llamatap.serve.errors import ErrorResponse
from llamatap.serve.fields import Body, Ids

__all__ = ["router"]

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 422, 429, 500)
}

_ModelName = Annotated[
    str | None, Field(description="a name of GET /v1/models; optional if one model is served")
]


class TokenizeRequest(Body):
    """A text to tokenise."""

    model: _ModelName = None
    prompt: str = Field(description="special tokens in it are parsed")
    add_special_tokens: bool = Field(True, description="add BOS and EOS if the model was trained with them")
    return_token_strs: bool | None = Field(None, description="also return the texts of the tokens")


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids to turn into a text."""

    model: _ModelName = None
    tokens: Ids


class DetokenizeResponse(BaseModel):
    """The text of tokens, special ones included."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The tokenizer of a model."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


@router.post("/tokenize", responses=_ERRORS)
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a text."""
    app_state = app_state_of(request)
    worker = app_state.worker(body.model)

    def work() -> TokenizeResponse:
        app_state.check_text(body.prompt)
        tokens = worker.model.tokenize(body.prompt, add_special=body.add_special_tokens).tolist()
        texts = [_text(worker.model, token) for token in tokens] if body.return_token_strs else None
        return TokenizeResponse(
            count=len(tokens), max_model_len=worker.limits.text, tokens=tokens, token_strs=texts
        )

    return await app_state.threads.run(work)


@router.post("/detokenize", responses=_ERRORS)
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens."""
    app_state = app_state_of(request)
    model = app_state.worker(body.model).model
    return await app_state.threads.run(lambda: DetokenizeResponse(prompt=model.detokenize(body.tokens)))


@router.get("/tokenizer_info", responses=_ERRORS)
async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfo:
    """The kind of a model's tokenizer, its BOS and EOS, and its chat template."""
    found = app_state_of(request).worker(model).model
    return TokenizerInfo(
        tokenizer_class=str(found.metadata.get("tokenizer.ggml.model", "none")),
        bos_token=None if found.bos_token is None else _text(found, found.bos_token),
        eos_token=None if found.eos_token is None else _text(found, found.eos_token),
        chat_template=found.chat_template,
    )


def _text(model: Model, token: int) -> str:
    return model.token_bytes(token).decode(errors="replace")
