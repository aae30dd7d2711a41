"""A real server in a thread, for the tests of what it serves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from conftest import EXACT
from fastapi import FastAPI

from llamatap.serve import ModelOptions, ServerOptions, create_app
from llamatap.serve.state import Server
from llamatap.serve.worker import ModelWorker


@dataclass
class Running:
    """A server that answers at :attr:`url`."""

    app: FastAPI
    url: str
    client: httpx.Client
    #: Ends the server, as a signal would, and waits until it has ended.
    stop: Callable[[], None]

    @property
    def state(self) -> Server:
        state = self.app.state.server
        assert isinstance(state, Server)
        return state

    @property
    def worker(self) -> ModelWorker:
        """The first model's."""
        return next(iter(self.state.workers.values()))

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """The JSON of an answer with that status."""
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def states(self, **body: Any) -> Any:
        """The answer of ``/v1/hidden_states`` for the model ``tiny``."""
        return self.post("/v1/hidden_states", **{"model": "tiny", **body})

    def error(self, path: str, status: int, kind: str, **body: Any) -> str:
        """The message of an error of that status and type."""
        found = self.post(path, status, **body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "code"}
        assert found["error"]["type"] == kind
        return str(found["error"]["message"])


@contextlib.contextmanager
def running(models: Sequence[ModelOptions], options: ServerOptions | None = None) -> Iterator[Running]:
    """Serve models at a free port of this machine."""
    app = create_app(models, options)
    # asyncio switches Nagle off for sockets that say they are of TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=20))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        headers = {"Authorization": f"Bearer {options.api_key}"} if options and options.api_key else {}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            yield Running(app, url, client, stop)
    finally:
        stop()
        listener.close()


def tiny_options(path: Path, **more: Any) -> ModelOptions:
    """A tiny model under the name ``tiny``."""
    return ModelOptions(**{"name": "tiny", "path": path, "context": EXACT.copy(), "n_ctx": 2048, **more})
