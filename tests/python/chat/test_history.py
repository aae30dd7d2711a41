"""Histories of tool calls as clients send them, by the chat templates that the engine's sources bring.

The content of a call may be null, missing or empty, its arguments a mapping or JSON. What is said is told by
words that no template has.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from support.paths import ENGINE_MODELS

import llamatap as lt
from llamatap.chat import template as chat_templates

TEMPLATES = ENGINE_MODELS / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

ARGUMENTS = {"argone": "valorux"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "fetchum",
            "description": "describo",
            "parameters": {
                "type": "object",
                "properties": {"argone": {"type": "string", "description": "detailo"}},
                "required": [],
            },
        },
    }
]
MISSING = object()

# These write no calls, whatever their form.
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
#: Templates that refuse every call, and their messages.
REFUSE = {
    "Kimi-K2-Instruct": "append",
    "Kimi-K2-Thinking": "append",
    "fireworks-ai-llama-3-firefunction-v2": "functions",
    "google-gemma-2-2b-it": "must alternate",
    "llama-cpp-deepseek-r1": "generator",
}


def conversation(content: Any, arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "fetchum", "arguments": arguments}
    call: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "id": "123456781", "function": function}],
    }
    if content is not MISSING:
        call["content"] = content
    return [
        {"role": "user", "content": "quarn"},
        call,
        {"role": "tool", "tool_call_id": "123456781", "name": "fetchum", "content": "resulk"},
        {"role": "assistant", "content": "drostic"},
    ]


def rendered(name: str, messages: list[dict[str, Any]]) -> str:
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    # The date does not matter.
    fixed = {"bos_token": "<s>", "eos_token": "</s>", "strftime_now": lambda format_: "then"}
    return chat_templates.render(template, messages, tools=TOOLS, add_generation_prompt=False, **fixed)


@pytest.mark.sampled(7)
@pytest.mark.skipif(not NAMES, reason="the templates are not there; `make test` fetches them")
@pytest.mark.parametrize("name", NAMES)
def test_all_forms_of_a_call_are_written_alike(name: str) -> None:
    forms = itertools.product((None, MISSING, ""), (ARGUMENTS, json.dumps(ARGUMENTS)))
    if name in REFUSE:
        for form in forms:
            with pytest.raises(lt.InvalidInputError, match=REFUSE[name]):
                rendered(name, conversation(*form))
        return
    before = rendered(name, conversation("", ARGUMENTS))
    texts = {rendered(name, conversation(*form)) for form in forms}
    # Some write JSON as it is given and a mapping in JSON of their own: blanks may differ.
    assert len({re.sub(r"\s", "", text) for text in texts}) == 1
    for text in texts:
        assert "drostic" in text
        assert ("valorux" in text) == (name not in NO_CALLS)
        # A string within JSON, and Python's word for null.
        assert '\\"argone' not in text
        assert "None" not in text[text.index("quarn") :]
    assert before in texts


@pytest.mark.parametrize("content", [None, MISSING])
@pytest.mark.parametrize("more", [{"reasoning_content": "ponderl"}, {"function_call": {"name": "fetchum"}}])
def test_what_is_said_elsewhere_needs_no_content(content: Any, more: dict[str, Any]) -> None:
    message = {"role": "assistant", **more} | ({} if content is MISSING else {"content": content})
    template = "{% for m in messages %}[{{ m.role + m.content }}{{ m.reasoning_content }}]{% endfor %}"
    found = chat_templates.render(template, [{"role": "user", "content": "quarn"}, message])
    assert found == f"[userquarn][assistant{more.get('reasoning_content', '')}]"


def test_arguments_that_are_no_json_stay() -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}."
        "{% endfor %}{% endfor %}"
    )
    assert chat_templates.render(template, conversation(None, '{"argone": 5}')) == "argone=5."
    # Clients send this for no arguments.
    assert chat_templates.render(template, conversation(None, "")) == "."
    for broken in ('{"argone": ', "[1]", "5"):
        with pytest.raises(lt.InvalidInputError, match="chat template failed"):
            chat_templates.render(template, conversation(None, broken))


def test_messages_that_say_nothing() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with pytest.raises(lt.InvalidInputError, match="messages is empty: give at least one"):
        chat_templates.render(template, [])
    with pytest.raises(lt.InvalidInputError, match="messages is empty"):
        chat_templates.render("Hello", ())
    for role, nothing in itertools.product(("user", "assistant", "system"), ({}, {"content": None})):
        messages: list[Any] = [
            {"role": "user", "content": "quarn"},
            {"role": role, "name": "Ann", **nothing},
        ]
        with pytest.raises(lt.InvalidInputError, match="message 1 is empty: expected content"):
            chat_templates.render(template, messages)
    assert chat_templates.render(template, [{"role": "user", "content": ""}]) == "user: "
    # Templates may read fields of their own.
    assert chat_templates.render("{{ messages[0].picture }}", [{"role": "user", "picture": "cat"}]) == "cat"


def test_what_is_given_is_not_changed() -> None:
    messages = conversation(None, json.dumps(ARGUMENTS))
    copy = json.loads(json.dumps(messages))
    chat_templates.render("{{ messages[1].tool_calls[0].function.arguments.argone }}", messages)
    assert messages == copy


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        -1,
        float("nan"),
        b"1",
        {"function": {"name": "f"}},
        [5],
        [{"function": 5}],
        [{}],
        np.array([1, 2]),
    ],
    ids=repr,
)
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    for content in (None, "", "Yes."):
        said = {"role": "assistant", "content": content, "tool_calls": calls}
        with pytest.raises(lt.InvalidInputError, match="message 1: tool_calls must be a list of calls"):
            chat_templates.messages_for(template, [*messages, said])
    single = {"role": "assistant", "content": None, "function_call": calls}
    if not isinstance(calls, dict):
        with pytest.raises(lt.InvalidInputError, match="message 1: function_call must be"):
            chat_templates.messages_for(template, [*messages, single])


@pytest.mark.parametrize("calls", [None, [], (), ""], ids=repr)
def test_no_calls_are_none(calls: Any) -> None:
    message = {"role": "assistant", "content": "Yes.", "tool_calls": calls}
    assert chat_templates.messages_for("{{ messages }}", [message]) == [message]
