"""Connections held open without a request: each has a deadline, and their number is limited."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.raw_http import BODY, HALF, HEAD, WHOLE, answer, connect, to_the_end
from support.servers import FLAGS, Gate, Running, running, server_process, tiny_options, wait_until

import llamatap as lt
from llamatap.serve import ServerOptions
from llamatap.serve.http.http_protocol import HttpProtocol
from llamatap.serve.options import ConnectionOptions
from llamatap.serve.payload import PiecewiseResponse

SHORT = 0.4
LONG = 100.0


def limits(**short: float) -> ConnectionOptions:
    """Limits of which the given one is soon reached and the others never."""
    names = ("header_timeout", "body_timeout", "idle_timeout", "send_timeout")
    return ConnectionOptions(**{**dict.fromkeys(names, LONG), **short})  # type: ignore[arg-type]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("limit", "sent", "drip", "status"),
    [
        ("header_timeout", b"", b"", None),
        ("header_timeout", b"POST /v1/hid", b"", 408),
        ("header_timeout", HEAD, b"X", 408),
        ("body_timeout", HALF, b"", 408),
        ("body_timeout", HALF, b" ", 408),
        ("body_timeout", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", 408),
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(
    tiny_path: Path, limit: str, sent: bytes, drip: bytes, status: int | None
) -> None:
    with running([tiny_options(tiny_path)], None, limits(**{limit: SHORT})) as server:
        started = time.monotonic()
        with connect(server) as client, ThreadPoolExecutor(1) as pool:
            client.sendall(sent)
            ended = pool.submit(to_the_end, client)
            # A byte does not restart the deadline.
            while drip and not ended.done():
                with contextlib.suppress(OSError):
                    client.sendall(drip)
                time.sleep(SHORT / 5)
            found = ended.result()
        assert time.monotonic() - started >= SHORT
        if status is None:
            assert found == b""
        else:
            code, body, head = answer(found)
            assert code == status
            assert body["error"]["code"] == "request_timeout"
            assert f"more than {SHORT:g} s" in body["error"]["message"]
            assert b"connection: close" in head
        assert server.states(input="a")["shape"] == [2, 64]


@pytest.mark.slow
def test_times_are_of_one_request(tiny_path: Path) -> None:
    """A connection may outlive each of the limits."""
    options = ConnectionOptions(header_timeout=2, body_timeout=2, idle_timeout=2, send_timeout=2)
    with running([tiny_options(tiny_path)], None, options) as server, connect(server) as client:
        started = time.monotonic()
        while time.monotonic() - started < 3:
            for piece in (WHOLE[:20], WHOLE[20:-10], WHOLE[-10:]):
                client.sendall(piece)
                time.sleep(0.1)
            assert one_response(client).startswith(b"HTTP/1.1 200")
            time.sleep(0.1)


@pytest.mark.slow
def test_an_idle_connection_is_closed(tiny_path: Path) -> None:
    # More than the 5 s that uvicorn gives them.
    seconds = 6.0
    options = limits(idle_timeout=seconds)
    with running([tiny_options(tiny_path)], None, options) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        started = time.monotonic()
        assert answer(to_the_end(client))[:2] == (200, {"status": "ok"})
        assert time.monotonic() - started >= seconds


def test_a_body_that_nobody_reads_ends_too(tiny_path: Path) -> None:
    options = limits(body_timeout=SHORT)
    with (
        running([tiny_options(tiny_path)], ServerOptions(api_key="k"), options) as server,
        connect(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.sendall(HALF)
        ended = pool.submit(to_the_end, client)
        while not ended.done():
            with contextlib.suppress(OSError):
                client.sendall(b" ")
            time.sleep(SHORT / 5)
        assert answer(ended.result())[0] == 401


def reader(server: Running, n_tokens: int) -> socket.socket:
    """A client that asks for megabytes and reads slowly."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    client.settimeout(30)
    host, port = server.url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    body = json.dumps({"model": "tiny", "input": [[5] * 500] * (n_tokens // 500)}).encode()
    client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return client


@pytest.mark.slow
def test_who_reads_nothing_is_given_up(tiny_path: Path) -> None:
    options = limits(send_timeout=SHORT)
    with running([tiny_options(tiny_path)], None, options) as server, reader(server, 20_000):
        total = server.state.budget.total
        wait_until(lambda: server.state.budget.free < total)
        wait_until(lambda: server.state.budget.free == total and not len(server.http.connections))


def test_a_client_that_pauses_is_the_servers_affair_alone() -> None:
    """Answers with states have no time limit but --send-timeout, which may be hours."""

    async def main() -> list[bytes]:
        loop, sent = asyncio.get_running_loop(), []
        taken = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if len(sent) == 2:
                await taken.wait()

        async def receive() -> Any:
            raise AssertionError

        response = PiecewiseResponse([b"a" * 2**18, b"b"], "text/plain")
        task = asyncio.ensure_future(response({"type": "http"}, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        now = loop.time
        loop.time = lambda: now() + 10_000.0  # type: ignore[method-assign]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        taken.set()
        await task
        return sent

    assert b"".join(asyncio.run(main())) == b"a" * 2**18 + b"b"


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["_update_phase", "_check_sending"])
def test_a_connection_that_cannot_be_checked_is_closed(
    tiny_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The private parts of uvicorn may change: the time limits of other connections hold."""
    broken: list[HttpProtocol] = []
    check = HttpProtocol.check

    def checked(self: HttpProtocol) -> None:
        if not broken:
            broken.append(self)
            setattr(self, fails, lambda: self.flow.no_such_thing)  # type: ignore[attr-defined]
        check(self)

    monkeypatch.setattr(HttpProtocol, "check", checked)
    with running([tiny_options(tiny_path)], None, limits(header_timeout=3 * SHORT)) as server:
        with connect(server) as first:
            wait_until(lambda: len(broken) == 1)
            assert to_the_end(first) == b""
        assert len(server.http.connections) == 0
        with connect(server) as second:
            second.sendall(HEAD)
            assert answer(to_the_end(second))[0] == 408
    assert sum("no_such_thing" in line for line in caplog.messages) == 1


@pytest.mark.slow
def test_who_reads_slowly_gets_it_all(tiny_path: Path) -> None:
    options = limits(send_timeout=SHORT)
    with running([tiny_options(tiny_path)], None, options) as server, reader(server, 10_000) as client:
        started, found = time.monotonic(), b""
        while piece := client.recv(2**16):
            found += piece
            time.sleep(0.01)
        assert time.monotonic() - started > 2 * SHORT
        assert len(answer(found)[1]["data"]) == 20


def one_response(client: socket.socket) -> bytes:
    """One response, headers and body: the server may send them apart."""
    received = client.recv(2**16)
    head = received.partition(b"\r\n\r\n")[0]
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None
    while len(received) < len(head) + 4 + int(length[1]):
        received += client.recv(2**16)
    return received


@pytest.mark.slow
def test_the_oldest_that_waits_makes_room(tiny_path: Path) -> None:
    options = ConnectionOptions(max_connections=4)
    with running([tiny_options(tiny_path)], None, options) as server, contextlib.ExitStack() as stack:
        clients = []
        for sent in (HALF, b"", WHOLE, HEAD, HALF, HALF):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(sent)
            if sent == WHOLE:
                assert one_response(clients[-1]).startswith(b"HTTP/1.1 200")
            time.sleep(0.05)
        # The first two of them made room for the last two.
        code, body, head = answer(to_the_end(clients[0]))
        assert (code, body["error"]["code"]) == (503, "too_many_connections")
        assert b"retry-after: " in head
        assert to_the_end(clients[1]) == b""
        clients[2].sendall(WHOLE)
        clients[3].sendall(b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        for client in clients[4:]:
            client.sendall(BODY[5:])
        for client in clients[2:]:
            assert client.recv(2**16).startswith(b"HTTP/1.1 200")


def all_answers(clients: list[socket.socket]) -> list[int]:
    """The statuses that clients get; a connection reset fails the test."""
    found = []
    for client in clients:
        received = client.recv(2**16)
        found.append(int(received.split()[1]))
        if found[-1] == 503:
            assert b"retry-after: " in received.lower()
            assert b"too_many_connections" in received + to_the_end(client)
    return found


def test_a_burst_is_answered(tiny_path: Path) -> None:
    """Connections closed to make room for others had not sent a whole request."""
    with (
        running([tiny_options(tiny_path)], None, ConnectionOptions(max_connections=4)) as server,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(connect(server)) for _ in range(30)]
        for client in clients:
            client.sendall(WHOLE)
        assert sorted(all_answers(clients)) == [200] * 4 + [503] * 26
        wait_until(lambda: len(server.http.connections) == 4)
        with connect(server) as client:
            client.sendall(WHOLE)
            assert client.recv(2**16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("last", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_burst_beside_busy_ones_is_answered(
    tiny_path: Path, last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with (
        running([tiny_options(tiny_path)], None, ConnectionOptions(max_connections=4)) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(gate.open.set)
        busy = []
        for _ in range(4):
            busy.append(stack.enter_context(connect(server)))
            busy[-1].sendall(WHOLE)
        wait_until(lambda: sum(not one.waits for one in server.http.connections._open) == 4)
        more = [stack.enter_context(connect(server)) for _ in range(40)]
        for client in more:
            client.sendall(last or WHOLE)
        assert all_answers(more) == [200 if last else 503] * 40
        gate.open.set()
        assert all_answers(busy) == [200] * 4


def test_an_error_reaches_a_client_that_still_sends(tiny_path: Path) -> None:
    """Unread bytes at the close would be answered with a reset, which discards the error."""
    with running([tiny_options(tiny_path)]) as server, connect(server) as client:
        client.sendall(HEAD + b"X" * 70_000)
        for _ in range(10):
            client.sendall(b"X" * 10_000)
            time.sleep(0.02)
        received = b""
        while piece := client.recv(2**16):
            received += piece
        code, body, _ = answer(received)
        assert (code, body["error"]["code"]) == (431, "headers_too_large")
        assert body["error"]["message"] == "the headers are larger than 16384 bytes"


def test_an_upgrade_gets_no_advice(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with running([tiny_options(tiny_path)]) as server:
        assert httpx.get(f"{server.url}/health", headers=upgrade).status_code == 200
    assert not [line for line in caplog.messages if "WebSocket" in line or "upgrade" in line]


def test_health_is_answered_while_all_are_busy(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    options = ConnectionOptions(max_connections=4)
    with (
        running([tiny_options(tiny_path)], None, options) as server,
        ThreadPoolExecutor(4) as pool,
        contextlib.ExitStack() as stack,
    ):
        busy = [pool.submit(httpx.post, f"{server.url}/v1/hidden_states", content=BODY, headers=JSON)]
        assert gate.entered.wait(10)
        busy += [
            pool.submit(httpx.post, f"{server.url}/v1/hidden_states", content=BODY, headers=JSON)
            for _ in range(3)
        ]
        wait_until(lambda: server.worker.waiting == 3)
        for _ in range(3):
            refused = httpx.post(f"{server.url}/v1/hidden_states", content=BODY, headers=JSON)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        # Nor do waiting connections beside them take the last places.
        for _ in range(60):
            stack.enter_context(connect(server)).sendall(HALF)
        assert len(server.http.connections) <= 4 + 16
        for path in ("/health", "/metrics", "/v1/models"):
            assert httpx.get(server.url + path).status_code == 200
        gate.open.set()
        assert [one.result().status_code for one in busy] == [200] * 4


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"content-length: 0\r\ntransfer-encoding: Chunked\r\n",
    ],
)
def test_a_body_of_two_lengths_is_refused(tiny_path: Path, framing: bytes) -> None:
    with running([tiny_options(tiny_path)]) as server, connect(server) as client:
        # By one header the bytes after the chunks are another request, by the other part of the body.
        client.sendall(HEAD + framing + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = to_the_end(client)
        assert found.count(b"HTTP/1.1") == 1
        code, body, head = answer(found)
        assert (code, body["error"]["type"]) == (400, "invalid_request_error")
        assert "not both" in body["error"]["message"]
        assert b"connection: close" in head


@pytest.mark.parametrize("sent", [b"what?\r\n\r\n", b"GET / HTTP/1.1\r\nA b: c\r\n\r\n"])
def test_what_is_no_http_is_answered_like_all_errors(tiny_path: Path, sent: bytes) -> None:
    with running([tiny_options(tiny_path)]) as server, connect(server) as client:
        client.sendall(sent)
        code, body, _ = answer(to_the_end(client))
        assert (code, body["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    "options",
    [
        {"max_connections": 0},
        {"max_connections": 1.5},
        {"header_timeout": 0},
        {"body_timeout": -1},
        {"idle_timeout": float("nan")},
        {"send_timeout": 0},
    ],
)
def test_limits_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError, match=next(iter(options))):
        ConnectionOptions(**options)


@contextlib.contextmanager
def half_open(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections of which each has sent half of a request."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=30)))
            clients[-1].sendall(HALF)
        yield clients


@pytest.mark.slow
def test_few_open_files(tiny_path: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(server_process("--model", f"tiny={tiny_path}", *FLAGS))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with half_open(server.url, 60):
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=10).json() == {"status": "ok"}
            states = httpx.post(f"{server.url}/v1/hidden_states", content=BODY, headers=JSON, timeout=30)
            assert states.status_code == 200
            server.process.terminate()
            server.process.wait(20)
    assert "ulimit -n" in server.said
    assert len(server.said) < 2000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
def test_no_files_left(tiny_path: Path) -> None:
    """The server goes on however few files it may open."""
    with server_process("--model", f"tiny={tiny_path}", *FLAGS) as server:
        process, url = server.process, server.url
        started = time.monotonic()
        n_open = len(os.listdir(f"/proc/{process.pid}/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (n_open + 5, hard))  # type: ignore[attr-defined,unused-ignore]
        with half_open(url, 30):
            for _ in range(3):
                assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"}
        seconds = time.monotonic() - started
        process.terminate()
        process.wait(20)
    lines = re.findall("no connection can be accepted: Too many open files", server.said)
    assert 1 <= len(lines) <= seconds + 2
    assert "Traceback" not in server.said
    assert len(server.said) < 2000 + 200 * seconds
