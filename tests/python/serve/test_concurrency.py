"""Many clients at once, disconnecting clients, failures in flight, and the end of a server."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.generation import EXACT
from support.numerics import relative
from support.openai_clients import Client, alone, async_client, client_of, slow_down, wait_until_free
from support.servers import Running, running, tiny_options

import llamatap as lt
from llamatap._engine_context import EngineContext
from llamatap.serve.workers.tasks import GenerationTask
from llamatap.serve.workers.text_generator import TextGenerator

#: For each of sixteen clients: a prompt, options of lt.generate, and further fields of its request.
MANY: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        f"{number} prompts " * (1 + number % 5),
        {
            "max_tokens": 8 + 5 * (number % 7),
            "temperature": 0.0 if number % 3 == 0 else 0.5 + number / 20,
            "seed": number,
            "frequency_penalty": 0.5 if number % 4 == 1 else 0.0,
            "top_p": 0.9 if number % 4 == 2 else 1.0,
        },
        {"stream": True} if number % 2 else {"extra_body": {"return_hidden_states": True}},
    )
    for number in range(16)
]


@pytest.fixture
def single(tiny_chat_path: Path) -> Iterator[Running]:
    """A server that generates one text at a time."""
    with running([tiny_options(tiny_chat_path, context=EXACT, parallel=1)]) as found:
        yield found


async def answer(client: Client, number: int) -> tuple[str, Any]:
    """The text of one of the clients, and its states if it asked for any."""
    prompt, options, more = MANY[number]
    if number % 4 < 2:
        found = await client.completions.create(model="tiny", prompt=prompt, **options, **more)
    else:
        messages = [{"role": "user", "content": prompt}]
        found = await client.chat.completions.create(model="tiny", messages=messages, **options, **more)
    if "stream" not in more:
        (choice,) = found.choices
        text = choice.text if number % 4 < 2 else choice.message.content
        return text, choice.hidden_states
    pieces = []
    async for chunk in found:
        (choice,) = chunk.choices
        pieces.append(choice.text if number % 4 < 2 else choice.delta.content or "")
    return "".join(pieces), None


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram", "suffix"])
def test_sixteen_clients_at_once_get_what_each_gets_alone(
    tiny_chat_path: Path, tiny_model: lt.Model, drafter: str | None
) -> None:
    async def all_of_them() -> list[tuple[str, Any]]:
        async with async_client(server) as client:
            return await asyncio.gather(*(answer(client, number) for number in range(16)))

    with running([tiny_options(tiny_chat_path, context=EXACT, parallel=5, drafter=drafter)]) as server:
        found = asyncio.run(all_of_them())
        wait_until_free(server)
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        for (prompt, options, _), (text, states) in zip(MANY, found, strict=True):
            (expected,) = alone(tiny_model, prompt, **options)
            assert text == expected.text
            if states is not None:
                tokens = [*expected.prompt.tolist(), *expected.tokens.tolist()]
                rows = extractor(tokens, layers=["norm"])["norm"]
                of_prompt, *of_tokens = states
                assert relative(np.array([*of_prompt, *of_tokens]), rows) < 1e-4


def long_text(client: Client, **options: Any) -> Any:
    body = {"ignore_eos": True}
    return client.completions.create(
        model="tiny", **{"prompt": "a", "max_tokens": 1500, "temperature": 0, "extra_body": body, **options}
    )


def test_a_stream_that_is_closed_frees_its_place(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.01)
    with client_of(single) as client:
        for n in (1, 3):
            stream = long_text(client, stream=True, n=n)
            for _ in range(5):
                next(stream)
            assert single.worker.waiting == n
            stream.close()
            # 1500 tokens would take 15 seconds.
            wait_until_free(single, 2)
            assert long_text(client, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_requests_that_are_cancelled_free_their_place(
    single: Running, monkeypatch: pytest.MonkeyPatch, stream: bool, chat: bool
) -> None:
    slow_down(monkeypatch, 0.01)

    async def give_up() -> None:
        async with async_client(single) as client:
            if chat:
                messages = [{"role": "user", "content": "a"}]
                request = client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=1500, extra_body={"ignore_eos": True}
                )
            else:
                request = long_text(client)
            # The first text is in flight; all others wait and have received nothing.
            tasks = [asyncio.create_task(request)]
            while single.worker.waiting < 1:
                await asyncio.sleep(0.01)
            tasks += [asyncio.create_task(long_text(client, stream=stream)) for _ in range(3)]
            while single.worker.waiting < 4:
                await asyncio.sleep(0.01)
            for task in (*tasks[1:], tasks[0]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(give_up())
    wait_until_free(single, 2)
    with client_of(single) as client:
        assert long_text(client, max_tokens=3).usage.completion_tokens == 3


def test_a_text_that_waits_streams_after_the_one_before_it(
    single: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.005)

    async def times() -> list[tuple[float, float]]:
        async with async_client(single) as client:

            async def one() -> tuple[float, float]:
                stream = await long_text(client, max_tokens=40, stream=True)
                seen = [time.monotonic() async for _ in stream]
                return seen[0], seen[-1]

            return await asyncio.gather(*(one() for _ in range(3)))

    spans = sorted(asyncio.run(times()))
    # Each goes on for 40 rounds, and the next begins when it ends.
    assert all(last - first > 0.15 for first, last in spans)
    for (_, last), (first, _) in pairwise(spans):
        assert first > last - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_that_fails_is_an_error_of_those_under_way(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    decode = EngineContext.decode
    failing = threading.Event()
    broken: weakref.WeakSet[EngineContext] = weakref.WeakSet()

    def fails_once(context: EngineContext, batch: lt.Batch) -> None:
        time.sleep(0.005)
        if failing.is_set():
            failing.clear()
            broken.add(context)
            raise lt.EngineError("the cause")
        # The engine's own contexts behave so after a failure.
        if context in broken:
            raise lt.EngineError("close this context and make another")
        decode(context, batch)

    monkeypatch.setattr(EngineContext, "decode", fails_once)
    with (
        running([tiny_options(tiny_chat_path, context=EXACT, parallel=2)]) as server,
        client_of(server) as client,
    ):
        text = long_text(client, max_tokens=5).choices[0].text
        if stream:
            found = long_text(client, stream=True)
            assert next(found).choices[0].text != ""
            failing.set()
            with pytest.raises(openai.APIError, match="generation failed: the cause") as raised:
                list(found)
            assert not isinstance(raised.value, openai.APIStatusError)
            assert raised.value.type == "internal_error"
            assert raised.value.code == "generation_failed"
            # An error before the first event is a status.
            failing.set()
            with pytest.raises(openai.InternalServerError, match="the cause"):
                long_text(client, stream=True)
        else:
            # Two texts are in flight, one waits. No client has read anything yet: they restart, one by one.
            whole = long_text(client, max_tokens=100).choices[0].text
            with ThreadPoolExecutor(3) as pool:
                asked = [pool.submit(long_text, client, max_tokens=100) for _ in range(3)]
                while server.worker.waiting < 3:
                    time.sleep(0.001)
                time.sleep(0.05)
                failing.set()
                assert [one.result().choices[0].text for one in asked] == [whole] * 3
            assert not failing.is_set()
            # A request that fails alone gets the error.
            failing.set()
            with pytest.raises(openai.InternalServerError, match="the cause") as status:
                long_text(client, max_tokens=100)
            assert status.value.code == "generation_failed"
        wait_until_free(server)
        assert long_text(client, max_tokens=5).choices[0].text == text


def test_texts_that_failed_beside_others_go_on_together(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, seqs = EngineContext.decode, []

    def fails_on_one(context: EngineContext, batch: lt.Batch) -> None:
        time.sleep(0.002)
        tokens = batch.tokens.tolist()
        seqs.append(len(tokens))
        # Only the prompt that is meant to fail holds this token.
        if 77 in tokens:
            raise lt.EngineError("on purpose")
        decode(context, batch)

    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    prompts = [[5, 6], [7, 77], [8] * 20, [9, 9]]
    with running([tiny_options(tiny_chat_path, context=EXACT, parallel=8)]) as server:
        good = [
            server.post("/v1/completions", prompt=one, **options)["choices"][0]["token_ids"]
            for one in (prompts[0], prompts[2], prompts[3])
        ]
        assert not any(77 in one for one in good)
        monkeypatch.setattr(EngineContext, "decode", fails_on_one)
        with ThreadPoolExecutor(4) as pool:
            gate = threading.Event()
            admit = TextGenerator._admit

            def admits(generator: TextGenerator, task: GenerationTask) -> None:
                # All are admitted at the same time.
                gate.wait(10)
                admit(generator, task)

            monkeypatch.setattr(TextGenerator, "_admit", admits)
            asked = [
                pool.submit(server.client.post, "/v1/completions", json={**options, "prompt": one})
                for one in prompts
            ]
            while server.worker.waiting < 4:
                time.sleep(0.001)
            gate.set()
            found = [one.result() for one in asked]
    assert [one.status_code for one in found] == [200, 500, 200, 200]
    assert [one.json()["choices"][0]["token_ids"] for one in found if one.status_code == 200] == good
    # The three went on together, not one after the other.
    assert sum(n == 3 for n in seqs) > 20


def test_a_thread_that_fails_tells_all_and_goes_on(single: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = single.states(input="a")
    turn = type(single.worker)._turn
    failing = threading.Event()

    def fails(worker: Any) -> None:
        if not failing.is_set():
            while worker.waiting < 3:
                time.sleep(0.001)
            failing.set()
            raise RuntimeError("nobody thought of this")
        turn(worker)

    monkeypatch.setattr(type(single.worker), "_turn", fails)
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(single.client.post, f"/v1/{path}", json={"model": "tiny", **fields})
            for path, fields in (
                ("hidden_states", {"input": "a"}),
                ("completions", {"prompt": "a"}),
                ("completions", {"prompt": "b", "stream": True}),
            )
        ]
        assert [one.result().status_code for one in asked] == [500, 500, 500]
    assert single.states(input="a") == expected
    assert single.post("/v1/completions", model="tiny", prompt="a", max_tokens=2)["choices"]


class Watched:
    """Extraction whose batches each wait until they are released or cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Semaphore(0)
        #: The outcome of each batch.
        self.ends: list[str] = []
        extract = lt.Extractor.__call__

        def watched(extractor: lt.Extractor, *inputs: Any, cancelled: Any, **options: Any) -> Any:
            self.begun.set()
            deadline = time.monotonic() + 20
            while not (self.go_on.acquire(timeout=0.01) or cancelled()):
                assert time.monotonic() < deadline
            try:
                found = extract(extractor, *inputs, cancelled=cancelled, **options)
            except lt.CancelledError:
                self.ends.append("cancelled")
                raise
            self.ends.append("whole")
            return found

        monkeypatch.setattr(lt.Extractor, "__call__", watched)


