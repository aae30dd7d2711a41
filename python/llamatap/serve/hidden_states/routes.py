"""``POST /v1/hidden_states``: the states of prompts; layers count as in transformers' ``hidden_states``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from llamatap.serve.app_state import app_state_of
from llamatap.serve.disconnect import unless_gone
from llamatap.serve.errors import ErrorResponse
from llamatap.serve.hidden_states.checked_request import check_request
from llamatap.serve.hidden_states.response import make_response
from llamatap.serve.hidden_states.schema import (
    HiddenStatesListResponse,
    HiddenStatesRequest,
    HiddenStatesResponse,
)

__all__ = ["router"]

router = APIRouter()


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
    app_state = app_state_of(request)
    worker = app_state.worker(body.model)

    async def answer() -> Response:
        checked = await app_state.threads.run(lambda: check_request(app_state, worker, body))
        await app_state.budget.take(request, checked.n_bytes)
        found = await worker.extract(checked.tasks)
        return await app_state.encoders.run(lambda: make_response(checked, found))

    return await unless_gone(request, answer())
