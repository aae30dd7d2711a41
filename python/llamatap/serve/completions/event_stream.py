"""Server-sent events: the chunks of streamed texts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Send

from llamatap.generation.results import Event, Generation
from llamatap.serve.completions.text_handler import TextHandler
from llamatap.serve.errors import api_error, error_body

__all__ = ["EventStream"]


class EventStream(StreamingResponse):
    """A response of server-sent events, one for each chunk.

    :param first: the first event of the texts, which was awaited before the status was sent.
    """

    def __init__(
        self, handler: TextHandler, first: tuple[int, Event], events: AsyncGenerator[tuple[int, Event], None]
    ) -> None:
        super().__init__(_lines(handler, first, events), media_type="text/event-stream")
        self._events = events

    async def stream_response(self, send: Send) -> None:
        # When a client disconnects, the sequences of its texts are freed at once.
        async with aclosing(self._events):
            await super().stream_response(send)


def _line(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _lines(
    handler: TextHandler, first: tuple[int, Event], events: AsyncGenerator[tuple[int, Event], None]
) -> AsyncIterator[bytes]:
    done: dict[int, Generation] = {}
    try:
        for chunk in handler.first_chunks():
            yield _line(chunk)
        for line in await _event_lines(handler, *first):
            yield line
        if first[1].final is not None:
            done[first[0]] = first[1].final
        async for index, event in events:
            for line in await _event_lines(handler, index, event):
                yield line
            if event.final is not None:
                done[index] = event.final
        if handler.wants_usage:
            yield _line(handler.chunk([], usage=handler.usage(done)))
    except Exception as error:
        yield _line(error_body(api_error(error)))
    # Also after an error: a stream without it is incomplete.
    yield b"data: [DONE]\n\n"


async def _event_lines(handler: TextHandler, index: int, event: Event) -> list[bytes]:
    def work() -> list[bytes]:
        return [_line(chunk) for chunk in handler.chunks(index, event)]

    return await handler.app_state.encoders.run(work) if handler.must_echo(index) else work()
