"""Loss masks over an assistant's turns; expected masks are written out by hand from the templates' text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import TEMPLATE
from support.paths import ROOT
from support.tiny import TinyLlama, write_vocabulary

import llamatap as lt
from llamatap.chat import template as chat_templates
from llamatap.dataset.masks.assistant_turns import Turn, assistant_turns
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.rows_to_samples import Preparer, prepare

VOCABULARIES = ROOT / "vendor" / "llama.cpp" / "models"
TEMPLATES = VOCABULARIES / "templates"

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
PLAIN: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "Yo"},
    USER,
    {"role": "assistant", "content": " Bye.\n"},
]
THOUGHT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo"},
    USER,
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nBye."},
]
CALL: dict[str, Any] = {
    "type": "function",
    "id": "123456789",
    "function": {"name": "f", "arguments": {"a": "b"}},
}
TOOLS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": "c"},
    {"role": "assistant", "content": "Done."},
]


def rendered(template: str, messages: list[dict[str, Any]]) -> tuple[str, list[Turn]]:
    def render(some: Any, /, *, add_generation_prompt: bool = False, **marks: Any) -> str:
        return chat_templates.render(
            template,
            some,
            add_generation_prompt=add_generation_prompt,
            bos_token="",
            eos_token="</s>",
            **marks,
        )

    text = render(messages)
    return text, assistant_turns(render, messages, text)


def pieces(template: str, messages: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """The words of each turn, and what ends it."""
    text, turns = rendered(template, messages)
    return [
        (text[turn.start : turn.text_end], None if turn.end is None else text[turn.text_end : turn.end])
        for turn in turns
    ]


def vendored(name: str) -> str:
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the templates are not there; `make test` fetches them")
    return path.read_text("utf-8")


END = "<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        # The last turn gets an empty thought, which is of the turn and does not count; blanks stay.
        ("Qwen-Qwen3-0.6B", PLAIN, [("Yo", END), ("<think>\n\n</think>\n\n Bye.", f"\n{END}")]),
        # Earlier thoughts are left out.
        ("Qwen-Qwen3-0.6B", THOUGHT, [("Yo", END), ("<think>\nso\n</think>\n\nBye.", END)]),
        # The prompt begins the thought.
        ("Qwen3.5-4B", THOUGHT, [("Yo", END), ("so\n</think>\n\nBye.", END)]),
        # Blanks are cut.
        ("google-gemma-2-2b-it", PLAIN, [("Yo", "<end_of_turn>\n"), ("Bye.", "<end_of_turn>\n")]),
        ("meta-llama-Llama-3.1-8B-Instruct", PLAIN, [("Yo", "<|eot_id|>"), ("Bye.", "<|eot_id|>")]),
        # Turns that are not the last end otherwise.
        (
            "openai-gpt-oss-120b",
            PLAIN,
            [
                ("<|channel|>final<|message|>Yo", "<|end|>"),
                ("<|channel|>final<|message|> Bye.", "\n<|return|>"),
            ],
        ),
        # Earlier thoughts are left out of all but the last turn, which shows in what came before.
        ("LFM2.5-Instruct", THOUGHT, [("Yo", END), ("<think>\nso\n</think>\n\nBye.", END)]),
        # The template puts the system message into the last question.
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            [{"role": "system", "content": "Be."}, *PLAIN],
            [("Yo", "</s>"), (" Bye.", "\n</s>")],
        ),
        # The template marks what is generated itself: {% generation %}.
        ("LFM2.5-8B-A1B", PLAIN, [(f"Yo{END}", ""), (f" Bye.\n{END}", "")]),
        (
            "mistralai-Mistral-Nemo-Instruct-2407",
            TOOLS,
            [
                ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "b', '"}, "id": "123456789"}]</s>'),
                ("Done.", "</s>"),
            ],
        ),
    ],
)
def test_turns(name: str, messages: list[dict[str, Any]], expected: list[tuple[str, str | None]]) -> None:
    assert pieces(vendored(name), messages) == expected


def test_what_an_assistant_says_unasked_is_no_answer() -> None:
    greeting = [{"role": "system", "content": "Be."}, {"role": "assistant", "content": "Welcome"}, *PLAIN]
    assert pieces(TEMPLATE, greeting) == [("Yo", "</s>\n"), ("Bye.", "</s>\n")]


def test_content_in_parts() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    assert pieces(template, messages) == [("one two", "</s>")]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "message 1: .*does not write what"),
        (
            "{% for m in messages | reverse %}{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}<a>{% endif %}",
            "message 1: .*earlier messages differently",
        ),
        # It has no generation prompt, and does not end where one would stand.
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}$",
            "message 1: .*earlier messages differently",
        ),
        (
            "{% for m in messages %}{{ m.content }}{{ m.content | length }};{% endfor %}",
            "other text when markers",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}<a>{{ m.content }}"
            "{{ messages[0].content }}{{ m.content }}{% endif %};{% endfor %}"
            "{% if add_generation_prompt %}<a>{% endif %}",
            "message 1: .*in one piece",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
            "contains text of another role",
        ),
    ],
)
def test_turns_that_cannot_be_told(template: str, why: str) -> None:
    with pytest.raises(lt.InvalidInputError, match=why):
        rendered(template, PLAIN)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content * 2 }};{% endfor %}", [("YoYo", ";"), (" Bye.\n Bye.", "\n;")]),
        # Earlier messages are written otherwise, but not what is next to the turn.
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}<a>{% endif %}",
            [("Yo", ";"), (" Bye.", "\n;")],
        ),
        # The last question is written twice.
        (
            "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}!"
            "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
            [("Yo", ";"), (" Bye.", "\n;")],
        ),
    ],
)
def test_turns_of_odd_templates(template: str, expected: list[tuple[str, str]]) -> None:
    assert pieces(template, PLAIN) == expected


@pytest.mark.parametrize(
    ("condition", "first"),
    [
        # Conditions on an empty content, the function called, the end of a question, the system message.
        ("m.role == 'user' and not m.content", {"role": "user", "content": ""}),
        ("m.tool_calls and m.tool_calls[0].function.name == 'f'", TOOLS[1]),
        ("m.content.endswith('/x')", {"role": "user", "content": "Hi /x"}),
        ("m.content == '/x'", {"role": "system", "content": "/x"}),
    ],
)
def test_templates_that_look_for_words(condition: str, first: dict[str, Any]) -> None:
    template = TEMPLATE.replace("[{{ m.role }}]", f"{{% if {condition} %}}!{{% endif %}}[{{{{ m.role }}}}]")
    messages = [first, USER, {"role": "assistant", "content": "Yo"}]
    assert rendered(template, messages)[0].startswith("![")
    assert pieces(template, messages) == [("Yo", "</s>\n")]


def test_generation_tags() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}$"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    text, turns = rendered(template, PLAIN)
    assert text == "<user>Hi<assistant>Yo$<user>Hi<assistant> Bye.\n$"
    assert [text[turn.start : turn.end] for turn in turns] == ["Yo$", " Bye.\n$"]


def test_the_marks_are_not_what_somebody_says() -> None:
    said = "\U00020000\U00020001\U00020002\U00020005"
    assert pieces(TEMPLATE, [USER, {"role": "assistant", "content": said}]) == [(said, "</s>\n")]


def test_contents_in_ascii() -> None:
    template = TEMPLATE.replace("m.content | trim", "m.content | tojson(ensure_ascii=True)")
    messages = [USER, {"role": "assistant", "content": "\U00020000é"}]
    assert pieces(template, messages) == [('"\\ud840\\udc00\\u00e9', '"</s>\n')]


def skip(row: int, error: Exception) -> None:
    raise error


def masked(model: lt.Model, messages: list[dict[str, Any]], **options: Any) -> list[bytes]:
    """The bytes of each run of tokens in the mask."""

    (sample,) = prepare(
        model, [{"messages": messages}], DatasetOptions(max_length=4096, **options), skip
    ).samples
    assert (
        sample.tokens.tolist()
        == model.tokenize(
            model.apply_chat_template(messages, False, template=options.get("template"))
        ).tolist()
    )
    pairs = zip(sample.loss_mask.tolist(), sample.tokens.tolist(), strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [b"".join(model.token_bytes(token) for _, token in run) for chosen, run in runs if chosen]


def test_tokens_of_turns(smollm2: lt.Model) -> None:
    assert masked(smollm2, PLAIN) == [b"Yo<|im_end|>", b" Bye.\n<|im_end|>"]
    # One token holds the end of the header and the beginning of what is said: it is not the assistant's.
    newline = [USER, {"role": "assistant", "content": "\n\nYo"}]
    assert masked(smollm2, newline) == [b"\nYo<|im_end|>"]
    # Without a token that ends turns, a turn ends with what it says.
    plain = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
    assert masked(smollm2, PLAIN, template=plain) == [b"Yo", b" Bye."]
    # A special token in what is said is one; the turn goes on after it.
    odd = [USER, {"role": "assistant", "content": "a<|im_end|>b"}]
    assert masked(smollm2, odd) == [b"a<|im_end|>b<|im_end|>"]


def test_a_call_that_is_written_otherwise_while_it_is_the_last(smollm2: lt.Model) -> None:
    template = vendored("Qwen-Qwen3-0.6B")
    call = b'<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call><|im_end|>'
    assert masked(smollm2, TOOLS, template=template) == [call, b"Done.<|im_end|>"]
    assert masked(smollm2, TOOLS, template=template, supervise_empty_thoughts=True) == [
        call,
        b"<think>\n\n</think>\n\nDone.<|im_end|>",
    ]


@pytest.fixture(scope="module")
def qwen() -> Iterator[lt.Model]:
    path = VOCABULARIES / "ggml-vocab-qwen35.gguf"
    if not path.exists():
        pytest.skip("the vocabularies are not there; `make test` fetches them")
    with lt.Model(path, vocab_only=True) as model:
        yield model


def test_empty_thoughts_that_a_template_adds_do_not_count(qwen: lt.Model) -> None:
    """Case 46: NVIDIA-NeMo/Automodel#3739; only `import sys<|im_end|>` is said: 3 of 21 tokens."""
    template = vendored("Qwen-Qwen3-0.6B")
    messages = [
        {"role": "user", "content": "Write hello."},
        {"role": "assistant", "content": "import sys"},
    ]
    preparer = Preparer(qwen, DatasetOptions(max_length=4096, template=template))
    tokens, mask, _ = preparer({"messages": messages})
    empty = "<think>\n\n</think>\n\n"
    assert qwen.detokenize(tokens).endswith(f"<|im_start|>assistant\n{empty}import sys<|im_end|>\n")
    assert (int(mask.sum()), len(tokens)) == (3, 21)
    assert mask.tolist() == [False] * 17 + [True] * 3 + [False]
    assert qwen.detokenize(tokens[mask]) == "import sys<|im_end|>"
    # Training a model on when not to think is an option.
    thinking = Preparer(
        qwen, DatasetOptions(max_length=4096, template=template, supervise_empty_thoughts=True)
    )
    tokens, mask, _ = thinking({"messages": messages})
    assert qwen.detokenize(tokens[mask]) == f"{empty}import sys<|im_end|>"
    assert int(mask.sum()) == 9


