"""Refusals of a server: too large, too many, or from an unknown client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support import drafting
from support.numerics import computes_with_nan
from support.servers import Gate, running, tiny_options, wait_until
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.extraction.extractor import Extractor
from llamatap.serve import ModelOptions, ServerOptions, create_app


def test_bodies_beyond_the_limit(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(max_body_bytes=1000)) as server:
        server.error("/v1/hidden_states", 413, "invalid_request_error", model="tiny", input="a" * 2000)

        def chunks() -> Iterator[bytes]:
            yield b'{"model": "tiny", "input": "'
            for _ in range(100):
                yield b"a" * 100
            yield b'"}'

        # Without a length that says it beforehand.
        headers = {"Content-Type": "application/json"}
        found = server.client.post("/v1/hidden_states", content=chunks(), headers=headers)
        assert found.status_code == 413
        assert found.json()["error"]["code"] == "body_too_large"
        assert server.states(input="a" * 900)["shape"][0] == 512


def test_states_beyond_the_limit(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(max_response_bytes=64 * 4 * 30)) as server:
        assert server.states(input=[5] * 30)["shape"] == [30, 64]
        message = server.error(
            "/v1/hidden_states", 413, "invalid_request_error", model="tiny", input=[5] * 31
        )
        assert "7936 bytes" in message
        assert server.states(input=[5] * 31, dtype="float16")["shape"] == [31, 64]
        assert server.states(input=[5] * 400, pooling="mean")["shape"] == [64]
        server.error(
            "/v1/hidden_states", 413, "invalid_request_error", model="tiny", input=[5] * 16, layers=[0, 1]
        )


def test_more_inputs_than_the_limit(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(max_inputs=3)) as server:
        assert len(server.states(input=["a", "b", "c"])["data"]) == 3
        message = server.error(
            "/v1/hidden_states", 400, "invalid_request_error", model="tiny", input=["a"] * 4
        )
        assert "allows 3" in message


def test_a_full_queue_says_when_to_come_back(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with (
        running([tiny_options(tiny_path)], ServerOptions(max_queue=4)) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        first = pool.submit(server.states, input="first")
        assert gate.entered.wait(10)
        waiting = [pool.submit(server.states, input=f"text {i}") for i in range(4)]
        wait_until(lambda: server.worker.waiting == 4)
        refused = server.client.post("/v1/hidden_states", json={"model": "tiny", "input": "too many"})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # The event loop does not wait for the engine.
        assert server.client.get("/health", timeout=1).json() == {"status": "ok"}
        gate.open.set()
        for one in [first, *waiting]:
            assert one.result()["shape"][1] == 64
        # The waiting requests shared a batch.
        assert gate.calls == [1, 4]
        assert server.states(input="again")["shape"][1] == 64


def test_a_batch_goes_no_deeper_than_each_of_it_asks(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with running([tiny_options(tiny_path)]) as server, ThreadPoolExecutor(12) as pool:
        first = pool.submit(server.states, input="first")
        assert gate.entered.wait(10)
        waiting = []
        for i, (layers, dtype) in enumerate(
            [([1], "float32"), ([3, 0], "float32"), ([0, 1], "float32"), ([3], "float32"), ([3], "float16")]
        ):
            waiting.append(pool.submit(server.states, input=[5] * 7, layers=layers, dtype=dtype))
            wait_until(lambda n=i: server.worker.waiting == n + 1)
        gate.open.set()
        shapes = [one.result()["shape"] for one in waiting]
        assert shapes == [[7, 1, 64], [7, 2, 64], [7, 2, 64], [7, 1, 64], [7, 1, 64]]
        assert first.result()["shape"] == [6, 64]
        assert gate.calls == [1, 2, 2, 1]


def test_a_client_that_goes_away_is_not_computed(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with running([tiny_options(tiny_path)]) as server, ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.states, input="first")
        assert gate.entered.wait(10)

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=server.url) as client:
                body = {"model": "tiny", "input": ["leaves", "too"]}
                task = asyncio.create_task(client.post("/v1/hidden_states", json=body))
                while server.worker.waiting < 2:
                    await asyncio.sleep(0.01)
                task.cancel()

        asyncio.run(leave())
        tasks = list(server.worker.extractor.queue)
        wait_until(lambda: all(task.result.cancelled() for task in tasks))
        gate.open.set()
        assert first.result()["shape"][1] == 64
        assert server.states(input="next")["shape"][1] == 64
        assert gate.calls == [1, 1]


def test_one_that_fails_does_not_stop_others(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Extractor.__call__
    started, proceed = threading.Event(), threading.Event()

    def failing(extractor: Extractor, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if any(len(one) == 1 for one in inputs):
            started.set()
            assert proceed.wait(20)
        if any(list(one) == [66, 66] for one in inputs):
            raise lt.EngineError("the engine fails on purpose")
        return original(extractor, inputs, *arguments, **options)

    monkeypatch.setattr(Extractor, "__call__", failing)
    with running([tiny_options(tiny_path)]) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.states, input=[5])
        assert started.wait(10)
        good = [pool.submit(server.states, input=[i, 6, 7]) for i in range(3, 6)]
        bad = pool.submit(
            server.error, "/v1/hidden_states", 500, "internal_error", model="tiny", input=[66, 66]
        )
        wait_until(lambda: server.worker.waiting == 4)
        proceed.set()
        assert "on purpose" in bad.result()
        for one in [first, *good]:
            assert one.result()["shape"][1] == 64


def test_an_api_key(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(api_key="s3cret")) as server:
        body = {"model": "tiny", "input": "a"}
        assert server.client.post("/v1/hidden_states", json=body).status_code == 200
        for header in (
            {},
            {"Authorization": "Bearer s3cre"},
            {"Authorization": "s3cret"},
            {"X-Api-Key": "s3cret"},
        ):
            for method, path in (("POST", "/v1/hidden_states"), ("GET", "/v1/models"), ("GET", "/metrics")):
                found = httpx.request(method, server.url + path, json=body, headers=header)
                assert found.status_code == 401
                assert found.json()["error"]["type"] == "authentication_error"
                assert found.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/").status_code == 200


def test_metrics(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)]) as server:
        server.states(input=[5] * 7)
        server.error("/v1/hidden_states", 404, "model_not_found", model="no", input="a")
        server.client.get("/made/up/path")
        lines = server.client.get("/metrics").text.splitlines()
        assert 'llamatap_requests_total{path="/v1/hidden_states",status="200"} 1.0' in lines
        assert 'llamatap_requests_total{path="/v1/hidden_states",status="404"} 1.0' in lines
        assert 'llamatap_requests_total{path="other",status="404"} 1.0' in lines
        assert 'llamatap_tokens_total{kind="extracted",model="tiny"} 7.0' in lines
        assert 'llamatap_queue_prompts{model="tiny"} 0.0' in lines
        assert 'llamatap_request_seconds_count{path="/v1/hidden_states"} 2.0' in lines


def test_models_that_cannot_be_served(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(lt.InvalidInputError, match="no model"):
        create_app([])
    with pytest.raises(lt.InvalidInputError, match="its own name"):
        create_app([tiny_options(tiny_path), tiny_options(tiny_path)])
    with pytest.raises(lt.ModelNotFoundError):
        create_app([ModelOptions(name="a", path=tmp_path / "none.gguf")])
    with pytest.raises(lt.ModelNotFoundError):
        create_app([tiny_options(tiny_path, drafter=str(tmp_path / "none.gguf"))])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_drafter_is_no_model_to_serve(tiny_path: Path, tmp_path: Path, kind: str) -> None:
    path = drafting.PAIRS[kind](tmp_path).draft
    assert path is not None
    with pytest.raises(
        lt.UnsupportedError, match=f"{path.name} cannot be served: {kind}: .* no language model"
    ):
        create_app([tiny_options(tiny_path), ModelOptions(name="draft", path=path)])


def test_wrong_options_of_contexts_are_told_at_the_start(tiny_path: Path) -> None:
    for context in ({"type_k": "f17"}, {"type_v": "q8_0", "flash_attn": False}):
        with pytest.raises(lt.Error, match="cannot be served"):
            create_app([tiny_options(tiny_path, context=context)])


@computes_with_nan
def test_a_text_whose_logits_are_no_numbers_ends_alone(tmp_path: Path, tiny_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][10] = np.nan
    path = tiny.write(tmp_path / "nan.gguf")
    prompts = [[5, 6, 7], [5, 10, 7], [8] * 20, [10], [9, 9]]
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    with running([tiny_options(tiny_path)]) as server:
        expected = [
            server.post("/v1/completions", prompt=one, **options)["choices"][0]["token_ids"]
            for one in prompts
        ]
    with running([tiny_options(path)]) as server, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = list(
                pool.map(
                    lambda one: server.client.post("/v1/completions", json={**options, "prompt": one}),
                    prompts,
                )
            )
            assert [one.status_code for one in found] == [200, 422, 200, 422, 200]
            for i in (0, 2, 4):
                assert found[i].json()["choices"][0]["token_ids"] == expected[i]
            assert "NaN" in found[1].json()["error"]["message"]
