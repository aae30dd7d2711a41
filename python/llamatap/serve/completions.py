"""``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from llamatap.generation.results import Event, Generation
from llamatap.serve.chat_job import ChatJob
from llamatap.serve.completion_job import CompletionJob
from llamatap.serve.disconnect import unless_gone
from llamatap.serve.errors import ApiError, ErrorResponse, api_error
from llamatap.serve.openai_schema import ChatRequest, CompletionRequest, ModelCard, ModelList
from llamatap.serve.state import Server, server_of
from llamatap.serve.text_job import TextJob
from llamatap.serve.worker import ModelWorker

__all__ = ["router"]

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 422, 429, 500, 503)
}


@router.get("/v1/models", responses={401: {"model": ErrorResponse}})
async def models(request: Request) -> ModelList:
    """The models that are served."""
    return ModelList(data=[_card(worker) for worker in server_of(request).workers.values()])


def _card(worker: ModelWorker) -> ModelCard:
    return ModelCard(
        id=worker.name,
        created=worker.created,
        max_model_len=worker.text_limit,
        n_layer=worker.model.n_layer,
        n_embd=worker.model.n_embd,
    )


@router.get(
    "/v1/models/{name:path}", responses={401: {"model": ErrorResponse}, 404: {"model": ErrorResponse}}
)
async def model(request: Request, name: str) -> ModelCard:
    """One of them."""
    return _card(server_of(request).worker(name))


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}, **_ERRORS},
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    server = server_of(request)
    job = CompletionJob(server, server.worker(body.model), body)
    return await _answer(request, server, job)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}, **_ERRORS},
)
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    job = ChatJob(server, server.worker(body.model), body)
    return await _answer(request, server, job)


async def _answer(request: Request, server: Server, job: TextJob) -> Response:
    async def prepare() -> None:
        await server.threads.run(job.prepare)
        if job.n_bytes:
            await server.budget.take(request, job.n_bytes)

    if job.body.stream:

        async def begin() -> tuple[tuple[int, Event], AsyncGenerator[tuple[int, Event], None]]:
            await prepare()
            events = job.events()
            return await anext(events), events

        # Errors of the request are raised before the first event, so they become a status.
        first, events = await unless_gone(request, begin())
        return _EventStream(job, first, events)

    async def whole() -> Response:
        await prepare()
        done: dict[int, Generation] = {}
        async with aclosing(job.events()) as events:
            async for choice, event in events:
                if event.final is not None:
                    done[choice] = event.final
        return await server.encoders.run(lambda: job.response(done))

    return await unless_gone(request, whole())


class _EventStream(StreamingResponse):
    """Server-sent events: a chunk for each piece of text."""

    def __init__(
        self, job: TextJob, first: tuple[int, Event], events: AsyncGenerator[tuple[int, Event], None]
    ) -> None:
        super().__init__(_stream(job, first, events), media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        # A client that goes away frees its texts' places at once, wherever the stream happens to be.
        async with aclosing(self._events):
            await super().stream_response(send)


def _line(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _lines(job: TextJob, choice: int, event: Event) -> list[bytes]:
    def work() -> list[bytes]:
        return [_line(chunk) for chunk in job.chunks(choice, event)]

    return await job.server.encoders.run(work) if job.has_prologue(choice) else work()


async def _stream(
    job: TextJob, first: tuple[int, Event], events: AsyncGenerator[tuple[int, Event], None]
) -> AsyncIterator[bytes]:
    done: dict[int, Generation] = {}
    try:
        for chunk in job.opening():
            yield _line(chunk)
        for line in await _lines(job, *first):
            yield line
        if first[1].final is not None:
            done[first[0]] = first[1].final
        async for choice, event in events:
            for line in await _lines(job, choice, event):
                yield line
            if event.final is not None:
                done[choice] = event.final
        if job.wants_usage:
            yield _line(job.chunk([], usage=job.usage(done)))
    except Exception as error:
        found: ApiError = api_error(error)
        yield _line({"error": {"message": str(found), "type": found.kind, "code": found.code}})
    # Also after an error: without it, a stream was cut.
    yield b"data: [DONE]\n\n"
