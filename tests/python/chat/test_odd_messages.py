"""Messages of random JSON: the result is a text or one of the package's errors."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ENGINE_MODELS
from support.servers import running, tiny_options
from support.tiny import TinyLlama, write_vocabulary

import llamatap as lt
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.rows_to_samples import prepare

FOLDER = ENGINE_MODELS / "templates"
#: Templates that accept many kinds of messages.
OWN = {
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}",
    "strings in lists": (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part if part is string else part.text }}{% endfor %}{% endif %}</s>"
        "{% endfor %}"
    ),
    "thoughts": (
        "{% for m in messages %}[{{ m.role }}]<think>{{ m.reasoning_content }}</think>{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
}
REAL = (
    "Qwen-Qwen3-0.6B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "google-gemma-4-31B-it",
    "openai-gpt-oss-120b",
    "deepseek-ai-DeepSeek-V3.1",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Kimi-K2-Thinking",
    "GLM-4.6",
)
TEMPLATES = OWN | {
    name: (FOLDER / f"{name}.jinja").read_text("utf-8")
    for name in REAL
    if (FOLDER / f"{name}.jinja").exists()
}


def deep(levels: int) -> Any:
    value: Any = "deep"
    for level in range(levels):
        value = [value] if level % 2 else {"text": value}
    return value


class Odd:
    """Random JSON in the place of message fields."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._chance = 0.0

    def value(self, depth: int = 0) -> Any:
        pick = self._random.randrange(13 if depth < 3 else 9)
        if pick < 9:
            odd = [
                "a b",
                "",
                " \n",
                "<think>\n</think>x",
                "\U0002a6d0",
                "\ud83d",
                "{",
                "[1]",
                "a\0b",
                "\u2028",
            ]
            numbers = [0, -1, 1 << 70, 0.5, float("nan"), float("-inf")]
            return self._random.choice([*odd, *odd, *numbers, None, True, False])
        if pick == 12 and depth == 0:
            return deep(self._random.choice((30, 90)))
        if pick % 2:
            return [self.value(depth + 1) for _ in range(self._random.randrange(4))]
        names = ["type", "text", "content", "thinking", "name", "function", "arguments", "items", "image_url"]
        return {
            self._random.choice(names): self.value(depth + 1) for _ in range(self._random.randrange(1, 4))
        }

    def _or_odd(self, value: Any, share: float = 1.0) -> Any:
        return self.value() if self._random.random() < share * self._chance else value

    def _call(self) -> Any:
        arguments = self._or_odd(self._random.choice(({"a": "b"}, '{"a": 1}', "", "{", "[1]")))
        function = self._or_odd({"name": self._or_odd("fetch"), "arguments": arguments}, 0.5)
        return self._or_odd({"type": "function", "id": self._or_odd("123456789"), "function": function}, 0.5)

    def _message(self, role: str) -> Any:
        parts = [{"type": "text", "text": self._or_odd("c")}, "a b", self.value()]
        content = self._random.choice((None, [self._random.choice(parts) for _ in range(2)], self.value()))
        found: dict[str, Any] = {"role": self._or_odd(role, 0.3), "content": "Yes."}
        if self._random.random() < self._chance:
            found["content"] = content
        more: dict[str, Callable[[], Any]] = {
            "reasoning_content": lambda: self._or_odd("hm"),
            "thinking": lambda: self._or_odd("hm"),
            "tool_calls": lambda: self._or_odd([self._call()]),
            "function_call": self._call,
            "tool_responses": self.value,
            "tool_call_id": lambda: self._or_odd("123456789"),
            "name": lambda: self._or_odd("fetch"),
        }
        found |= {name: make() for name, make in more.items() if self._random.random() < self._chance}
        if self._random.random() < self._chance / 4:
            del found[self._random.choice(list(found))]
        return self._or_odd(found, 0.1)

    def chat(self) -> Any:
        """A conversation, odd in one place or in most."""
        self._chance = self._random.choice((0.02, 0.1, 0.4))
        roles = ["user", "assistant"] * self._random.randrange(1, 3)
        if self._random.random() < self._chance:
            roles.insert(
                self._random.randrange(len(roles)), self._random.choice(("system", "tool", "assistant"))
            )
        return [self._message(role) for role in roles]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    path = write_vocabulary(
        tmp_path_factory.mktemp("odd") / "tokens.gguf", ["<|im_end|>", "<|eot_id|>"], ["<|im_end|>"]
    )
    with lt.Model(path, vocab_only=True) as model:
        yield model


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_and_data_sets(model: lt.Model, name: str) -> None:
    """Anything but a text or an lt.Error fails here, for a row too."""
    odd = Odd(19)
    chats = [odd.chat() for _ in range(150)]
    rows = [
        {"messages": messages, "tools": odd.value() if n % 3 else None} for n, messages in enumerate(chats)
    ]
    written = 0
    for messages in chats:
        with contextlib.suppress(lt.Error):
            written += isinstance(model.apply_chat_template(messages, template=TEMPLATES[name]), str)
    skipped: list[int] = []
    how = DatasetOptions(max_length=4096, template=TEMPLATES[name])
    found = prepare(model, rows, how, lambda row, error: skipped.append(row))
    assert len(found.samples) + len(skipped) == len(rows)
    # Not all are refused.
    assert written > 30
    assert len(found.samples) > 20


