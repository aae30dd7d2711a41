"""Loss masks by the chat templates that the engine's sources bring, for chats of many shapes.

Who says what is told by words that occur nowhere else, and tokens are single bytes: what the assistant says
must be in the mask wherever the template writes it, what others say must not be, and each turn must end with
a token that ends it. Where a chat is refused, that is listed with its reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chats import AGAIN, ANSWER, ASKED, FIRST, SHAPES, TOOLS, Message, result, says, user
from support.paths import ENGINE_MODELS
from support.tiny import write_vocabulary

import llamatap as lt
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.rows_to_samples import prepare

TEMPLATES = ENGINE_MODELS / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

pytestmark = pytest.mark.skipif(not NAMES, reason="the templates are not there; `make test` fetches them")

# Ends of turns for templates whose text has none of the names below.
ENDS = {
    "Apertus-8B-Instruct": ["<|assistant_end|>"],
    "ByteDance-Seed-OSS": ["<seed:eos>"],
    "Cohere2MoE": ["<|END_OF_TURN_TOKEN|>"],
    "CohereForAI-c4ai-command-r-plus-tool_use": ["<|END_OF_TURN_TOKEN|>"],
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ["<|END_OF_TURN_TOKEN|>"],
    "GLM-4.6": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "GLM-4.7-Flash": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "GigaChat3-10B-A1.8B": ["<|message_sep|>"],
    "GigaChat3.1-10B-A1.8B": ["<|message_sep|>"],
    "Kimi-K3": ["<|end_of_msg|>"],
    "MiniMax-M1": ["<end_of_sentence>"],
    "NVIDIA-Nemotron-Nano-v2": ["<SPECIAL_12>"],
    "Reka-Edge": ["<sep>"],
    "inclusionai-ling-3.0-flash": ["<|role_end|>"],
    "muse-glimmer": ["<|eot|>", "<|eom|>"],
    "poolside-Laguna-S-2.1": ["</assistant>"],
    "poolside-Laguna-XS-2.1": ["</assistant>"],
    "poolside-Laguna-XS.2": ["</assistant>"],
    "tencent-Hy3": ["<\uff5chy_eos:opensource\uff5c>"],
}
USUAL_ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~[",
]
SPECIAL = re.compile(
    r"<\|[^|<>]{1,40}\|?>|<[^|<>]{1,20}\|>|<\uff5c[^<>{}]*?\uff5c>|</?[A-Za-z_][\w:]*>|\[/?[A-Z_]+\]|\]~!?b\[?|\[e~\["
)


def calls_and_nothing_else(messages: list[Message]) -> bool:
    return any(message.get("tool_calls") and not message["content"] for message in messages)


def has_parts(messages: list[Message]) -> bool:
    return any(isinstance(message["content"], list) for message in messages)


def calls_anything(messages: list[Message]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def says_more_than_a_call(messages: list[Message]) -> bool:
    return any(
        message.get("tool_calls") and message["content"] and following["role"] == "tool"
        for message, following in itertools.pairwise(messages)
    )


def goes_on(messages: list[Message]) -> bool:
    return any(a["role"] == b["role"] == "assistant" for a, b in itertools.pairwise(messages))


UNSAID = "does not write what the message says"
NO_CALLS = (calls_and_nothing_else, UNSAID)
#: Which chats are refused, and why.
REFUSED: dict[str, tuple[Callable[[list[Message]], bool], str]] = {
    # These leave calls out, and an empty turn would teach to say nothing.
    "HuggingFaceTB-SmolLM3-3B": (lambda chat: calls_and_nothing_else(chat) or has_parts(chat), UNSAID),
    "LFM2-8B-A1B": NO_CALLS,
    "LFM2.5-Instruct": NO_CALLS,
    "google-gemma-2-2b-it": NO_CALLS,
    "ibm-granite-granite-3.3-2B-Instruct": NO_CALLS,
    "llama-cpp-rwkv-world": NO_CALLS,
    "microsoft-Phi-3.5-mini-instruct": NO_CALLS,
    # Or contents in parts.
    "openbmb-MiniCPM5-1B": (has_parts, UNSAID),
    # It does not end calls; the next end token belongs to the system message after it.
    "CohereForAI-c4ai-command-r-plus-tool_use": (calls_anything, "no token ends an assistant's turn"),
    # It writes a text after the result of the call in the same message.
    "google-gemma-4-31B-it": (says_more_than_a_call, "in one piece"),
    # Its prompt for more after an assistant's turn leaves that open, the text does not.
    "NVIDIA-Nemotron-Nano-v2": (goes_on, "one after another"),
}
#: Possible ends of turns for templates that write no end of their own.
UNENDED = {
    # The results of tools follow in the same turn.
    "Apertus-8B-Instruct": r"<\|tools_suffix\|>$",
    # Nothing ends the first call.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<\uff5ctool\u2581call\u2581end\uff5c>$",
    # The assistant goes on at once.
    "GLM-4.6": r"blenth$",
    "GLM-4.7-Flash": r"blenth$",
    # Nothing but empty lines separates turns.
    "llama-cpp-rwkv-world": r"(\w|</i>|\}\])$",
}


def ends_of(name: str, text: str) -> list[str]:
    return ENDS.get(name) or [end for end in USUAL_ENDS if end in text] or ["<end>"]


def vocabulary(path: Path, name: str, template: str) -> Path:
    """Bytes, and the special tokens of a template."""
    ends = ends_of(name, template)
    return write_vocabulary(path, list(dict.fromkeys([*ends, *SPECIAL.findall(template)])), ends[:3])


def words(value: Any) -> Iterator[str]:
    """The words of all texts in a value."""
    if isinstance(value, str):
        yield from (word for word in re.findall(r"\w{4,}", value) if word not in ("think", "tool_response"))
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "type":
                yield from words(item)
    elif isinstance(value, list):
        for item in value:
            yield from words(item)


def arguments(value: Any) -> Iterator[str]:
    """The words of a call's arguments, their names too."""
    yield from words(value if isinstance(value, str) else [*value, list(value.values())])


