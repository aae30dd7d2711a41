"""Real servers, in a thread or in a process of their own."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.numerics import EXACT

from llamatap.extraction.extractor import Extractor
from llamatap.serve import ModelOptions, ServerOptions, create_app
from llamatap.serve.app_state import AppState
from llamatap.serve.http.server_lifecycle import HttpServer
from llamatap.serve.options import ConnectionOptions
from llamatap.serve.workers.model_worker import ModelWorker

FLAGS = ("--kv-type", "f32", "--flash-attn", "off", "--threads", str(EXACT["n_threads"]), "--n-ctx", "2048")


@dataclass
class Running:
    """A server that answers at :attr:`url`."""

    app: FastAPI
    url: str
    client: httpx.Client
    #: Ends the server, as a signal would, and waits until it has ended.
    stop: Callable[[], None]
    http: HttpServer

    @property
    def state(self) -> AppState:
        state = self.app.state.server
        assert isinstance(state, AppState)
        return state

    @property
    def worker(self) -> ModelWorker:
        """The worker of the first model."""
        return next(iter(self.state.workers.values()))

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """Send a request and return the JSON of an answer with that status."""
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def states(self, **body: Any) -> Any:
        """The answer of ``/v1/hidden_states`` for the model ``tiny``."""
        return self.post("/v1/hidden_states", **{"model": "tiny", **body})

    def error(self, path: str, status: int, kind: str, **body: Any) -> str:
        """Send a request that fails with that status and type; the error's message."""
        found = self.post(path, status, **body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "code"}
        assert found["error"]["type"] == kind
        return str(found["error"]["message"])


@contextlib.contextmanager
def running(
    models: Sequence[ModelOptions],
    options: ServerOptions | None = None,
    connections: ConnectionOptions | None = None,
    drain: float = 20,
) -> Iterator[Running]:
    """Serve models at a free port of this machine."""
    app = create_app(models, options)
    # asyncio switches Nagle off for sockets that say they are of TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = HttpServer(app, connections, drain=drain)
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
            yield Running(app, url, client, stop, server)
    finally:
        stop()
        listener.close()


def tiny_options(path: Path, **more: Any) -> ModelOptions:
    """Options of a tiny model served as ``tiny``."""
    return ModelOptions(**{"name": "tiny", "path": path, "context": EXACT.copy(), "n_ctx": 2048, **more})


@dataclass
class ServerProcess:
    """``llamatap serve``, a process of its own."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    @property
    def said(self) -> str:
        """The stderr so far; all of it once the process has ended."""
        return "".join(self.lines)


@contextlib.contextmanager
def server_process(*arguments: str | Path) -> Iterator[ServerProcess]:
    """``llamatap serve`` at a free port; after the block it has ended."""
    command = [sys.executable, "-m", "llamatap", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(lines))
        # Keep reading, so that the pipe never fills.
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(lines.extend, process.stderr)
            try:
                yield ServerProcess(process, found[1], lines)
            finally:
                if process.poll() is None:
                    process.kill()
                reading.result()
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@contextlib.contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``llamatap serve`` at a free port: the process, and its address."""
    with server_process(*arguments) as found:
        yield found.process, found.url


def metric(url: str, line: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


class Gate:
    """Makes extraction wait until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.calls: list[int] = []
        original = Extractor.__call__

        def waiting(extractor: Extractor, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append(len(inputs))
            self.entered.set()
            assert self.open.wait(30)
            return original(extractor, inputs, *arguments, **options)

        monkeypatch.setattr(Extractor, "__call__", waiting)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
