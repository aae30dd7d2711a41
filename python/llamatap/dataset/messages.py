"""Checked messages of a row: ShareGPT's names renamed, parts of a content joined, tools parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamatap._validate import shown
from llamatap.chat.messages import NON_CONTENT_FIELDS
from llamatap.errors import InvalidInputError

__all__ = ["join_parts", "parse_tools", "read_messages"]

#: ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant"}


def read_messages(value: Any) -> list[Mapping[str, Any]]:
    """The messages of a conversation, with ``role`` and ``content`` for ShareGPT's ``from`` and ``value``.

    :raises InvalidInputError: it is not a list of messages, or a message is empty or has no role.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise InvalidInputError(f"messages must be a list of messages, not {shown(value):.80}")
    messages: list[Mapping[str, Any]] = []
    for index, message in enumerate(value):
        if isinstance(message, Mapping) and "role" not in message and isinstance(message.get("from"), str):
            role = message["from"]
            message = {"role": _ROLES.get(role, role), "content": message.get("value")}
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInputError(f"message {index} must have a role; found {shown(message):.80}")
        # Roles other than the assistant may put their text into other fields.
        names = NON_CONTENT_FIELDS if message["role"] == "assistant" else set(message) - {"role"}
        if message.get("content") is None and not any(message.get(name) for name in names):
            raise InvalidInputError(f"message {index} is empty: expected content, found {shown(message):.80}")
        messages.append(message)
    return messages


def join_parts(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content's parts joined to one text, one line each.

    :raises InvalidInputError: a part is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(
            f"the chat template takes only text, but message {index} has {shown(content):.80}"
        )
    return {**message, "content": "\n".join(map(str, texts))}


def parse_tools(value: Any) -> Any:
    """Parse tools that are given as JSON text.

    :raises InvalidInputError: the text is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"tools is not JSON: {error}") from None