def test_turns_are_masked_alike(qwen: lt.Model) -> None:
    """The rest of case 46: the template leaves the empty thought out of the first turn."""
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And 2 more?"},
        {"role": "assistant", "content": "Six is the answer."},
    ]
    for name in ("Qwen3.5-4B", "Qwen-Qwen3-0.6B"):
        assert masked(qwen, messages, template=vendored(name)) == [
            b"Four.<|im_end|>",
            b"Six is the answer.<|im_end|>",
        ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # Thoughts that are there count, with what is around them.
        ({"content": "Yo", "reasoning_content": "hm"}, b"<think>\nhm\n</think>\n\nYo<|im_end|>"),
        ({"content": "<think>\nhm\n</think>\n\nYo"}, b"<think>\nhm\n</think>\n\nYo<|im_end|>"),
        # An empty thought in the row itself counts as well, an empty field does not.
        ({"content": "<think>\n\n</think>\n\nYo"}, b"<think>\n\n</think>\n\nYo<|im_end|>"),
        ({"content": "Yo", "reasoning_content": ""}, b"Yo<|im_end|>"),
        # Blanks are the template's as far as it writes them itself.
        ({"content": "  Yo"}, b"  Yo<|im_end|>"),
        ({"content": "\n\nYo"}, b"Yo<|im_end|>"),
        # The template takes what comes before for a thought.
        ({"content": "hm</think>Yo"}, b"<think>\nhm\n</think>\n\nYo<|im_end|>"),
        (
            {"content": "", "tool_calls": [CALL]},
            b'<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call><|im_end|>',
        ),
    ],
)
def test_thoughts_of_the_row_count(qwen: lt.Model, answer: dict[str, Any], expected: bytes) -> None:
    messages = [USER, {"role": "assistant", **answer}]
    assert masked(qwen, messages, template=vendored("Qwen-Qwen3-0.6B")) == [expected]


