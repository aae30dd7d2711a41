"""Empty thoughts: the frame that a chat template writes for a thought when the message has none.

Qwen3's template begins the last turn with ``<think>\\n\\n</think>`` and omits that in earlier turns; other
templates begin every turn so, or close what the prompt opened (``</think>``). It is not part of any message,
and a model that is trained on it learns to stop thinking.

The frame is the text that a template writes around a thought. It is found by rendering a test message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llamatap.chat.messages import THOUGHT_FIELDS
from llamatap.dataset.masks.assistant_turns import Render, Turn, assistant_turns
from llamatap.dataset.masks.markers import Message
from llamatap.errors import InvalidInputError

__all__ = ["ThoughtFrame", "find_frames", "without_empty_thought"]

# Characters of the markers' range, which templates leave unchanged.
_THOUGHT, _CONTENT = "\U0002a6d0", "\U0002a6d1"
# Written by templates that take no thoughts from messages (DeepSeek-V3.2).
_CLOSE = "</think>"
# Matches at most one tag.
_OPEN = re.compile(r"\s*(<[^<>]*>)?\s*")


@dataclass(frozen=True)
class ThoughtFrame:
    """The text that a template writes around a thought.

    :ivar before: the text between the start of the turn and the thought. It may lack the opening tag, which
        the prompt has then.
    :ivar after: the text between the thought and the content.
    """

    before: str
    after: str

    @cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(r"\s*".join(map(re.escape, self.after.split())))

    def is_said(self, content: str) -> bool:
        """Whether a content itself begins with an empty thought."""
        found = self._after.search(content)
        return found is not None and _OPEN.fullmatch(content, 0, found.start()) is not None

    def end(self, text: str, turn: Turn) -> int | None:
        """The end of the frame that a turn begins with; None if there is none, or it holds a thought."""
        found = self._after.search(text, _earliest(turn, self.after), turn.limit)
        if found is None or not _squeeze(self.before).startswith(_squeeze(text[turn.start : found.start()])):
            return None
        blanks = self.after[len(self.after.rstrip()) :]
        return found.end() + (len(blanks) if text.startswith(blanks, found.end()) else 0)


def find_frames(render: Render) -> list[ThoughtFrame]:
    """The frames that a template writes, one for each message field that it takes thoughts from."""
    return list(dict.fromkeys(frame for name in (*THOUGHT_FIELDS, None) for frame in _frame(render, name)))


def _frame(render: Render, name: str | None) -> Iterator[ThoughtFrame]:
    """The frame of one field, if the template has one.

    :param name: the field; None for what a template writes without any thought.
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
        # The template refuses such messages, ignores the field, or its turns cannot be located.
        return
    if text[start:content].strip():
        yield ThoughtFrame(text[turn.start : stop], text[start:content])


def without_empty_thought(
    turn: Turn, text: str, message: Message | None, frames: Iterable[ThoughtFrame]
) -> Turn:
    """The turn, starting after the empty thought that the template put at its beginning, if it did.

    :param text: the rendered conversation.
    :param message: the turn's message. An empty thought in its own content stays.
    :param frames: the frames of the template.
    """
    for frame in frames:
        end = frame.end(text, turn)
        if end is not None and not frame.is_said(_plain_text((message or {}).get("content"))):
            return replace(turn, start=end, text_end=max(turn.text_end, end), prompt=None)
    return turn


def _earliest(turn: Turn, close: str) -> int:
    """The first position where a closing tag may begin: a prompt with an opening tag shares its "<"."""
    return turn.start if turn.prompt is None else max(turn.start - len(close), 0)


def _plain_text(content: Any) -> str:
    """The text of a content; for a content in parts, the concatenation of their texts."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _squeeze(text: str) -> str:
    """The text without blanks."""
    return "".join(text.split())
