"""``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from llamatap.generation.results import Event, Generation
from llamatap.serve.app_state import AppState, app_state_of
from llamatap.serve.completions.chat_handler import ChatHandler
from llamatap.serve.completions.completion_handler import CompletionHandler
from llamatap.serve.completions.event_stream import EventStream
from llamatap.serve.completions.schema import ChatRequest, CompletionRequest, ModelCard, ModelList
from llamatap.serve.completions.text_handler import TextHandler
from llamatap.serve.disconnect import unless_gone
from llamatap.serve.errors import ErrorResponse
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["router"]

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 422, 429, 500, 503)
}


@router.get("/v1/models", responses={401: {"model": ErrorResponse}})
async def models(request: Request) -> ModelList:
    """The models that are served."""
    return ModelList(data=[_card(worker) for worker in app_state_of(request).workers.values()])


def _card(worker: ModelWorker) -> ModelCard:
    return ModelCard(
        id=worker.name,
        created=worker.created,
        max_model_len=worker.limits.text,
        n_layer=worker.model.n_layer,
        n_embd=worker.model.n_embd,
    )


@router.get(
    "/v1/models/{name:path}", responses={401: {"model": ErrorResponse}, 404: {"model": ErrorResponse}}
)
async def model(request: Request, name: str) -> ModelCard:
    """One served model."""
    return _card(app_state_of(request).worker(name))


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}, **_ERRORS},
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    app_state = app_state_of(request)
    handler = CompletionHandler(app_state, app_state.worker(body.model), body)
    return await _answer(request, app_state, handler)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}, **_ERRORS},
)
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    app_state = app_state_of(request)
    handler = ChatHandler(app_state, app_state.worker(body.model), body)
    return await _answer(request, app_state, handler)


async def _answer(request: Request, app_state: AppState, handler: TextHandler) -> Response:
    async def prepare() -> None:
        await app_state.threads.run(handler.prepare)
        if handler.n_bytes:
            await app_state.budget.take(request, handler.n_bytes)

    if handler.body.stream:

        async def begin() -> tuple[tuple[int, Event], AsyncGenerator[tuple[int, Event], None]]:
            await prepare()
            events = handler.events()
            return await anext(events), events

        # Errors of the request are raised before the first event, so they become an HTTP status.
        first, events = await unless_gone(request, begin())
        return EventStream(handler, first, events)

    async def whole() -> Response:
        await prepare()
        done: dict[int, Generation] = {}
        async with aclosing(handler.events()) as events:
            async for choice, event in events:
                if event.final is not None:
                    done[choice] = event.final
        return await app_state.encoders.run(lambda: handler.response(done))

    return await unless_gone(request, whole())