def runs(
    model: lt.Model,
    template: str,
    messages: list[Message],
    tools: list[Message] | None = None,
    **options: Any,
) -> list[tuple[str, str]]:
    """Runs of tokens in the mask, each with the unmasked text after it; the first run is empty."""

    def fail(row: int, error: Exception) -> None:
        raise error

    row = {"messages": messages, "tools": tools}
    (sample,) = prepare(
        model, [row], DatasetOptions(max_length=1 << 20, template=template, **options), fail
    ).samples
    found: list[tuple[str, str]] = [("", "")]
    pairs = zip(sample.loss_mask.tolist(), sample.tokens.tolist(), strict=True)
    for chosen, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        text = b"".join(model.token_bytes(token) for _, token in run).decode(errors="replace")
        found.append((text, "")) if chosen else found.append((*found.pop()[:1], text))
    return found


def problems(
    found: list[tuple[str, str]], messages: list[Message], tools: list[Message] | None, given: str
) -> Iterator[str]:
    """Faults of a mask, found by who says which words.

    :param given: the template's rendering of the tools and a question.
    """
    inside, outside = "\0".join(run for run, _ in found), "\0".join(rest for _, rest in found)

    def written(word: str) -> int:
        return "".join(itertools.chain(*found)).count(word)

    for word in words([tool["function"]["description"] for tool in tools or []]):
        if outside.count(word) != written(word):
            yield f"{word} of a tool is in the mask"
    for message in messages:
        called = [call["function"] for call in message.get("tool_calls", [])]
        said = [*words([message["content"], message.get("reasoning_content")])]
        if message["role"] != "assistant":
            for word in said:
                if outside.count(word) != written(word):
                    yield f"{word} of others is in the mask"
            continue
        taken = [word for function in called for word in arguments(function["arguments"])]
        # Names may be written again with the result, and in the tools' descriptions.
        for word in [*taken, *(function["name"] for function in called)]:
            if written(word) > given.count(word) and word not in inside:
                yield f"{word} of a call is not in the mask"
        said += taken if tools is None else []
        for word in said:
            if inside.count(word) != written(word):
                yield f"{word} of the assistant is not in the mask"


def unended(found: list[tuple[str, str]], ends: list[str]) -> Iterator[str]:
    """The runs that end with no such token, and that something follows."""
    for run, rest in found[1:]:
        if rest.strip("\n \u2581") and not run.rstrip().endswith(tuple(ends)):
            yield run


# Names that templates write around thoughts.
THOUGHT = re.compile(r"</?(mm:)?think>|<\|(close|open)\|>think|<\|(START|END)_THINKING\|>|\[/?THINK\]")
THOUGHTS = ("musenk", "ponderl")


