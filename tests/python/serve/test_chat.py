"""``/v1/chat/completions`` as OpenAI's own client uses it: the file's chat template, then lt.generate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.generation import EXACT
from support.numerics import relative
from support.openai_clients import Client, alone, async_client, client_of, logprobs_by_hand
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama

import llamatap as lt

#: Each message in marks of its role; ends of lines, a variable, and a role that it refuses.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if loud %}LOUD {% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools, please') }}{% endif %}"
    "[{{ message.role }}]"
    "{% if trimmed %}{{ message.content | trim }}{% else %}{{ message.content }}{% endif %}"
    "[/{{ message.role }}]\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts"}]},
]
#: The template rendered by hand; <s> is the BOS token.
RENDERED = (
    "<s>[system]Be brief.[/system]\n[user]Hello![/user]\n[assistant]Hi.[/assistant]\n"
    "[user]Two\nparts[/user]\n"
)


@pytest.fixture(scope="module")
def served_path(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("chat") / "chat.gguf", chat_template=TEMPLATE)


def create(client: Client, messages: Any = TALK, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def prompt_of(answer: Any, model: lt.Model) -> str:
    """The text that a conversation became, from the ids of its tokens; this tokenizer's blanks are blocks."""
    data = b"".join(model.token_bytes(token) for token in answer.prompt_token_ids)
    return data.decode().replace("\N{LOWER ONE EIGHTH BLOCK}", " ")


def joined(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        ({"temperature": 0}, {}),
        ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
        (
            {"temperature": 0.7, "seed": 1, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.02}},
            {"temperature": 0.7, "seed": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        ),
        ({"temperature": 0, "presence_penalty": 1.0}, {"presence_penalty": 1.0}),
    ],
)
def test_the_answer_is_what_generate_says(
    client: Client, tiny_model: lt.Model, request_: dict[str, Any], options: dict[str, Any]
) -> None:
    (expected,) = alone(tiny_model, f"{RENDERED}[assistant]", max_tokens=24, **options)
    answer = create(client, max_completion_tokens=24, **request_)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == len(expected.tokens)

    first, *chunks = create(client, max_tokens=24, stream=True, **request_)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.object == "chat.completion.chunk"
    assert joined(chunks) == {0: expected.text}
    assert all(chunk.choices[0].delta.role is None for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, expected.finish_reason]
    assert chunks[-1].choices[0].delta.content is None


@pytest.mark.slow
def test_max_completion_tokens_goes_first(client: Client, server: Running) -> None:
    answer = create(client, max_completion_tokens=3, max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3
    # Without either: the text's share of the context, or more of them after a long prompt.
    assert server.worker.limits.text_share == 256
    for length, total in ((100, 256), (191, 256), (192, 512), (256, 512), (700, 768), (2000, 2048)):
        talk = [{"role": "user", "content": "x" * (length - len("<[user][/user]\n[assistant]"))}]
        answer = create(client, talk, temperature=0, extra_body={"ignore_eos": True})
        assert answer.usage.prompt_tokens == length
        assert answer.usage.total_tokens == total


def test_the_async_client_and_several_texts(server: Running, tiny_model: lt.Model) -> None:
    expected = alone(
        tiny_model, [f"{RENDERED}[assistant]"] * 3, max_tokens=10, temperature=1.0, seed=4, stop="\n"
    )
    options: dict[str, Any] = {"n": 3, "max_tokens": 10, "seed": 4, "stop": "\n"}

    async def both() -> tuple[Any, list[Any]]:
        async with async_client(server) as client:
            whole = await create(client, **options)
            stream = await create(client, stream=True, stream_options={"include_usage": True}, **options)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(both())
    assert [one.message.content for one in whole.choices] == [one.text for one in expected]
    assert joined(chunks) == {i: one.text for i, one in enumerate(expected)}
    assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant"] * 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == len(expected[0].prompt)


@pytest.mark.parametrize(
    ("body", "rendered"),
    [
        ({}, f"{RENDERED}[assistant]"),
        ({"add_generation_prompt": False}, RENDERED),
        ({"chat_template_kwargs": {"loud": True}}, f"<s>LOUD {RENDERED[3:]}[assistant]"),
        ({"chat_template_kwargs": {}}, f"{RENDERED}[assistant]"),
    ],
)
def test_the_template_is_filled(
    client: Client, tiny_model: lt.Model, body: dict[str, Any], rendered: str
) -> None:
    # The template brings a BOS token, and the tokenizer adds none.
    answer = create(client, max_tokens=1, extra_body={"return_token_ids": True, **body})
    assert answer.prompt_token_ids.count(1) == 1
    assert prompt_of(answer, tiny_model) == rendered


@pytest.mark.parametrize(
    ("content", "end", "trimmed"),
    [
        ("It begins", "It begins", False),
        # Also in the marks after it, and in the messages before.
        ("assistant", "assistant", False),
        ("a", "a", False),
        ("", "", False),
        (" both sides ", " both sides ", False),
        (" both sides ", "both sides", True),
        ([{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}], "in\nparts", False),
    ],
)
def test_the_last_message_is_continued(
    client: Client, tiny_model: lt.Model, content: Any, end: str, trimmed: bool
) -> None:
    body = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "return_token_ids": True,
        "chat_template_kwargs": {"trimmed": trimmed},
    }
    talk = [TALK[0], {"role": "assistant", "content": content}]
    answer = create(client, talk, max_tokens=8, temperature=0, extra_body=body)
    rendered = f"<s>[system]Be brief.[/system]\n[assistant]{end}"
    assert prompt_of(answer, tiny_model) == rendered
    (expected,) = alone(tiny_model, rendered, max_tokens=8)
    assert answer.choices[0].message.content == expected.text


