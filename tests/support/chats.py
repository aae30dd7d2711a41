"""Chats of many shapes; words that occur nowhere else tell who says what."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def says(content: Any, *calls: Message, **more: Any) -> Message:
    message = {"role": "assistant", "content": content, **more}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(name: str, number: int, arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"12345678{number}", "function": function}


def result(content: str, number: int = 1) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"12345678{number}",
        "name": "fetchum" if number == 1 else "grabbix",
        "content": content,
    }


def parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


FIRST = call("fetchum", 1, {"argone": "valorux"})
SECOND = call("grabbix", 2, {"argtwo": "tenebrix"})
ASKED, AGAIN = user("quarn"), user("zubbel")
ANSWER, MORE = says("drostic"), [AGAIN, says("krell")]
RESULT, OTHER = result("resulk"), result("outblin", 2)

SHAPES: dict[str, list[Message]] = {
    "plain": [ASKED, says("blenth"), AGAIN, ANSWER],
    "system": [{"role": "system", "content": "sysmog"}, ASKED, says("blenth"), AGAIN, ANSWER],
    "blanks": [user(" quarn\n"), says("\n blenth drom \n\n"), user("\tzubbel\n\n"), says("  drostic\n")],
    "parts": [user(parts("quarn")), says(parts("blenth")), user(parts("zubbel")), says(parts("drostic"))],
    "text and call": [ASKED, says("blenth", FIRST), RESULT, ANSWER],
    "call": [ASKED, says("", FIRST), RESULT, ANSWER, *MORE],
    "call, no text": [ASKED, says(None, FIRST), RESULT, ANSWER, *MORE],
    "two calls": [ASKED, says("blenth", FIRST, SECOND), RESULT, OTHER, ANSWER],
    "two calls, no text": [ASKED, says("", FIRST, SECOND), RESULT, OTHER, ANSWER],
    "calls in two turns": [ASKED, says("blenth", FIRST), RESULT, says("vesp", SECOND), OTHER, ANSWER],
    "calls in two turns, no text": [ASKED, says("", FIRST), RESULT, says("", SECOND), OTHER, ANSWER],
    "thoughts": [
        ASKED,
        says("blenth", reasoning_content="musenk"),
        AGAIN,
        says("drostic", reasoning_content="ponderl"),
    ],
    "thoughts in the text": [
        ASKED,
        says("<think>\nmusenk\n</think>\n\nblenth"),
        AGAIN,
        says("<think>\nponderl\n</think>\n\ndrostic"),
    ],
    "thoughts and call": [ASKED, says("", FIRST, reasoning_content="musenk"), RESULT, ANSWER],
    "thoughts, text and call": [ASKED, says("blenth", FIRST, reasoning_content="musenk"), RESULT, ANSWER],
    "last a call": [ASKED, says("blenth"), AGAIN, says("drostic", FIRST)],
    "last a call, no text": [ASKED, says("", FIRST)],
    "call without arguments": [ASKED, says("blenth", call("fetchum", 1, {})), RESULT, ANSWER],
    "call with a number": [ASKED, says("", call("fetchum", 1, {"argone": 71})), RESULT, ANSWER],
    "arguments in JSON": [ASKED, says("", call("fetchum", 1, '{"argone": "valorux"}')), RESULT, ANSWER],
    "tags": [
        user("<b>quarn</b>"),
        says("<i>blenth</i>", FIRST),
        result('{"a": "<x>resulk</x>"}'),
        ANSWER,
        user("<tool_response>\nzubbel\n</tool_response>"),
        says("krell"),
    ],
    "empty result": [ASKED, says("blenth", FIRST), result(""), ANSWER],
    "two turns at once": [ASKED, says("blenth"), ANSWER, *MORE],
    "ends with a user": [ASKED, says("blenth"), AGAIN],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "fetchum",
            "description": "describo",
            "parameters": {"type": "object", "properties": {"argone": {"type": "string"}}, "required": []},
        },
    }
]