def test_a_client_that_leaves_ends_the_pass_that_is_for_it_alone(
    single: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = single.states(input="a")
    watched = Watched(monkeypatch)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=single.url) as client:
            body = {"model": "tiny", "input": ["a", "b"]}
            task = asyncio.create_task(client.post("/v1/hidden_states", json=body))
            while not watched.begun.is_set():
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    deadline = time.monotonic() + 20
    while not watched.ends:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watched.ends == ["cancelled"]
    watched.go_on.release()
    assert single.states(input="a") == expected
    assert watched.ends == ["cancelled", "whole"]


def test_a_client_that_leaves_takes_nothing_from_others_of_its_batch(
    single: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = single.states(input="b")
    watched = Watched(monkeypatch)

    async def ask() -> Any:
        async with httpx.AsyncClient(base_url=single.url, timeout=30) as client:

            def post(text: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(
                    client.post("/v1/hidden_states", json={"model": "tiny", "input": text})
                )

            first = post("x")
            while not watched.begun.is_set():
                await asyncio.sleep(0.01)
            # While that one is under way both wait, for one batch.
            leaving, staying = post("a"), post("b")
            while single.worker.waiting < 2:
                await asyncio.sleep(0.01)
            watched.begun.clear()
            watched.go_on.release()
            await first
            while not watched.begun.is_set():
                await asyncio.sleep(0.01)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.sleep(0.3)
            watched.go_on.release()
            return (await staying).json()

    assert asyncio.run(ask()) == expected
    assert watched.ends == ["whole", "whole"]


def test_an_extraction_that_fails_leaves_others_alone(
    single: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = lt.Extractor.__call__
    broken: list[lt.Context] = []

    def fails(extractor: lt.Extractor, *inputs: Any, **options: Any) -> Any:
        found = extract(extractor, *inputs, **options)
        assert extractor._context is not None
        if not broken:
            broken.append(extractor._context)
        if extractor._context in broken:
            raise lt.EngineError("the cause")
        return found

    expected = single.states(input="a")
    monkeypatch.setattr(lt.Extractor, "__call__", fails)
    single.worker.extractor.close()
    # It is retried once by itself, in another context.
    assert single.states(input="a") == expected
    assert len(broken) == 1


def test_a_drafter_that_fails_is_not_the_requests_fault(
    tiny_chat_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*_: Any) -> Any:
        raise lt.InvalidInputError("no draft")

    with (
        running([tiny_options(tiny_chat_path, context=EXACT, drafter="ngram")]) as server,
        client_of(server) as client,
    ):
        with monkeypatch.context() as broken:
            broken.setattr(lt.NGramDrafter, "draft", bad)
            with pytest.raises(openai.InternalServerError, match="no draft"):
                long_text(client, max_tokens=5)
        assert long_text(client, max_tokens=5).usage.completion_tokens == 5


@pytest.mark.slow
def test_the_event_loop_is_free_while_much_is_computed(tiny_chat_path: Path) -> None:
    with (
        running([tiny_options(tiny_chat_path, n_ctx=4096, parallel=2)]) as server,
        client_of(server) as client,
    ):
        threads = [
            threading.Thread(target=long_text, args=(client,), kwargs={"max_tokens": 1000, "n": 2}),
            threading.Thread(target=server.states, kwargs={"input": [[5] * 2000] * 8, "pooling": "mean"}),
        ]
        for thread in threads:
            thread.start()
        slowest, n_asked = 0.0, 0
        while any(thread.is_alive() for thread in threads):
            started = time.monotonic()
            assert server.client.get("/health").json() == {"status": "ok"}
            slowest = max(slowest, time.monotonic() - started)
            n_asked += 1
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert n_asked > 10
        assert slowest < 0.5


def test_texts_under_way_are_finished_when_the_server_ends(
    tiny_chat_path: Path, tiny_model: lt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(tiny_model, "a", max_tokens=150, ignore_eos=True)[0].text
    slow_down(monkeypatch, 0.005)
    texts: dict[int, str] = {}

    def read(number: int, stream: Any) -> None:
        texts[number] = "".join(chunk.choices[0].text for chunk in stream)

    def whole(number: int) -> None:
        texts[number] = long_text(client, max_tokens=150).choices[0].text

    with (
        running([tiny_options(tiny_chat_path, context=EXACT, parallel=1)]) as server,
        client_of(server) as client,
    ):
        stream = long_text(client, max_tokens=150, stream=True)
        # The second one waits for the first.
        threads = [threading.Thread(target=read, args=(0, stream)), threading.Thread(target=whole, args=(1,))]
        for thread in threads:
            thread.start()
        while server.worker.waiting < 2:
            time.sleep(0.001)
        started = time.monotonic()
        # The client ends after the server.
        ending = threading.Thread(target=server.stop)
        ending.start()
        for thread in threads:
            thread.join()
        ending.join()
    assert time.monotonic() - started > 1
    assert texts == {0: expected, 1: expected}
