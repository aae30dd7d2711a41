"""Errors as responses: ``{"error": {"message", "type", "code"}}``."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamatap.errors import (
    ClosedError,
    ContextFullError,
    Error,
    InvalidInputError,
    NotFiniteError,
    OutOfMemoryError,
    UnsupportedError,
)
from llamatap.serve.body_errors import unreadable_body, validation_message

__all__ = ["ApiError", "ErrorResponse", "api_error", "error_body", "error_response", "install"]

_logger = logging.getLogger("llamatap.serve")


class ErrorDetail(BaseModel):
    message: str
    type: str
    code: str


class ErrorResponse(BaseModel):
    """The body of every response other than 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """An error as a response.

    :param kind: its type, by OpenAI's names.
    :param code: its code, for programs.
    :param retry_after: seconds after which the client should try again.
    """

    def __init__(
        self, status: int, kind: str, code: str, message: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def invalid(cls, message: str, code: str = "invalid_value") -> ApiError:
        """400: the request is wrong."""
        return cls(400, "invalid_request_error", code, message)

    @classmethod
    def queue_full(cls, message: str, retry_after: int) -> ApiError:
        """429: too many requests are waiting.

        :param retry_after: seconds.
        """
        return cls(429, "rate_limit_error", "queue_full", message, retry_after=retry_after)


def api_error(error: BaseException) -> ApiError:
    """The response for an exception, of this package or any other."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError.invalid(str(error), "context_length_exceeded")
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, "unavailable_error", "out_of_memory", str(error))
    if isinstance(error, ClosedError):
        return ApiError(503, "unavailable_error", "model_closed", "the model is being closed")
    if isinstance(error, NotFiniteError):
        return ApiError(422, "model_error", "not_finite", str(error))
    if isinstance(error, InvalidInputError):
        return ApiError.invalid(str(error))
    if isinstance(error, UnsupportedError):
        return ApiError(422, "model_error", "unsupported", str(error))
    _logger.error("a request failed", exc_info=error)
    message = str(error) if isinstance(error, Error) else "the server failed; its log says more"
    return ApiError(500, "internal_error", "internal_error", message)


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error's response, or its event in a stream."""
    return {"error": {"message": str(error), "type": error.kind, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """The response of an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(orjson.dumps(error_body(error)), error.status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Give every error of an app this form."""
    app.add_middleware(Failures)

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(Error)
    async def package(_: Request, error: Error) -> Response:
        return error_response(api_error(error))

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        return error_response(ApiError.invalid(validation_message(error), "invalid_body"))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        codes = {400: "invalid_body", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
        code = codes.get(error.status_code, "http_error")
        # FastAPI itself raises 400 only for bodies that it cannot read.
        message = unreadable_body(error.__cause__) if error.status_code == 400 else str(error.detail)
        found = error_response(ApiError(error.status_code, "invalid_request_error", code, message))
        found.headers.update(error.headers or {})
        return found


class Failures:
    """Middleware: turns an uncaught exception into a response, and keeps the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            # The server is stopped by force: by a second Ctrl-C, or because --drain is over.
            if started or scope["type"] != "http":
                raise
            ended = ApiError(
                503,
                "unavailable_error",
                "shutting_down",
                "the server stopped before the request was finished",
            )
            await error_response(ended)(scope, receive, send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(api_error(error))(scope, receive, send)
