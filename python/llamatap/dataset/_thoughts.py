"""Empty thoughts: the frame that a chat template writes for a thought when the message has none.

Qwen3's template begins the last turn with ``<think>\\n\\n</think>`` and leaves that out of earlier ones;
others begin every turn so, or close what the prompt opened (``</think>``). Nobody said it, and trained on,
it teaches a model to stop thinking.

The frame is what a template writes around a thought that is there. So one is put into a message of our own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llamatap.chat.messages import THOUGHT_FIELDS
from llamatap.dataset._marks import Message
from llamatap.dataset._turns import Render, Turn, assistant_turns
from llamatap.errors import InvalidInputError

__all__ = ["Frame", "frames", "without_empty_thought"]

# Characters of the marks' range, which templates leave alone.
_THOUGHT, _CONTENT = "\U0002a6d0", "\U0002a6d1"
# How templates close thoughts that take none from messages (DeepSeek-V3.2).
_CLOSE = "</think>"
# A tag at most.
_OPEN = re.compile(r"\s*(<[^<>]*>)?\s*")


@dataclass(frozen=True)
class Frame:
    """The frame that a template writes around a thought.

    :ivar before: between the start of the turn, which the prompt may have opened the thought before, and the
        thought.
    :ivar after: between the thought and the content.
    """

    before: str
    after: str

    @cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(r"\s*".join(map(re.escape, self.after.split())))

    def is_said(self, content: str) -> bool:
        """Whether a content begins with an empty thought itself."""
        found = self._after.search(content)
        return found is not None and _OPEN.fullmatch(content, 0, found.start()) is not None

    def end(self, text: str, turn: Turn) -> int | None:
        """Where the frame that a turn begins with ends; None where there is none, or a thought in it."""
        found = self._after.search(text, _earliest(turn, self.after), turn.limit)
        if found is None or not _dense(self.before).startswith(_dense(text[turn.start : found.start()])):
            return None
        blanks = self.after[len(self.after.rstrip()) :]
        return found.end() + (len(blanks) if text.startswith(blanks, found.end()) else 0)


def frames(render: Render) -> list[Frame]:
    """The frames that a template knows, by each of the fields that a message may have a thought in."""
    return list(dict.fromkeys(frame for name in (*THOUGHT_FIELDS, None) for frame in _frame(render, name)))


def _frame(render: Render, name: str | None) -> Iterator[Frame]:
    """The frame of one field, if the template has one.

    :param name: of the field; None for what a template writes without any thought.
    """
    answer = {"role": "assistant", "content": _CONTENT, **({} if name is None else {name: _THOUGHT})}
    messages = [{"role": "user", "content": "Hi"}, answer]
    try:
        text = render(messages)
        (turn,) = assistant_turns(render, messages, text)
        content = text.index(_CONTENT)
        if name is None:
            stop = start = text.index(_CLOSE, _earliest(turn, _CLOSE), content)
        else:
            stop = text.index(_THOUGHT, turn.start, content)
            start = stop + 1
    except (InvalidInputError, ValueError):
        # The template refuses such messages, does not write the field, or its turns cannot be told.
        return
    if text[start:content].strip():
        yield Frame(text[turn.start : stop], text[start:content])


def without_empty_thought(turn: Turn, text: str, message: Message | None, known: Iterable[Frame]) -> Turn:
    """The turn from after the frame that it begins with, if there is no thought in that.

    :param text: the conversation that the turn is of.
    :param message: whose turn it is. An empty thought that its content has itself is the assistant's.
    :param known: the frames of the template.
    """
    for frame in known:
        end = frame.end(text, turn)
        if end is not None and not frame.is_said(_text((message or {}).get("content"))):
            return replace(turn, start=end, said=max(turn.said, end), prompt=None)
    return turn


def _earliest(turn: Turn, close: str) -> int:
    """Where what closes a thought may begin: a prompt that opens one has the "<" of "</think>" too."""
    return turn.start if turn.prompt is None else max(turn.start - len(close), 0)


def _text(content: Any) -> str:
    """The text of a content; of parts, which are texts or mappings with one, all of it."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _dense(text: str) -> str:
    return "".join(text.split())
