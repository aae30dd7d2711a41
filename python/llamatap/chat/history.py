"""Messages as a chat template reads them, where templates differ: contents that are null, arguments of calls.

OpenAI's clients send the history of a tool call with ``content: null`` and arguments in JSON. Most templates
fail on the one or print "None", and many write the other as a string within JSON; a few want just that. Which
form a template reads is found by rendering a call of our own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamatap._validate import shown
from llamatap.errors import InvalidInputError

__all__ = ["CALLS", "SAID", "THOUGHTS", "history"]

#: Fields of an assistant's message beside its content: the names that chat templates know for thoughts.
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")
#: The names that they know for calls.
CALLS = ("tool_calls", "function_call")
#: Where an assistant's message may say something that is no content.
SAID = (*THOUGHTS, *CALLS)

# A word that no template has of its own, and a name.
_VALUE, _NAME = "qvorn", "qvelb"
_AS_TEXT = json.dumps({_NAME: _VALUE})


@dataclass(frozen=True)
class _Calls:
    """The form in which a template reads a message that calls a tool.

    :ivar content: in place of none, or of an empty one.
    :ivar mapping: whether it reads arguments that are a mapping.
    :ivar text: whether it reads arguments in JSON, as they are.
    """

    content: str | None
    mapping: bool
    text: bool


def history(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[str, Sequence[Mapping[str, Any]]], str],
) -> list[Mapping[str, Any]]:
    """The messages in the form that a template reads.

    :param render: renders messages by a template, with tools; it raises InvalidInputError.
    :raises InvalidInputError: there are no messages, one says nothing, or has calls that are none.
    """
    if not messages:
        raise InvalidInputError('messages is empty: give at least one {"role": ..., "content": ...}')
    return [_read(template, index, message, render) for index, message in enumerate(messages)]


def _read(
    template: str,
    index: int,
    message: Mapping[str, Any],
    render: Callable[[str, Sequence[Mapping[str, Any]]], str],
) -> Mapping[str, Any]:
    _check_calls(index, message)
    calls = next((name for name in CALLS if message.get(name)), None)
    if message.get("content") is not None and calls is None:
        return message
    found = dict(message)
    if found.get("content") is None:
        if not any(value for name, value in message.items() if name not in ("role", "name")):
            raise InvalidInputError(
                f"message {index} says nothing: expected a content, found {shown(message):.80}"
            )
        # Those of other roles may have their say in fields of their own.
        if "content" in found or found.get("role") in ("assistant", "tool"):
            found["content"] = ""
    if calls is not None and found.get("content") == "":
        found["content"] = _calls(template, render).content
    if isinstance(found.get("tool_calls"), Sequence) and not isinstance(found["tool_calls"], str):
        reads = _calls(template, render)
        if reads.mapping != reads.text:
            found["tool_calls"] = [_call(call, reads) for call in found["tool_calls"]]
    return found


def _check_calls(index: int, message: Mapping[str, Any]) -> None:
    """The calls of a message are calls; null and empty ones are none.

    :raises InvalidInputError: they are something else.
    """
    several, single = message.get("tool_calls"), message.get("function_call")
    if isinstance(several, (list, tuple)):
        calls = list(several)
    else:
        # Templates would leave it out, or fail.
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
    # Some data sets have the function itself in place of the call.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _call(call: Any, reads: _Calls) -> Any:
    """A call with its arguments in the one form that the template reads."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], reads)}
    arguments = call.get("arguments")
    if reads.mapping and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": parsed} if isinstance(parsed, Mapping) else call
    if reads.text and isinstance(arguments, Mapping):
        try:
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        except (TypeError, ValueError):
            # Python's callers may have anything in them.
            return call
    return call


@functools.lru_cache(64)
def _calls(template: str, render: Callable[[str, Sequence[Mapping[str, Any]]], str]) -> _Calls:
    def written(content: str | None, arguments: Any) -> str | None:
        """A call as the template writes it, blanks aside; None where it fails or leaves the call out."""
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
            return _Calls(content, mapping is not None, text is not None and mapping in (text, None))
    # Where neither is to be seen: what transformers documents.
    return _Calls("", True, False)
