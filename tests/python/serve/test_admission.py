"""Checks of a server before it computes: bodies, hosts, lengths of texts, and memory for answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from pydantic import ValidationError
from support.openai_clients import slow_down
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.serve import ServerOptions
from llamatap.serve.app_state import AppState
from llamatap.serve.completions.schema import ChatRequest, CompletionRequest
from llamatap.serve.errors import ApiError
from llamatap.serve.fields import Body
from llamatap.serve.hidden_states.schema import HiddenStatesRequest
from llamatap.serve.memory_budget import Budget, ResponseEnd

MANY = 100_000


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_path)]) as found:
        yield found


USER = {"role": "user", "content": "a"}

#: Bodies of which no element is right.
WRONG: list[tuple[type[Body], dict[str, Any]]] = [
    *(
        (HiddenStatesRequest, {"input": one})
        for one in ([1.5] * MANY, ["a", *[2] * MANY], [[5], *"a" * MANY])
    ),
    (HiddenStatesRequest, {"input": [["a"] * MANY]}),
    (HiddenStatesRequest, {"input": [[-1]] * MANY}),
    (HiddenStatesRequest, {"input": "a", "layers": ["a"] * MANY}),
    (HiddenStatesRequest, {"input": "a", **{f"field{i}": i for i in range(MANY)}}),
    (CompletionRequest, {"prompt": [None, *[1] * MANY]}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    (ChatRequest, {"messages": [{"role": 5}] * MANY}),
    (ChatRequest, {"messages": [USER], **{f"field{i}": i for i in range(MANY)}}),
]

#: Two kinds are possible, and each has its mistake.
WRONG_EITHER_WAY: list[tuple[type[Body], dict[str, Any]]] = [
    (HiddenStatesRequest, {"prompt": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": ["a"] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * MANY}]}),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{f"field{i}": i for i in range(MANY)}]}]},
    ),
]


@pytest.mark.parametrize(
    ("kind", "fields", "most"), [(*one, 1) for one in WRONG] + [(*one, 2) for one in WRONG_EITHER_WAY]
)
def test_a_body_of_many_mistakes_is_one(kind: type[Body], fields: dict[str, Any], most: int) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "tiny", **fields})
    assert raised.value.error_count() <= most


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("hidden_states", {"input": "a", "layers": [1] * 11}),
        ("completions", {"prompt": "a", "stop": ["b"] * 17}),
        ("completions", {"prompt": "a", "stop_token_ids": [5] * 257}),
        ("chat/completions", {"messages": [USER] * 1025}),
    ],
)
def test_lists_that_are_too_long(server: Running, path: str, fields: dict[str, Any]) -> None:
    server.error(f"/v1/{path}", 400, "invalid_request_error", model="tiny", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": 5}, "input: expected a text, token ids, or a list of either, found 5"),
        (
            {"input": {"text": "a"}},
            "input: expected a text, token ids, or a list of either, found an object",
        ),
        ({"input": [5, 6, "a"]}, 'input[2]: Input should be a valid integer, found "a"'),
        ({"input": "a", "laier": -2}, "laier is not a field of this request; did you mean layer?"),
        ({"input": "a", "stream": True}, "stream is not a field of this request"),
        ({"input": "a", "layer": "-2"}, 'layer: Input should be a valid integer, found "-2"'),
        ({"input": "a", "layer": 1.5}, "layer: Input should be a valid integer, found 1.5"),
        ({"input": "a", "layer": [1]}, "layer: Input should be a valid integer, found a list"),
        (
            {"input": "a", "layer": "norm"},
            'layer: Input should be a valid integer, found "norm": here -1 is the last state, normed',
        ),
        (
            {"input": "a", "layers": [1, "norm"]},
            'layers[1]: Input should be a valid integer, found "norm": here -1 is the last state, normed',
        ),
        (
            {"input": "a", "dtype": "x" * 50},
            f"dtype: Input should be 'float32', 'float16' or 'bfloat16', found \"{'x' * 40}\"...",
        ),
        ({"input": [[5], [6, -1]]}, "input[1][1]: Input should be greater than or equal to 0, found -1"),
        ({"input": "a", "layers": [1, "b"]}, 'layers[1]: Input should be a valid integer, found "b"'),
    ],
)
def test_messages_name_the_mistake(server: Running, fields: dict[str, Any], message: str) -> None:
    found = server.error("/v1/hidden_states", 400, "invalid_request_error", model="tiny", **fields)
    assert found == message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            '[{"role": "user", "content": [{"type": "text", "text": "a"}, '
            '{"type": "image_url", "image_url": "x"}]}]',
            "messages[0].content[1].image_url is not a field of this request",
        ),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text: Field required"),
        ('[{"role": "user", "content": ["a"]}]', 'messages[0].content[0]: must be an object, found "a"'),
        (
            '[{"role": "user", "content": {"text": "a"}}]',
            "messages[0].content: Input should be a valid string, found an object; "
            "messages[0].content: Input should be a valid list, found an object",
        ),
        ('[{"role": "user", "content": "a"}, {"content": "a"}]', "messages[1].role: Field required"),
        ("5", "messages: Input should be a valid list, found 5"),
    ],
)
def test_messages_name_the_place(server: Running, messages: str, message: str) -> None:
    content = f'{{"model": "tiny", "messages": {messages}}}'
    found = server.client.post("/v1/chat/completions", content=content, headers=JSON)
    assert found.status_code == 400
    assert found.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("NaN", "temperature: must be a finite number, found NaN"),
        ("Infinity", "temperature: must be a finite number, found Infinity"),
        ("-Infinity", "temperature: must be a finite number, found -Infinity"),
        ("1e999", "temperature: must be a finite number, found Infinity"),
        ("1" * 5000, "an integer in the body has more than 4300 digits"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_numbers_that_are_none(server: Running, path: str, number: str, message: str) -> None:
    what = '"prompt": "a"' if path == "completions" else '"messages": [{"role": "user", "content": "a"}]'
    content = f'{{"model": "tiny", {what}, "temperature": {number}}}'
    found = server.client.post(f"/v1/{path}", content=content, headers=JSON)
    assert found.status_code == 400
    assert found.json()["error"]["message"] == message


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "kind", "code", "message"),
    [
        (b'{"model": "tiny"}', None, "unsupported_media_type", "found nothing"),
        (b'{"model": "tiny"}', "application/x-www-form-urlencoded", "unsupported_media_type", "urlencoded"),
        (b"{'model': 1}", "application/json", "invalid_body", "not JSON: Expecting property name"),
        (b'{"model": "\xff"}', "application/json; charset=utf-8", "invalid_body", "not JSON in UTF-8"),
        (b"[" * 100_000, "application/json", "invalid_body", "nested too deeply"),
        (b"[1]", "application/json", "invalid_body", "a request must be a JSON object"),
    ],
)
def test_what_is_no_json_is_said_so(
    server: Running, content: bytes, kind: str | None, code: str, message: str
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    found = server.client.post("/v1/completions", content=content, headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == code
    assert message in found.json()["error"]["message"]


def test_requests_refused_before_routing_count_for_their_path(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)]) as server:
        assert server.client.post("/v1/completions", content=b"{}").status_code == 400
        assert server.client.post("/v1/other", content=b"{}").status_code == 400
        counted = server.client.get("/metrics").text
    assert 'llamatap_requests_total{path="/v1/completions",status="400"} 1.0' in counted
    assert 'llamatap_requests_total{path="other",status="400"} 1.0' in counted


def test_the_head_of_the_page(server: Running) -> None:
    found = server.client.head("/")
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["content-length"] == server.client.get("/").headers["content-length"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:1234", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("a.localhost.", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.1:8000", 403),
    ],
)
def test_the_host_of_a_request(server: Running, host: str, status: int) -> None:
    for path in ("/", "/health", "/v1/models"):
        found = server.client.get(path, headers={"Host": host})
        assert found.status_code == status
        assert status == 200 or found.json()["error"]["code"] == "host_not_allowed"


def test_hosts_of_servers_with_a_key_or_none_by_intent(tiny_path: Path) -> None:
    for options in (ServerOptions(api_key="k"), ServerOptions(any_host=True)):
        with running([tiny_options(tiny_path)], options) as server:
            assert server.client.get("/v1/models", headers={"Host": "some.example"}).status_code == 200


def test_schemes_are_written_as_one_likes(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(api_key="k")) as server:
        for given, status in (("bearer k", 200), ("BEARER  k", 200), ("Basic k", 401), ("bearer", 401)):
            found = server.client.get("/v1/models", headers={"Authorization": given})
            assert found.status_code == status
        assert server.client.head("/health").status_code == 200


def test_texts_that_no_prompt_can_be(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(max_length=4500)) as server:
        assert server.states(input="x" * 72_000, max_length=10)["shape"][0] == 10
        for path, field in (("hidden_states", "input"), ("completions", "prompt")):
            message = server.error(
                f"/v1/{path}", 400, "invalid_request_error", model="tiny", **{field: "x" * 72_001}
            )
            assert "72001 characters" in message


def test_tokenising_has_few_threads_and_a_limit(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    threads: set[int] = set()
    tokens = AppState.checked_prompt

    def waits(self: AppState, model: lt.Model, prompt: Any) -> Any:
        threads.add(threading.get_ident())
        assert gate.wait(30)
        return tokens(self, model, prompt)

    monkeypatch.setattr(AppState, "checked_prompt", waits)
    with (
        running([tiny_options(tiny_path)], ServerOptions(max_queue=3)) as server,
        ThreadPoolExecutor(20) as pool,
    ):
        n_threads = server.state.threads._places.total_tokens
        asked: list[Any] = []
        for number in range(int(n_threads) + 3):
            asked.append(pool.submit(server.client.post, "/v1/hidden_states", json=body(number)))
            until(lambda: server.state.threads.occupied == len(asked))
        refused = server.client.post("/v1/hidden_states", json=body(99))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/health").status_code == 200
        gate.set()
        # The number admitted: the queue's places, and some that were finished meanwhile.
        codes = [one.result().status_code for one in asked]
        assert set(codes) <= {200, 429}
        assert codes.count(200) >= 3
        assert len(threads) <= n_threads


def body(number: int) -> dict[str, Any]:
    return {"model": "tiny", "input": f"text {number}"}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def taking(budget: Budget, n_bytes: int, hold: asyncio.Event) -> asyncio.Task[None]:
    """A request that takes bytes and keeps them for a while."""

    async def app(scope: Any, _: Any, __: Any) -> None:
        await budget.take(Request(scope), n_bytes)
        await hold.wait()

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    return asyncio.create_task(ResponseEnd(app)({"type": "http"}, nothing, nothing))


def test_memory_is_taken_in_order_and_given_back() -> None:
    async def check() -> None:
        budget = Budget(100, 2)
        holds = [asyncio.Event() for _ in range(4)]
        first = taking(budget, 60, holds[0])
        large = taking(budget, 100, holds[1])
        small = taking(budget, 10, holds[2])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The small one would fit, but the large one came before it.
        assert (budget.free, budget.waiting) == (40, 2)
        with pytest.raises(ApiError) as raised:
            await taking(budget, 1, holds[3])
        assert raised.value.status == 429
        with pytest.raises(ApiError) as raised:
            await taking(budget, 101, holds[3])
        assert raised.value.status == 413
        holds[0].set()
        await first
        await asyncio.sleep(0.01)
        assert (budget.free, budget.waiting) == (0, 1)
        # One that goes away while it waits leaves the others their turn.
        another = taking(budget, 90, holds[3])
        await asyncio.sleep(0.01)
        small.cancel()
        with pytest.raises(asyncio.CancelledError):
            await small
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        await asyncio.sleep(0.01)
        assert (budget.free, budget.waiting) == (10, 0)
        holds[3].set()
        await another
        assert (budget.free, budget.waiting) == (100, 0)

    asyncio.run(check())


@contextlib.contextmanager
def with_memory(path: Path, n_bytes: int) -> Iterator[Running]:
    with running([tiny_options(path)], ServerOptions(max_pending_bytes=n_bytes)) as server:
        yield server
        until(lambda: server.state.budget.free == n_bytes)


def test_answers_share_the_memory(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 100 rows of 64 numbers: 4 bytes each, and as many in the body.
    each = 100 * 64 * 8
    ask = {"input": [5] * 100, "encoding_format": "safetensors", "model": "tiny"}
    held: list[int] = []
    with with_memory(tiny_path, 2 * each) as server, ThreadPoolExecutor(8) as pool:
        worker = server.worker
        extract = type(worker).extract

        async def noting(self: Any, jobs: Any) -> Any:
            held.append(server.state.budget.total - server.state.budget.free)
            await asyncio.sleep(0.02)
            return await extract(self, jobs)

        monkeypatch.setattr(type(worker), "extract", noting)
        found = list(pool.map(lambda _: server.client.post("/v1/hidden_states", json=ask), range(8)))
        assert [one.status_code for one in found] == [200] * 8
        # Two at a time, never more.
        assert set(held) == {each, 2 * each}
        lists = {**ask, "encoding_format": "float"}
        message = server.error("/v1/hidden_states", 413, "invalid_request_error", **lists)
        assert "another encoding_format" in message


def test_memory_of_failures_and_clients_that_leave(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.01)
    with with_memory(tiny_path, 2**24) as server:
        states = {"return_hidden_states": True, "ignore_eos": True, "max_tokens": 500}

        def ask() -> None:
            fields = {"model": "tiny", "prompt": "a", **states}
            httpx.post(f"{server.url}/v1/completions", json=fields, timeout=1)

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            until(lambda: server.state.budget.free < 2**24)
            assert isinstance(asked.exception(), httpx.ReadTimeout)
        until(lambda: server.state.budget.free == 2**24)

        def fails(*_: Any, **__: Any) -> Any:
            raise lt.EngineError("on purpose")

        monkeypatch.setattr(lt.Extractor, "__call__", fails)
        server.error("/v1/hidden_states", 500, "internal_error", **body(1))


def test_options_that_are_none(tiny_path: Path) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"max_queue": 0},
        {"max_length": 0},
        {"max_body_bytes": -1},
        {"api_key": ""},
        {"api_key": "two words"},
        {"api_key": "schlüssel"},
    )
    for options in wrong:
        with pytest.raises(lt.InvalidInputError):
            ServerOptions(**options)
    for sizes in ({"parallel": 0}, {"n_ctx": -1}, {"n_ctx": 3}, {"parallel": 1.5}):
        with pytest.raises(lt.InvalidInputError):
            tiny_options(tiny_path, **sizes)


def test_a_model_without_a_tokenizer_knows_no_texts(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "none.gguf", tokenizer=False)
    with running([tiny_options(path)]) as server:
        ask: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2, "temperature": 0}
        assert server.post("/v1/completions", **ask)["usage"]["completion_tokens"] == 2
        wanting: tuple[dict[str, Any], ...] = ({"stop": "a"}, {"logprobs": 1})
        for more in wanting:
            message = server.error("/v1/completions", 422, "model_error", **ask, **more)
            assert "no tokenizer" in message
        chat: dict[str, Any] = {"model": "tiny", "messages": [USER]}
        assert "/v1/completions" in server.error("/v1/chat/completions", 422, "model_error", **chat)
