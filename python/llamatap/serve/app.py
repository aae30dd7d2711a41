"""The app: routes, middleware, and loading and closing of the models."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import anyio.to_thread
from fastapi import FastAPI, Request, Response

from llamatap.errors import InvalidInputError
from llamatap.loaded_model import files_of
from llamatap.serve import errors, page, tokenizer
from llamatap.serve.app_state import AppState
from llamatap.serve.completions.routes import router as completions_router
from llamatap.serve.disconnect import ClientGoneError
from llamatap.serve.drain_deadline import DrainDeadline
from llamatap.serve.hidden_states.routes import router as hidden_states_router
from llamatap.serve.http.request_checks import ApiKey, BodyLimit, Cors, HostCheck, JsonOnly, OneLength
from llamatap.serve.memory_budget import ResponseEnd
from llamatap.serve.metrics import Metrics, RequestMetrics
from llamatap.serve.options import ModelOptions, ServerOptions
from llamatap.serve.verifier import VerifierFiles
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["create_app"]


def create_app(models: Sequence[ModelOptions], options: ServerOptions | None = None) -> FastAPI:
    """Make an ASGI app that serves models. They are loaded here; their threads run while the app does.

    :raises InvalidInputError: there is no model, or two have the same name.
    :raises Error: a model, drafter or preset cannot be loaded.
    """
    from llamatap import __version__

    if not models:
        raise InvalidInputError("there is no model to serve")
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"each model needs its own name; found {', '.join(names)}")
    options = options or ServerOptions()
    # A request with more prompts than may wait could never be admitted.
    options = replace(options, max_inputs=min(options.max_inputs, options.max_queue))
    app_state = _load(models, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _running(app_state):
            yield

    app = FastAPI(title="llamatap", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = app_state
    errors.install(app)
    _add_routes(app, app_state)
    _add_middleware(app, app_state)
    return app


def _load(models: Sequence[ModelOptions], options: ServerOptions) -> AppState:
    """Load the models; if one fails, the others are closed."""
    metrics = Metrics()
    drain_deadline = DrainDeadline()
    verifier = None if options.verifier is None else VerifierFiles(options.verifier)
    workers: dict[str, ModelWorker] = {}
    with contextlib.ExitStack() as undo:
        for model_options in models:
            worker = ModelWorker(model_options, options.max_queue, metrics, drain_deadline)
            workers[worker.name] = worker
            undo.callback(worker.close)
            if verifier is not None:
                verifier.layers(worker.model)
            # Compute the hash now: otherwise the first response would wait for it.
            files_of(worker.model).sha256()
        app_state = AppState(workers, options, metrics, verifier, drain_deadline)
        undo.pop_all()
    return app_state


@contextlib.asynccontextmanager
async def _running(app_state: AppState) -> AsyncIterator[None]:
    """Run the threads of the models; at the end they finish the accepted work."""
    for worker in app_state.workers.values():
        worker.start()
    if app_state.verifier is not None:
        app_state.verifier.start()
    try:
        yield
    finally:
        for worker in app_state.workers.values():
            await anyio.to_thread.run_sync(worker.close)
        if app_state.verifier is not None:
            app_state.verifier.close()


def _add_routes(app: FastAPI, app_state: AppState) -> None:
    app.include_router(hidden_states_router)
    app.include_router(completions_router)
    app.include_router(tokenizer.router)
    app.include_router(page.make_router(app_state.options.max_length))

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": errors.ErrorResponse}})
    async def health() -> dict[str, str]:
        """Whether all models are being served."""
        if idle := [name for name, worker in app_state.workers.items() if not worker.works]:
            message = f"not being served: {', '.join(idle)}"
            raise errors.ApiError(503, "unavailable_error", "not_serving", message)
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def counters() -> Response:
        """Counters for Prometheus."""
        for name, worker in app_state.workers.items():
            app_state.metrics.queue.labels(name).set(worker.waiting)
        return Response(app_state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_middleware(app: FastAPI, app_state: AppState) -> None:
    """Add the request checks. The middleware that is added last sees a request first."""
    options = app_state.options
    app.add_middleware(ResponseEnd)
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    app.add_middleware(JsonOnly)
    if options.api_key is not None:
        app.add_middleware(ApiKey, key=options.api_key)
    elif not options.any_host:
        app.add_middleware(HostCheck)
    if options.cors:
        # Before the key is checked: a browser's preflight has none, and pages must be able to read a 401.
        app.add_middleware(
            Cors,
            allow_origins=options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(OneLength)
    app.add_middleware(RequestMetrics, metrics=app_state.metrics)