@pytest.mark.fuzz
def test_a_server_answers_every_body(tiny: TinyLlama, tmp_path: Path) -> None:
    models = []
    for number, template in enumerate(list(TEMPLATES.values())[2:5]):
        path = tiny.write(tmp_path / f"{number}.gguf", chat_template=template)
        models.append(tiny_options(path, name=str(number)))
    odd = Odd(20)
    headers = {"Content-Type": "application/json"}
    statuses = []
    with running(models) as server:
        for number in range(150):
            body: dict[str, Any] = {
                "model": str(number % len(models)),
                "max_tokens": 1,
                "messages": odd.chat(),
            }
            response = server.client.post(
                "/v1/chat/completions", content=json.dumps(body).encode(), headers=headers
            )
            assert response.status_code in (200, 400), (body, response.text)
            assert (
                "choices" in response.json()
                or print(response.text[:300])
                or response.json()["error"]["message"]
            )
            statuses.append(response.status_code)

    assert {200, 400} == set(statuses)


@pytest.mark.parametrize("levels", [300, 900, 20_000])
@pytest.mark.parametrize("name", OWN)
def test_deep_values(model: lt.Model, name: str, levels: int) -> None:
    """Python's readers of JSON allow some nine hundred levels, and objects may have more."""
    value = deep(levels)
    function = {"name": "fetch", "arguments": {"a": value}}
    fields: list[dict[str, Any]] = [
        {"content": value},
        {"content": None, "tool_calls": value},
        {"content": "", "tool_calls": [{"function": function}]},
        {"content": "", "function_call": function},
        {"content": "Yes.", "reasoning_content": value},
        {"role": value, "content": "Yes."},
    ]
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"} | one]} for one in fields
    ]
    for row in rows:
        with contextlib.suppress(lt.Error):
            model.apply_chat_template(row["messages"], template=OWN[name])
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    rows += [value, {"messages": value}, {"input_ids": value}, {"text": value}]
    rows += [{"messages": talk, "tools": value}, {"messages": talk}]
    skipped: list[int] = []
    found = prepare(
        model, rows, DatasetOptions(max_length=4096, template=OWN[name]), lambda row, _: skipped.append(row)
    )
    assert len(found.samples) + len(skipped) == len(rows)
    assert found.samples[-1].row == len(rows) - 1


@pytest.mark.parametrize("arguments", [{"a": {1, 2}}, {(1, 2): "a"}, {"a": b"b"}])
def test_arguments_that_json_does_not_have(model: lt.Model, arguments: Any) -> None:
    """A template that prints arguments shows them as they are; one that concatenates them fails."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
        "{{ call.function.arguments + '' if strict else call.function.arguments }}{% endfor %}{% endfor %}"
    )
    only_json = template.replace(" if strict else call.function.arguments", "")
    calls = [{"function": {"name": "fetch", "arguments": arguments}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert model.apply_chat_template(messages, template=template) == str(arguments)
    with pytest.raises(lt.InvalidInputError, match="template failed"):
        model.apply_chat_template(messages, template=only_json)


def test_parts_that_are_strings_are_said(model: lt.Model) -> None:
    """A row's content in strings, by a template that knows them; beside it an empty thought of its own."""
    template = OWN["strings in lists"].replace("[{{ m.role }}]", "[{{ m.role }}]{{ m.thinking }}</think>")
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    for said, thought in ((["a b", "c"], False), (["</think>", "c"], True), ([{"text": "</think>c"}], True)):
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
        how = DatasetOptions(max_length=4096, template=template)
        (sample,) = prepare(
            model, [{"messages": talk}], how, lambda _, error: pytest.fail(str(error))
        ).samples
        masked = b"".join(map(model.token_bytes, sample.tokens[sample.loss_mask].tolist())).decode()
        # The frame is in the mask where the assistant says it itself.
        assert masked.startswith("</think></think>c" if thought else "a\u2581bc"), (said, masked)
