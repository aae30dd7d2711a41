"""Counters for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Metrics", "RequestMetrics"]


class Metrics:
    """The counters of one server, in a separate registry: several servers can run in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "llamatap_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "llamatap_request_seconds",
            "Seconds from a request's arrival to the end of its response.",
            ["path"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.tokens = Counter(
            "llamatap_tokens",
            "Tokens, by kind: extracted, prompt, generated, drafted, accepted.",
            ["model", "kind"],
            registry=self.registry,
        )
        self.queue = Gauge(
            "llamatap_queue_prompts",
            "Waiting prompts, and texts that are being generated.",
            ["model"],
            registry=self.registry,
        )
        self.batch = Histogram(
            "llamatap_batch_prompts",
            "Prompts extracted together.",
            ["model"],
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self.registry)


def _route_path(scope: Scope) -> str:
    """The path of a request's route; "other" if it has none."""
    if "route" in scope:
        return str(getattr(scope["route"], "path", "other"))
    # Refused by a middleware, before routing.
    known = scope["app"].openapi()["paths"] if "app" in scope else ()
    return scope["path"] if scope["path"] in known else "other"


class RequestMetrics:
    """Middleware: counts requests by the path of their route, never by paths that clients make up."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # the client disconnected

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            path = _route_path(scope)
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - started)