def boilerplate(found: list[tuple[str, str]], shape: str) -> Iterator[str]:
    """Masked text that the template adds by itself.

    It is the frame of an absent thought, or what the template writes into one turn and not into the next.
    """
    said = [run for run, _ in found[1:]]
    for run in said:
        if THOUGHT.search(run) and not any(thought in run for thought in THOUGHTS):
            yield f"an empty thought is in the mask: {run!r}"
    if shape in ("plain", "system"):
        openings = {re.split("blenth|drostic", run)[0] for run in said}
        if len(openings) != 1:
            yield f"turns begin otherwise: {openings}"


class Case:
    """A template, and a model with its special tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
        self.ends = ends_of(name, self.template)
        self.model = lt.Model(vocabulary(folder / "tokens.gguf", name, self.template), vocab_only=True)

    def render(self, messages: list[Message], prompt: bool = False, tools: Any = None) -> str | None:
        """A text; None where the template itself refuses the messages."""
        variables = {"tools": tools} if tools else {}
        try:
            return self.model.apply_chat_template(messages, prompt, template=self.template, **variables)
        except lt.InvalidInputError:
            return None

    def runs(self, messages: list[Message], tools: Any = None, **options: Any) -> list[tuple[str, str]]:
        return runs(self.model, self.template, messages, tools, **options)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    # Tests are ordered by it: a template takes longer to compile than to render.
    case = Case(request.param, tmp_path_factory.mktemp("case"))
    with case.model:
        yield case


VARIANTS = [
    *((shape, None) for shape in SHAPES),
    *((shape, TOOLS) for shape in ("plain", "text and call", "call", "last a call")),
]


@pytest.mark.sampled(7)
def test_every_shape(case: Case) -> None:
    refuses, why = REFUSED.get(case.name, (lambda messages: False, ""))
    wrong = []
    written = 0
    for shape, tools in VARIANTS:
        messages = SHAPES[shape]
        given = case.render([ASKED], True, tools)
        if given is None or case.render(messages, tools=tools) is None:
            continue
        written += 1
        try:
            found = case.runs(messages, tools)
        except lt.InvalidInputError as error:
            if not refuses(messages) or why not in str(error):
                wrong.append(f"{shape}: {error}")
            continue
        if refuses(messages):
            wrong.append(f"{shape}: is not refused: {found}")
        wrong += [f"{shape}: {problem}" for problem in problems(found, messages, tools, given)]
        wrong += [f"{shape}: {problem}" for problem in boilerplate(found, shape)]
        for run in unended(found, case.ends):
            if case.name not in UNENDED or not re.search(UNENDED[case.name], run):
                wrong.append(f"{shape}: nothing ends {run!r}")
    assert wrong == []
    if not written:
        pytest.skip("the template wants variables of its own")


def test_who_says_it_matters_and_not_what(case: Case) -> None:
    messages = [user("quarnt"), says("", FIRST), result("resulk"), says("drosti"), AGAIN, says("krelle")]
    # Words of six letters, all the same one.
    same = [{**message, "content": re.sub(r"\w+", "zubbel", message["content"])} for message in messages]
    if case.render(messages) is None or (case.name in REFUSED and REFUSED[case.name][0](messages)):
        pytest.skip("such a chat is refused")
    found, again = case.runs(messages), case.runs(same)
    assert [[len(text) for text in run] for run in again] == [[len(text) for text in run] for run in found]


def test_turns_that_others_and_the_assistant_quote(case: Case) -> None:
    asked = case.render([ASKED], True)
    if asked is None:
        pytest.skip("the template wants variables of its own")
    # The text between a question and its answer.
    header = asked[asked.index("quarn") + len("quarn") :]
    quoted = f"{header}injekt{case.ends[0]}"
    messages = [user(f"quarn{quoted}mollif"), says(f"blenth{quoted}strenk"), user(f"zubbel{quoted}"), ANSWER]
    if case.name == "CohereForAI-c4ai-command-r-plus-tool_use":
        # Where a turn begins shows in nothing but the words that begin it.
        with pytest.raises(lt.InvalidInputError, match="earlier messages differently"):
            case.runs(messages)
        return
    found = case.runs(messages)
    # Templates may take thoughts out of what the assistant says.
    inside, outside = ("\0".join(texts) for texts in zip(*found, strict=True))
    assert not [word for word in ("quarn", "mollif", "zubbel") if word in inside]
    assert not [word for word in ("blenth", "strenk", "drostic") if word in outside]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # The text beside a call is left out.
        (
            "meta-llama-Llama-3.1-8B-Instruct",
            "text and call",
            [
                '{"name": "fetchum", "parameters": {"argone": "valorux"}}<|eot_id|>',
                "drostic<|eot_id|>",
            ],
        ),
        # A turn that is not the last ends in <|end|>, a call in <|call|>.
        (
            "openai-gpt-oss-120b",
            "text and call",
            [
                ' to=functions.fetchum<|channel|>commentary json<|message|>{"argone": "valorux"}<|call|>',
                "<|channel|>final<|message|>drostic<|return|>",
            ],
        ),
        ("openai-gpt-oss-120b", "ends with a user", ["<|channel|>final<|message|>blenth<|end|>"]),
        # The prompt begins a thought that the text does not have; a call is followed by another end.
        (
            "NVIDIA-Nemotron-Nano-v2",
            "text and call",
            [
                'blenth\n<TOOLCALL>[{"name": "fetchum", "arguments": {"argone": "valorux"}}]</TOOLCALL>\n'
                "<SPECIAL_12>",
                "drostic\n<SPECIAL_12>",
            ],
        ),
        # Two tokens end a call and another one an answer: the first one counts.
        (
            "unsloth-Apriel-1.5",
            "text and call",
            [
                'blenth\n<tool_calls>[{"name": "fetchum", "arguments": {"argone": "valorux"}, '
                '"id": "123456781"}]</tool_calls>\n<|end|>',
                "drostic\n<|end|>",
            ],
        ),
        # The last turn has no end.
        ("Apriel-1.6-15b-Thinker-fixed", "plain", ["blenth\n<|end|>", "drostic"]),
        # The start of the next message ends a turn, and the last turn has no end.
        (
            "GLM-4.6",
            "text and call",
            [
                "blenth\n<tool_call>fetchum\n<arg_key>argone</arg_key>\n"
                "<arg_value>valorux</arg_value>\n</tool_call><|observation|>",
                "drostic",
            ],
        ),
        # A system message comes last.
        (
            "CohereForAI-c4ai-command-r-plus-tool_use",
            "plain",
            ["blenth<|END_OF_TURN_TOKEN|>", "drostic<|END_OF_TURN_TOKEN|>"],
        ),
        # A prompt is written whether one is wanted or not.
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "thoughts and call",
            [
                "musenk<|END_THINKING|><|START_ACTION|>[\n"
                '    {"tool_call_id": "0", "tool_name": "fetchum", "parameters": {"argone": "valorux"}}\n'
                "]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
                "<|START_RESPONSE|>drostic<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            ],
        ),
        # The model stops for the result in the middle of its turn.
        (
            "google-gemma-4-31B-it",
            "call",
            [
                '<|tool_call>call:fetchum{argone:<|"|>valorux<|"|>}<tool_call|><|tool_response>',
                "drostic<turn|>",
                "krell<turn|>",
            ],
        ),
        # An earlier turn is written otherwise once a question follows.
        (
            "StepFun3.5-Flash",
            "call, no text",
            [
                "<tool_call>\n<function=fetchum>\n<parameter=argone>\nvalorux\n</parameter>\n</function>\n"
                "</tool_call><|im_end|>",
                "drostic<|im_end|>",
                "krell<|im_end|>",
            ],
        ),
    ],
)
def test_exact_tokens(name: str, shape: str, expected: list[str], tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    with case.model:
        assert [run.replace("\u2581", " ") for run, _ in case.runs(SHAPES[shape])[1:]] == expected


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("GLM-4.6", "\n<think></think>\n"),
        ("GLM-4.7-Flash", "</think>"),
        ("Kimi-K2-Thinking", "<think></think>"),
        ("Kimi-K3", "<|close|>think<|sep|><|open|>response<|sep|>"),
        ("MiniMax-M3", "</mm:think>"),
        ("deepseek-ai-DeepSeek-V3.2", "</think>"),
        # The template's own {% generation %} begins with the header.
        ("poolside-Laguna-S-2.1", "<assistant><think></think>"),
        # These are no empty thoughts: a model writes them before it says anything.
        ("openai-gpt-oss-120b", None),
        ("Cohere2MoE", None),
    ],
)
def test_empty_thoughts_count_for_those_who_want_it(name: str, opening: str | None, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    with case.model:
        default = case.runs(SHAPES["plain"])
        wanted = case.runs(SHAPES["plain"], supervise_empty_thoughts=True)
    if opening is None:
        assert wanted == default
        return
    assert [run for run, _ in wanted] == [f"{opening if run else ''}{run}" for run, _ in default]
