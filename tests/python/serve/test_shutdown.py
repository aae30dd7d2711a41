"""Shutdown of a server: no new requests; in-flight ones are finished or told that they are not."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.openai_clients import client_of, slow_down
from support.raw_http import HALF, answer, connect, to_the_end
from support.servers import (
    FLAGS,
    Gate,
    Running,
    ServerProcess,
    metric,
    running,
    server_process,
    tiny_options,
    wait_until,
)

from llamatap.serve import ServerOptions


def events(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream, up to [DONE]."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stopping(server: Running) -> threading.Thread:
    """The thread in which a server ends."""
    thread = threading.Thread(target=server.stop)
    thread.start()
    return thread


TEXT = {"model": "tiny", "max_tokens": 1500, "ignore_eos": True}
USER = [{"role": "user", "content": "a"}]


def test_what_cannot_be_finished_ends_with_an_answer(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.02)
    with (
        # Room for all four at once.
        running([tiny_options(tiny_chat_path, n_ctx=8192)], drain=0.5) as server,
        ThreadPoolExecutor(4) as pool,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        plain = pool.submit(http.post, "/v1/completions", json={**TEXT, "prompt": "a"})
        chat = pool.submit(http.post, "/v1/chat/completions", json={**TEXT, "messages": USER})
        with (
            http.stream("POST", "/v1/completions", json={**TEXT, "prompt": "a", "stream": True}) as one,
            http.stream(
                "POST", "/v1/chat/completions", json={**TEXT, "messages": USER, "stream": True}
            ) as two,
        ):
            streams = [events(one), events(two)]
            for stream in streams:
                assert "choices" in next(stream)
            wait_until(lambda: server.worker.waiting == 4)
            end = stopping(server)
            for stream in streams:
                *chunks, error, last = stream
                assert last == "[DONE]"
                assert error["error"]["code"] == "shutting_down"
                assert error["error"]["type"] == "unavailable_error"
                assert all("choices" in chunk for chunk in chunks)
        for found in (plain.result(), chat.result()):
            assert found.status_code == 503
            assert found.json()["error"]["code"] == "shutting_down"
            assert int(found.headers["retry-after"]) >= 1
            assert found.headers["connection"] == "close"
        end.join(30)
        assert not end.is_alive()


def test_real_clients_see_that_a_stream_was_not_finished(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.02)
    with running([tiny_options(tiny_chat_path)], drain=0.3) as server, client_of(server) as client:
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        end = stopping(server)
        with pytest.raises(openai.APIError, match="server stopped before the text was finished"):
            list(stream)
        end.join()


def test_what_waits_for_states_or_memory_ends_too(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    # Room for the states of one of them.
    options = ServerOptions(max_pending_bytes=100 * 64 * 4 * 2)
    ask = {"model": "tiny", "input": [5] * 100, "encoding_format": "base64", "dtype": "float16"}
    with (
        running([tiny_options(tiny_chat_path)], options, drain=0.3) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        asked = [
            pool.submit(httpx.post, f"{server.url}/v1/hidden_states", json=ask, timeout=60) for _ in range(3)
        ]
        assert gate.entered.wait(10)
        wait_until(lambda: server.state.budget.waiting > 0)
        end = stopping(server)
        for one in asked:
            assert one.result().status_code == 503
            assert one.result().json()["error"]["code"] == "shutting_down"
        gate.open.set()
        end.join()


def test_half_open_requests_are_dropped_and_the_others_finished(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.02)
    with running([tiny_options(tiny_chat_path)], drain=300) as server, httpx.Client(timeout=60) as http:
        body = {**TEXT, "max_tokens": 50, "prompt": "a", "stream": True}
        with (
            connect(server) as silent,
            connect(server) as headers,
            connect(server) as half,
            http.stream("POST", f"{server.url}/v1/completions", json=body) as response,
        ):
            headers.sendall(HALF[:30])
            half.sendall(HALF)
            stream = events(response)
            next(stream)
            wait_until(lambda: len(server.http.connections.waiting()) == 3)
            end = stopping(server)
            assert to_the_end(silent) == b""
            for client in (headers, half):
                code, found, head = answer(to_the_end(client))
                assert (code, found["error"]["code"]) == (503, "shutting_down")
                assert b"retry-after: " in head
                assert b"connection: close" in head
            # While the text goes on.
            assert server.worker.waiting == 1
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")
            *_, before, last = stream
            assert before["choices"][0]["finish_reason"] == "length"
            assert last == "[DONE]"
            end.join()


def load(server: ServerProcess, pool: ThreadPoolExecutor) -> list[Any]:
    """Requests that take longer than the tests wait: a stream and an answer of 64 texts each."""

    begun = threading.Event()
    body = {**TEXT, "prompt": [[5, 6]] * 64}

    def stream() -> list[str]:
        lines = []
        more = {**body, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=more, timeout=60) as response:
            for line in response.iter_lines():
                begun.set()
                if line:
                    lines.append(line)
        return lines

    asked: list[Any] = [pool.submit(stream)]
    # A request that has not started would get a 503.
    assert begun.wait(30)
    asked.append(pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60))
    wait_until(lambda: metric(server.url, 'llamatap_queue_prompts{model="tiny"}') > 120)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "drain"),
    [((signal.SIGTERM,), 1), ((signal.SIGTERM,) * 2, 300), ((signal.SIGINT,) * 2, 300)],
)
def test_signals(tiny_chat_path: Path, signals: tuple[int, ...], drain: int) -> None:
    flags = ("--model", f"tiny={tiny_chat_path}", *FLAGS, "--drain", str(drain))
    with server_process(*flags) as server, ThreadPoolExecutor(4) as pool:
        stream, plain = load(server, pool)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as half:
            half.sendall(HALF)
            time.sleep(0.3)
            os.kill(server.process.pid, signals[0])
            assert answer(to_the_end(half))[0] == 503
            for one in signals[1:]:
                assert server.process.poll() is None
                assert not plain.done()
                os.kill(server.process.pid, one)
            lines = stream.result()
            assert lines[-1] == "data: [DONE]"
            assert '"shutting_down"' in lines[-2]
            assert plain.result().status_code == 503
            assert plain.result().json()["error"]["code"] == "shutting_down"
            server.process.wait(20)
    said = server.said.splitlines()
    told = [line for line in said if "stopping: 2 requests in flight" in line]
    assert len(told) == 1
    assert "(a second Ctrl-C ends them at once); 1 half-open" in told[0]
    # The last line counts what could not be finished.
    assert said[said.index(told[0]) + 1 :] == ["WARNING:  2 requests were not finished: they end with 503"]


@pytest.mark.slow
def test_a_signal_with_nothing_in_flight_is_a_line(tiny_chat_path: Path) -> None:
    with server_process("--model", f"tiny={tiny_chat_path}", *FLAGS, "--drain", "300") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.terminate()
        server.process.wait(20)
    after = server.said.partition("running on")[2].splitlines()[1:]
    assert after == [
        "INFO:     stopping: 0 requests in flight have 300 s; 0 half-open connections were dropped"
    ]