def test_what_cannot_be_continued(client: Client, tiny: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        create(client, extra_body={"continue_final_message": True})
    path = tiny.write(tmp_path / "blind.gguf", chat_template="{{ messages[0].content }}")
    body = {"continue_final_message": True, "add_generation_prompt": False}
    with running([tiny_options(path)]) as server, client_of(server) as blind:
        with pytest.raises(openai.BadRequestError, match="does not write the last message"):
            create(blind, extra_body=body)
        create(blind, TALK[:1], max_tokens=1, extra_body=body)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "template", "self"])
def test_variables_of_the_template_replace_no_field(client: Client, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"cannot hold {name}"):
        create(client, extra_body={"chat_template_kwargs": {name: "x"}})


def test_the_history_of_a_call_as_clients_send_it(
    tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path
) -> None:
    """Contents that are null beside calls, and arguments in JSON, by a template that takes neither."""
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% for call in m.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments['city'] }}){% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Oslo"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Sun?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]
    path = tiny.write(tmp_path / "calls.gguf", chat_template=template)
    with running([tiny_options(path)]) as server, client_of(server) as client:
        for history in (messages, [messages[0], {**messages[1], "content": ""}, messages[2]]):
            answer = create(client, history, max_tokens=1, extra_body={"return_token_ids": True})
            assert prompt_of(answer, tiny_model) == "<s>[user]Sun?[assistant]sky(Oslo)[tool]Rain."
        with pytest.raises(openai.BadRequestError, match="message 1 is empty"):
            create(client, [messages[0], {"role": "assistant", "content": None}])


def test_templates_that_fail(client: Client, tiny_path: Path, tiny: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="no tools, please"):
        create(client, [{"role": "tool", "content": "5", "tool_call_id": "1"}])
    path = tiny.write(tmp_path / "broken.gguf", chat_template="{{ messages[0].content")
    failed = pytest.raises(openai.BadRequestError, match="chat template failed")
    with running([tiny_options(path)]) as server, client_of(server) as broken, failed:
        create(broken)
    with running([tiny_options(tiny_path)]) as server, client_of(server) as without:
        with pytest.raises(openai.UnprocessableEntityError, match="no chat template"):
            create(without)
        with pytest.raises(openai.UnprocessableEntityError, match="no chat template"):
            create(without, stream=True)


@pytest.mark.parametrize("count", [None, 0, 4])
def test_logprobs(client: Client, tiny_model: lt.Model, count: int | None) -> None:
    (expected,) = alone(tiny_model, f"{RENDERED}[assistant]", max_tokens=10, temperature=1.0, seed=2)
    options: dict[str, Any] = {"max_tokens": 10, "seed": 2, "logprobs": True}
    if count is not None:
        options["top_logprobs"] = count
    found = create(client, **options).choices[0].logprobs.content
    tokens = expected.tokens.tolist()
    by_hand = logprobs_by_hand(tiny_model, expected.prompt.tolist(), tokens)
    for token, one, values in zip(tokens, found, by_hand, strict=True):
        data = tiny_model.token_bytes(token)
        assert bytes(one.bytes) == data
        assert one.token == data.decode(errors="replace")
        assert one.logprob == pytest.approx(values[token], abs=1e-4)
        best = np.argsort(-values)[: count or 0].tolist()
        assert [bytes(top.bytes) for top in one.top_logprobs] == [
            tiny_model.token_bytes(token) for token in best
        ]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(values[best].tolist(), abs=1e-4)
    streamed = [
        one
        for chunk in create(client, stream=True, **options)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == found
    assert create(client, max_tokens=2).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        create(client, top_logprobs=2)


def test_token_ids(client: Client, tiny_model: lt.Model) -> None:
    expected = alone(tiny_model, [f"{RENDERED}[assistant]"] * 2, max_tokens=9, temperature=1.0, seed=5)
    options: dict[str, Any] = {"n": 2, "max_tokens": 9, "seed": 5}
    options["extra_body"] = {"return_token_ids": True}
    answer = create(client, **options)
    assert answer.prompt_token_ids == expected[0].prompt.tolist()
    assert [one.token_ids for one in answer.choices] == [one.tokens.tolist() for one in expected]
    first, *chunks = create(client, stream=True, **options)
    assert first.prompt_token_ids == expected[0].prompt.tolist()
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks)
    ids: list[list[int]] = [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            ids[choice.index] += getattr(choice, "token_ids", [])
    assert ids == [one.tokens.tolist() for one in expected]


@pytest.mark.parametrize(("layer", "own"), [(None, "norm"), (-2, 3), (1, 1)])
def test_hidden_states(client: Client, tiny_model: lt.Model, layer: int | None, own: lt.LayerId) -> None:
    (expected,) = alone(tiny_model, f"{RENDERED}[assistant]", max_tokens=6)
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        rows = extractor([*expected.prompt.tolist(), *expected.tokens.tolist()], layers=[own])[own]
    more = {} if layer is None else {"layer": layer}
    for kind in (True, "last"):
        body = {"return_hidden_states": kind, **more}
        (choice,) = create(client, max_tokens=6, temperature=0, extra_body=body).choices
        assert choice.message.content == expected.text
        if kind == "last":
            assert relative(np.array(choice.hidden_states), rows[-1]) < 1e-5
        else:
            of_prompt, *of_tokens = choice.hidden_states
            assert np.shape(of_prompt) == (len(expected.prompt), 64)
            assert np.shape(of_tokens) == (6, 64)
            assert relative(np.array([*of_prompt, *of_tokens]), rows) < 1e-5


@pytest.mark.parametrize("states", [True, "last"])
def test_states_with_a_stream_or_several_texts_are_refused(client: Client, states: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="POST /v1/hidden_states"):
        create(client, stream=True, extra_body={"return_hidden_states": states})
    with pytest.raises(openai.BadRequestError, match="a request for each text, with its own seed"):
        create(client, n=2, extra_body={"return_hidden_states": states})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ([{"content": "no role"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content: "),
        ("Hello!", "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            r"400 - messages\[0\]\.content\[0\]\.image_url is not a field of this request",
        ),
    ],
)
def test_messages_that_are_none(client: Client, messages: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(client, messages)


def test_roles(tiny: TinyLlama, tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'ipython' %}!{% endif %}{{ m.content }}{% endfor %}"
    path = tiny.write(tmp_path / "roles.gguf", chat_template=template)
    with running([tiny_options(path)]) as server:
        for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython"):
            body = {"model": "tiny", "messages": [{"role": role, "content": "a"}], "max_tokens": 1}
            assert server.client.post("/v1/chat/completions", json=body).status_code == 200
        for role in ("wizard", "User", "", "model"):
            found = server.error(
                "/v1/chat/completions",
                400,
                "invalid_request_error",
                model="tiny",
                messages=[{"role": "user", "content": "a"}, {"role": role, "content": "a"}],
            )
            assert found.startswith(
                f"messages[1].role: there is no role {role!r}; known are system, developer, user"
            )
