"""Random requests by the OpenAPI schema: the server never answers with a failure of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from support.servers import Running, running, tiny_options


@pytest.fixture(scope="module")
def server(tiny_chat_path: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_chat_path)]) as found:
        yield found


OPERATIONS = [
    ("POST", "/v1/hidden_states"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_makes_the_server_fail(server: Running, method: str, path: str) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]
    answers: Counter[int] = Counter()

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            # A name that is made up ends at the first check, and a long text takes long.
            case.body |= {"model": "tiny", "max_tokens": 2} if "completions" in path else {"model": "tiny"}
            # So does an invented role.
            messages = case.body.get("messages")
            for one in messages if isinstance(messages, list) else ():
                if isinstance(one, dict) and isinstance(one.get("role"), str):
                    one["role"] = "user"
        # Its status, type and shape are those that the description promises, too. What is valid by the schema
        # can be refused all the same: a layer that this model has not, an empty text.
        status = case.call_and_validate(excluded_checks=[positive_data_acceptance]).status_code
        answers[status] += 1
        assert status < 500

    check()
    # Not all of them end at the same check. Every text has tokens.
    assert method == "GET" or ({200} if path == "/tokenize" else {200, 400}) <= set(answers)


def test_every_operation_is_tried(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(
        OPERATIONS
    )


def test_the_description_names_what_is_served(server: Running) -> None:
    fields = server.client.get("/openapi.json").json()["components"]["schemas"]["HiddenStatesRequest"]
    assert {"input", "model", "layer", "max_length", "return_attention_mask", "encoding_format"} <= set(
        fields["properties"]
    )
    assert fields["required"] == ["model"]
