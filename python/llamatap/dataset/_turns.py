"""Where an assistant's turns lie in a rendered conversation.

Chat templates are programs: they trim what is said, leave out thoughts of earlier turns, add empty ones, and
tell the last turn apart. So a turn is found by what the template makes of the conversation, never by its
wording:

* It begins where the prompt that would have asked for it ends: the messages before it, rendered with
  ``add_generation_prompt``.
* It ends after what follows the content. The content is replaced by a mark, and what the template writes
  after the mark must be what the plain text ends with.

Templates with ``{% generation %}`` say themselves what the assistant generates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamatap.chat import GENERATION_END, GENERATION_START
from llamatap.errors import InvalidInputError

__all__ = ["Render", "Turn", "assistant_turns"]

Message = Mapping[str, Any]


class Render(Protocol):
    """What renders messages by one template, always with the same variables."""

    def __call__(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = False, **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class Turn:
    """Offsets of characters in the rendered conversation.

    :ivar start: of the first that the assistant generates.
    :ivar content_end: after what the message says.
    :ivar end: after what the template writes to end the turn, and before the next message; None where that
        cannot be told from what begins the next message.
    :ivar prompt: a prompt that the text leaves in the middle of what it begins for the assistant
        (``<think>``): the turn starts at the first token that is not of it.
    :ivar closed: whether the template says that the turn ends at ``end``: nothing is left to look for.
    :ivar open: whether ``end`` lies in what begins the next message: some token before it ends the turn.
    """

    start: int
    content_end: int
    end: int | None
    prompt: str | None = None
    closed: bool = False
    open: bool = False


def assistant_turns(render: Render, messages: Sequence[Message], text: str) -> list[Turn]:
    """The assistant's turns that answer somebody, in order.

    What an assistant says before any user did is no answer and is left out.

    :param render: renders messages, as ``text`` was.
    :param messages: the conversation, each with a ``role``.
    :param text: the conversation, rendered without a generation prompt.
    :raises InvalidInputError: a turn cannot be told.
    """
    mark = _mark(text)
    tagged = _tagged(render, messages, text, mark)
    if tagged is not None:
        return tagged
    turns = []
    asked = False
    for index, message in enumerate(messages):
        role = message.get("role")
        asked = asked or role not in ("system", "developer", "assistant")
        if role == "assistant" and asked:
            turns.append(_turn(render, messages, index, text, mark))
    for before, after in itertools.pairwise(turns):
        if after.start < (before.end or before.content_end):
            raise InvalidInputError("the template does not write the assistant's turns one after another")
    return turns


def _mark(text: str) -> str:
    """A character of the private use area that the text does not hold."""
    for code in range(0xE000, 0xF8FF):
        if chr(code) not in text and chr(code + 1) not in text:
            return chr(code)
    raise InvalidInputError("the text holds every character of Unicode's private use area")


def _tagged(render: Render, messages: Sequence[Message], text: str, mark: str) -> list[Turn] | None:
    """The turns that the template's own ``{% generation %}`` marks; None where it has none."""
    other = chr(ord(mark) + 1)
    marks: dict[str, Any] = {GENERATION_START: mark, GENERATION_END: other}
    marked = render(messages, **marks)
    if mark not in marked:
        return None
    pieces = marked.replace(other, mark).split(mark)
    found = [letter for letter in marked if letter in (mark, other)]
    if "".join(pieces) != text or found != [mark, other] * (len(found) // 2):
        raise InvalidInputError("the template writes another text when its {% generation %} is marked")
    turns = []
    position = 0
    for number, piece in enumerate(pieces):
        if number % 2:
            end = position + len(piece)
            turns.append(Turn(position, end, end, closed=True))
        position += len(piece)
    return turns


def _turn(render: Render, messages: Sequence[Message], index: int, text: str, mark: str) -> Turn:
    try:
        marked = _with_content(messages[index], mark)
        if marked is None:
            return _without_content(render, messages, index, text)
        before, tail = _split(render, [*messages[:index], marked, *messages[index + 1 :]], mark)
        start, prompt = _start(render, messages[:index], text, before)
        content_end = len(text) - len(tail)
        if not text.endswith(tail) or content_end < start:
            raise InvalidInputError("what follows its content depends on the content")
        own_tail = tail
        if index + 1 < len(messages):
            own_tail = _split(render, [*messages[:index], marked], mark)[1]
        # The last turn may end otherwise than those before it.
        end = content_end + len(own_tail) if tail.startswith(own_tail) else None
        return Turn(start, content_end, end, prompt)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"message {index}: where this turn of the assistant lies in the text cannot be told ({error}); "
            "give input_ids with a loss_mask instead"
        ) from None


def _with_content(message: Message, mark: str) -> Message | None:
    """The message with the mark for what it says; None where it says nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": mark} if content.strip() else None
    if isinstance(content, Sequence):
        for place in reversed(range(len(content))):
            part = content[place]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part["text"].strip():
                parts = [*content[:place], {**part, "text": mark}, *content[place + 1 :]]
                return {**message, "content": parts}
    return None


def _split(render: Render, messages: Sequence[Message], mark: str) -> tuple[str, str]:
    """What is written before and after the mark that one of the messages holds."""
    before, *after = render(messages).split(mark)
    if len(after) != 1:
        found = "does not write" if not after else f"writes {len(after)} times"
        raise InvalidInputError(f"the template {found} what the message says")
    return before, after[0]


def _start(
    render: Render, history: Sequence[Message], text: str, before: str | None
) -> tuple[int, str | None]:
    """Where a turn starts, and the prompt that the text leaves early, if it does.

    :param history: the messages before the turn.
    :param before: what is written before a mark in place of the turn's content.
    """
    prompt = render(history, add_generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt), None
    written = render(history)
    if text.startswith(written) and prompt.startswith(written):
        return len(os.path.commonprefix([prompt, text])), prompt
    # Earlier turns are written otherwise once this one is there, and the content follows its header at once.
    header = prompt[len(written) :]
    if before and prompt.startswith(written) and text.startswith(before) and before.endswith(header):
        return len(before), None
    raise InvalidInputError("the template writes earlier messages otherwise once the turn is there")


def _without_content(render: Render, messages: Sequence[Message], index: int, text: str) -> Turn:
    """A turn of tool calls or thoughts alone."""
    start, prompt = _start(render, messages[:index], text, None)
    until = render(messages[: index + 1])
    if text.startswith(until) and len(until) >= start:
        return Turn(start, start, len(until), prompt)
    # The turn was written otherwise while it was the last.
    if index + 1 < len(messages):
        mark = _mark(text)
        following = _with_content(messages[index + 1], mark)
        if following is not None:
            before = _split(render, [*messages[: index + 1], following, *messages[index + 2 :]], mark)[0]
            if text.startswith(before) and len(before) >= start:
                return Turn(start, start, len(before), prompt, open=True)
    raise InvalidInputError("it has no content, and later messages change what is written of it")