def test_the_newline_after_a_turn_does_not_count(smollm2: lt.Model) -> None:
    """Case 51: tools differ; the engine stops at <|im_end|>, so no model ever generates the newline."""
    tokens, mask, _ = Preparer(smollm2, DatasetOptions(max_length=4096))({"messages": PLAIN})
    text = smollm2.detokenize(tokens)
    assert text.count("<|im_end|>\n") == 5
    (end,) = smollm2.tokenize("<|im_end|>", add_special=False).tolist()
    (newline,) = smollm2.tokenize("\n", add_special=False).tolist()
    assert smollm2.is_end_of_generation(end)
    ends = np.flatnonzero(tokens == end)
    assert (tokens[ends + 1] == newline).all()
    # System, Hi, Yo, Hi, Bye.
    assert mask[ends].tolist() == [False, False, True, False, True]
    assert not mask[ends + 1].any()


def test_blanks_of_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    with lt.Model(TinyLlama().write(tmp_path / "tiny.gguf", chat_template=TEMPLATE)) as model:
        messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
        assert masked(model, messages) == ["c\u2581d\u2581e</s>".encode()]


def test_prompts_that_begin_a_thought(smollm2: lt.Model) -> None:
    # "<think>" and "</think>" share their first character, not their first token.
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% else %}<|im_start|>assistant\n</think>{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    first = (
        smollm2.tokenize("<think>", add_special=False)[0],
        smollm2.tokenize("</think>", add_special=False)[0],
    )
    assert first[0] != first[1]
    messages = [USER, {"role": "assistant", "content": "Yo"}]
    assert masked(smollm2, messages, template=template) == [b"Yo<|im_end|>"]
    assert masked(smollm2, messages, template=template, supervise_empty_thoughts=True) == [
        b"</think>Yo<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("following", "why"),
    [
        # A number has no mark, and nothing shows where it begins.
        ({"role": "tool", "content": 5}, "message 1: .*later messages change what ends it"),
        # The assistant's next message does not end the one before.
        ({"role": "assistant", "content": "a<end>b"}, "no token ends"),
    ],
)
def test_turns_that_end_otherwise_than_the_last(following: dict[str, Any], why: str, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<end>' if loop.last else '#' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = write_vocabulary(tmp_path / "tokens.gguf", ["<end>"], ["<end>"])
    messages = [USER, {"role": "assistant", "content": "Yo"}, following]
    with lt.Model(path, vocab_only=True) as model, pytest.raises(lt.InvalidInputError, match=why):
        masked(model, messages, template=template)


def test_headers_that_no_prompt_ends_with(smollm2: lt.Model) -> None:
    """A header before an answer belongs to the template, even one without a generation prompt."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "Yo"}, USER, {"role": "assistant", "content": "Bye"}]
    assert masked(smollm2, messages, template=template) == [b"Yo<|im_end|>", b"Bye<|im_end|>"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "message 1 is empty"),
        ({"content": None}, "message 1 is empty"),
        ({"value": "Yo"}, "message 1"),
        ({"content": [{"type": "image"}]}, "takes only text, but message 1 has"),
    ],
)
def test_nobody_learns_to_say_none(smollm2: lt.Model, content: dict[str, Any], why: str) -> None:
    """Neither "None" nor Python's spelling of a list is in a mask."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(lt.InvalidInputError, match=why):
        masked(smollm2, [USER, {"role": "assistant", **content}], template=template)
    parts = [{"type": "text", "text": text} for text in ("Yo", "Bye")]
    messages = [USER, {"role": "assistant", "content": parts}]
    tokens, mask, _ = Preparer(smollm2, DatasetOptions(max_length=4096, template=template))(
        {"messages": messages}
    )
    assert smollm2.detokenize(tokens[mask]) == "Yo\nBye<|im_end|>"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_a_content(qwen: lt.Model, content: dict[str, Any]) -> None:
    """OpenAI's clients have null there and arguments in JSON, and Parquet has no nulls."""
    function = {"name": "f", "arguments": '{"a": "b"}'}
    call = {"role": "assistant", "tool_calls": [{**CALL, "function": function}], **content}
    messages = [USER, call, *TOOLS[2:]]
    written = b'{"name": "f", "arguments": {"a": "b"}}'
    for name in ("Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B"):
        assert masked(qwen, messages, template=vendored(name)) == [
            b"<tool_call>\n%b\n</tool_call><|im_end|>" % written,
            b"Done.<|im_end|>",
        ]


def test_the_date_of_templates(tmp_path: Path) -> None:
    template = f"{{{{ strftime_now('%d %m %Y') }}}}{TEMPLATE}"
    with lt.Model(TinyLlama().write(tmp_path / "tiny.gguf", chat_template=template)) as model:
        how = DatasetOptions(max_length=4096, date="2001-02-03")
        (sample,) = prepare(model, [{"messages": PLAIN}], how, skip).samples
        assert model.detokenize(sample.tokens).replace("\u2581", " ").startswith("<s>03 02 2001[user]")
