"""Adapting messages to a chat template: contents that are null, and arguments of tool calls.

OpenAI's clients send the history of a tool call with ``content: null`` and arguments in JSON. Most templates
fail on the first or print "None", and many write the second as a string within JSON; a few expect just that.
Which form a template reads is found by rendering a call of our own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamatap._validate import shown
from llamatap.errors import InvalidInputError

__all__ = ["CALL_FIELDS", "NON_CONTENT_FIELDS", "THOUGHT_FIELDS", "adapt_messages"]

#: The names that chat templates know for an assistant's thoughts.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")
#: The names that they know for its tool calls.
CALL_FIELDS = ("tool_calls", "function_call")
#: All fields beside the content in which an assistant's message may say something.
NON_CONTENT_FIELDS = (*THOUGHT_FIELDS, *CALL_FIELDS)

# A value and a name that no template contains by itself.
_VALUE, _NAME = "qvorn", "qvelb"
_AS_TEXT = json.dumps({_NAME: _VALUE})


@dataclass(frozen=True)
class _CallFormat:
    """The form in which a template reads a message that calls a tool.

    :ivar content: the content to write for a null or empty one.
    :ivar mapping: whether arguments may be a mapping.
    :ivar text: whether arguments may be JSON text.
    """

    content: str | None
    mapping: bool
    text: bool


def adapt_messages(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[str, Sequence[Mapping[str, Any]]], str],
) -> list[Mapping[str, Any]]:
    """Convert messages to the form that a template reads.

    :param render: renders messages by a template, with tools; it raises InvalidInputError.
    :raises InvalidInputError: there are no messages, or one is empty or has invalid tool calls.
    """
    if not messages:
        raise InvalidInputError('messages is empty: give at least one {"role": ..., "content": ...}')
    return [_adapt_message(template, index, message, render) for index, message in enumerate(messages)]


def _adapt_message(
    template: str,
    index: int,
    message: Mapping[str, Any],
    render: Callable[[str, Sequence[Mapping[str, Any]]], str],
) -> Mapping[str, Any]:
    _check_calls(index, message)
    calls = next((name for name in CALL_FIELDS if message.get(name)), None)
    if message.get("content") is not None and calls is None:
        return message
    found = dict(message)
    if found.get("content") is None:
        if not any(value for name, value in message.items() if name not in ("role", "name")):
            raise InvalidInputError(f"message {index} is empty: expected content, found {shown(message):.80}")
        # Messages of other roles may have their text in other fields.
        if "content" in found or found.get("role") in ("assistant", "tool"):
            found["content"] = ""
    if calls is not None and found.get("content") == "":
        found["content"] = _call_format(template, render).content
    if isinstance(found.get("tool_calls"), Sequence) and not isinstance(found["tool_calls"], str):
        call_format = _call_format(template, render)
        if call_format.mapping != call_format.text:
            found["tool_calls"] = [_convert_call(call, call_format) for call in found["tool_calls"]]
    return found


def _check_calls(index: int, message: Mapping[str, Any]) -> None:
    """Check the tool calls of a message; null and empty ones are ignored.

    :raises InvalidInputError: they are something else.
    """
    several, single = message.get("tool_calls"), message.get("function_call")
    if isinstance(several, (list, tuple)):
        calls = list(several)
    else:
        # Templates would leave anything else out, or fail.
        calls = [] if several is None or (isinstance(several, str) and not several) else [None]
    if not all(_is_call(call) for call in calls):
        raise InvalidInputError(
            f"message {index}: tool_calls must be a list of calls, each "
            '{"type": "function", "function": {"name": ..., "arguments": ...}}, '
            f"not {shown(several)}"
        )
    if single is not None and not _is_call(single):
        raise InvalidInputError(
            f'message {index}: function_call must be {{"name": ..., "arguments": ...}}, not {shown(single)}'
        )


def _is_call(call: Any) -> bool:
    # Some data sets have the function itself instead of the call.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _convert_call(call: Any, call_format: _CallFormat) -> Any:
    """Convert the arguments of a call to the one form that the template reads."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _convert_call(call["function"], call_format)}
    arguments = call.get("arguments")
    if call_format.mapping and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": parsed} if isinstance(parsed, Mapping) else call
    if call_format.text and isinstance(arguments, Mapping):
        try:
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        except (TypeError, ValueError):
            # Arguments from Python may hold anything.
            return call
    return call


@functools.lru_cache(64)
def _call_format(template: str, render: Callable[[str, Sequence[Mapping[str, Any]]], str]) -> _CallFormat:
    """Find the form in which a template reads calls, by rendering some."""

    def written(content: str | None, arguments: Any) -> str | None:
        """The template's text of a call, without blanks; None if it fails or leaves the call out."""
        function = {"name": "qfrip", "arguments": arguments}
        # Mistral's templates want ids of nine characters.
        call = {"type": "function", "id": "123456789", "function": function}
        messages: list[Mapping[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "123456789", "name": "qfrip", "content": "Yo"},
            {"role": "assistant", "content": "Bye"},
        ]
        try:
            text = render(template, messages)
        except InvalidInputError:
            return None
        # A string within JSON has its quotes escaped.
        return "".join(text.split()) if _VALUE in text and f'\\"{_NAME}' not in text else None

    for content in ("", None):
        mapping, text = written(content, {_NAME: _VALUE}), written(content, _AS_TEXT)
        if mapping or text:
            # Gemma 4's template writes braces around both.
            return _CallFormat(content, mapping is not None, text is not None and mapping in (text, None))
    # Neither appears: the form that transformers documents.
    return _CallFormat("", True, False)
