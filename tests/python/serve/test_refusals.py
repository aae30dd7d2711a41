"""Refusals of the text endpoints, as OpenAI's own client raises them, and fields that they let pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.generation import EXACT
from support.openai_clients import Client, client_of, slow_down, wait_until_free
from support.servers import Running, running, tiny_options

from llamatap.serve import ServerOptions


@pytest.fixture(scope="module")
def server(tiny_chat_path: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_chat_path, context=EXACT, n_ctx=256)]) as found:
        yield found


def complete(client: Client, **options: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 2, **options})


def chat(client: Client, **options: Any) -> Any:
    messages = [{"role": "user", "content": "a"}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 2, **options}
    )


Endpoint = Callable[..., Any]
both = pytest.mark.parametrize("endpoint", [complete, chat])

#: Fields and values of both endpoints that ask for something not served.
UNSERVED: list[dict[str, Any]] = [
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"5": 1, "05": 2}},
    {"logit_bias": {"5": "1"}},
    {"logit_bias": {str(token): 1 for token in range(1025)}},
    {"logit_bias": [1]},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text", "more": 1}},
    {"echo": 1},
    {"min_tokens": 3},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": True},
    {"skip_special_tokens": False},
    {"include_stop_str_in_output": True},
    {"guided_json": {}},
    {"no_such_field": None},
]
OF_COMPLETIONS: list[dict[str, Any]] = [{"suffix": "end"}, {"best_of": 2}, {"tools": []}]
OF_CHAT: list[dict[str, Any]] = [
    {"echo": True},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}},
    {"audio": {"voice": "x", "format": "wav"}},
    {"modalities": ["text", "audio"]},
    {"reasoning_effort": "high"},
    {"web_search_options": {}},
    {"suffix": ""},
]
HARMLESS: list[dict[str, Any]] = [
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"logit_bias": None, "response_format": None, "echo": None, "user": None},
    {"logit_bias": {}, "response_format": {"type": "text"}, "echo": False, "min_tokens": 0},
    {"skip_special_tokens": True, "stop": None, "n": None, "stream": None, "seed": None},
    {"temperature": None, "top_p": None, "logprobs": None, "stream_options": None},
]
HARMLESS_IN_COMPLETIONS: list[dict[str, Any]] = [
    {"suffix": None, "best_of": None},
    {"suffix": "", "best_of": 1},
    {"best_of": 2, "n": 2},
    {"logit_bias": {"5": -100, "258": 0.5}, "prompt_logprobs": 0, "echo": True},
]
HARMLESS_IN_CHAT: list[dict[str, Any]] = [
    {"tools": None, "tool_choice": None, "functions": None, "audio": None, "parallel_tool_calls": None},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
    {"tool_choice": "auto", "function_call": "none", "functions": []},
]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        *((one, fields) for one in (complete, chat) for fields in UNSERVED),
        *((complete, fields) for fields in OF_COMPLETIONS),
        *((chat, fields) for fields in OF_CHAT),
    ],
)
def test_what_is_not_served_is_named(client: Client, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        endpoint(client, extra_body=fields)
    assert raised.value.type == "invalid_request_error"
    assert str(raised.value.body["message"]).startswith(next(iter(fields)))  # type: ignore[index]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        *((one, fields) for one in (complete, chat) for fields in HARMLESS),
        *((complete, fields) for fields in HARMLESS_IN_COMPLETIONS),
        *((chat, fields) for fields in HARMLESS_IN_CHAT),
    ],
)
def test_what_asks_for_nothing_is_let_pass(
    client: Client, endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    # With a random seed a text could end at once.
    found = endpoint(client, extra_body={"ignore_eos": True, **fields})
    assert found.usage.completion_tokens == 2 * (fields.get("n") or 1)


@both
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "2"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n:"),
        ({"n": 17}, "n:"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [259]}, "stop token"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_k": -2}, "top_k"),
        ({"return_hidden_states": "first"}, "return_hidden_states"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"x": 1}}, r"logit_bias: each key must be a token id in digits, not 'x'"),
        ({"logit_bias": {"1" * 5000: 1}}, r"a token id in digits, not '1{100}'"),
        ({"logit_bias": {"5": 1, "05": 2}}, r"logit_bias: token 5 is named twice"),
        ({"logit_bias": {"259": 1}}, r"logit_bias must be in 0\.\.258, not 259"),
    ],
)
def test_wrong_values(client: Client, endpoint: Endpoint, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        endpoint(client, extra_body=fields)
    if "stream" not in fields:
        # An error found before the first chunk is a status in streams as well.
        with pytest.raises(openai.BadRequestError, match=message):
            endpoint(client, stream=True, extra_body=fields)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        (["a", ""], "empty"),
        ([259], r"0\.\.258"),
        ([[1], [300]], r"0\.\.258"),
        ([1, "a"], "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
    ],
)
def test_wrong_prompts(client: Client, prompt: Any, message: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            complete(client, prompt=prompt, stream=stream)


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_not_there(client: Client, endpoint: Endpoint, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other' here; there are tiny") as raised:
        endpoint(client, model="other", stream=stream)
    assert raised.value.code == "model_not_found"


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_too_long(client: Client, endpoint: Endpoint, stream: bool) -> None:
    long = (
        {"prompt": "x" * 300}
        if endpoint is complete
        else {"messages": [{"role": "user", "content": "x" * 300}]}
    )
    with pytest.raises(openai.BadRequestError, match="256") as raised:
        endpoint(client, stream=stream, **long)
    assert raised.value.code == "context_length_exceeded"
    # One wrong entry among several is enough.
    if endpoint is complete:
        with pytest.raises(openai.BadRequestError):
            complete(client, stream=stream, prompt=["fits", "x" * 300])


def test_a_text_ends_with_the_context(client: Client) -> None:
    answer = complete(client, prompt=[5] * 200, max_tokens=1000, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    # The last token needs no place.
    assert answer.usage.total_tokens in (256, 257)


def test_too_much_for_one_request(tiny_chat_path: Path) -> None:
    limits = ServerOptions(max_inputs=3, max_response_bytes=64 * 4 * 20, max_queue=5)
    with running([tiny_options(tiny_chat_path)], limits) as server, client_of(server) as client:
        assert len(complete(client, prompt=["a"] * 3).choices) == 3
        with pytest.raises(openai.BadRequestError, match="4 texts; this server allows 3"):
            complete(client, prompt=["a", "b"], n=2)
        states = {"return_hidden_states": True}
        assert complete(client, prompt=[[5] * 8, [6] * 8], extra_body=states).usage.total_tokens == 20
        with pytest.raises(openai.APIStatusError, match="the states of 21 tokens") as raised:
            complete(client, prompt=[[5] * 8, [6] * 9], extra_body=states)
        assert raised.value.status_code == 413
        complete(client, prompt=[5] * 100, extra_body={"return_hidden_states": "last"})


def test_keys(tiny_chat_path: Path) -> None:
    with running([tiny_options(tiny_chat_path)], ServerOptions(api_key="sesame")) as server:
        with client_of(server, "sesame") as client:
            assert complete(client).usage.completion_tokens == 2
            assert [one.id for one in client.models.list()] == ["tiny"]
        for key in ("none", "sesam", "sesame2"):
            with client_of(server, key) as client:
                for call in (complete, chat, lambda one: one.models.list()):
                    with pytest.raises(openai.AuthenticationError) as raised:
                        call(client)
                    assert raised.value.code == "invalid_api_key"


def test_a_full_queue(tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.02)
    with (
        running([tiny_options(tiny_chat_path)], ServerOptions(max_queue=2)) as server,
        client_of(server) as client,
    ):
        stream = complete(client, prompt="a", n=2, max_tokens=200, stream=True)
        next(stream)
        for endpoint in (complete, chat):
            with pytest.raises(openai.RateLimitError, match="2 prompts are waiting") as raised:
                endpoint(client)
            assert raised.value.code == "queue_full"
            assert int(raised.value.response.headers["Retry-After"]) >= 1
        # No Retry-After for a request that can never fit.
        with pytest.raises(openai.BadRequestError, match="this server allows 2"):
            complete(client, n=3)
        stream.close()
        wait_until_free(server)
        assert complete(client).usage.completion_tokens == 2
        # A client that waits and tries again, as the real one does by itself, comes in.
        stream = complete(client, prompt="a", n=2, max_tokens=40, stream=True)
        next(stream)
        reader = threading.Thread(target=list, args=(stream,))
        reader.start()
        assert complete(client.with_options(max_retries=5)).usage.completion_tokens == 2
        reader.join()
