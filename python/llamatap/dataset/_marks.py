"""Marks in what messages say, which show where a chat template writes it.

A mark is a character that the conversation does not hold. It is put beside what is said, which stays as it
is: a template that writes the same text but for the marks has shown where each of them lies.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamatap.chat.messages import THOUGHT_FIELDS
from llamatap.chat.template import GENERATION_END, GENERATION_START
from llamatap.errors import InvalidInputError

__all__ = ["DEGREES", "Degree", "Kind", "Mark", "Marks", "Message", "Place", "Writing"]

Message = Mapping[str, Any]

# The marks are ideographs of CJK extension B, which no template trims, folds or looks for.
_FIRST, _LAST = 0x20000, 0x2A6DF
_LETTER = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
# How JSON of ASCII characters spells them.
_ESCAPED = re.compile(rf"{_LETTER.pattern}|\\ud8[4-6][0-9a-f]\\ud[c-f][0-9a-f]{{2}}")

# Fields of a content's parts that may hold text.
_TEXTS = ("text", "thinking", "content")


@dataclass(frozen=True)
class Degree:
    """How much of a conversation has marks.

    :ivar blanks: contents of others that say nothing, which some templates tell from those that do.
    :ivar names: names of functions, which some compare.
    :ivar ends: the ends of what others say, where some look for a command.
    :ivar systems: what a system message says, which may be a command and nothing else.
    """

    blanks: bool = True
    names: bool = True
    ends: bool = True
    systems: bool = True


#: The degrees to try, the best one first.
DEGREES = (
    Degree(),
    Degree(blanks=False),
    Degree(blanks=False, names=False, ends=False),
    Degree(blanks=False, names=False, ends=False, systems=False),
)


class Kind(enum.Enum):
    """The meaning of a mark."""

    BEGIN = enum.auto()
    """Something begins here that the assistant does not say."""
    END = enum.auto()
    """Something that somebody says has ended before."""
    NAME = enum.auto()
    """The name of a called function has ended. Templates may write it again with the result."""
    GENERATION_START = enum.auto()
    GENERATION_END = enum.auto()


@dataclass(frozen=True)
class Mark:
    """A mark.

    :ivar message: in which it is, by its index; -1 of a template's own marks.
    :ivar own: whether the assistant says what it marks.
    """

    letter: str
    kind: Kind
    message: int
    own: bool


@dataclass(frozen=True)
class Place:
    """Where a mark was in a text: the offset of the character after it, marks not counted."""

    position: int
    mark: Mark


@dataclass(frozen=True)
class Writing:
    """The output of a template, with its marks taken out.

    :ivar text: without the marks.
    :ivar places: of the marks, in order.
    """

    text: str
    places: Sequence[Place]

    def said(self, message: int) -> list[Place]:
        """Where the ends of what a message of the assistant says are, in order; of names the first ones."""
        return [place for place in self.once() if place.mark.own and place.mark.message == message]

    def once(self) -> Iterator[Place]:
        """The places, without those of names that are written again."""
        seen = set()
        for place in self.places:
            if place.mark.kind is not Kind.NAME or place.mark.letter not in seen:
                yield place
            seen.add(place.mark.letter)


class Marks:
    """A conversation with marks.

    :ivar messages: with marks in what they say.
    :ivar variables: with which a template writes marks where its ``{% generation %}`` begins and ends.
    """

    def __init__(self, messages: Sequence[Message], text: str, degree: Degree) -> None:
        taken = {_letter(found) for found in _letters(text)}
        self._free = (chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in taken)
        self._marks: dict[str, Mark] = {}
        self._degree = degree
        self.variables: dict[str, Any] = {
            GENERATION_START: self._new(Kind.GENERATION_START),
            GENERATION_END: self._new(Kind.GENERATION_END),
        }
        self.messages: list[Message] = [self._marked(*pair) for pair in enumerate(messages)]

    def says(self, message: int) -> bool:
        """Whether the assistant says anything in a message."""
        return any(mark.own and mark.message == message for mark in self._marks.values())

    def holds(self, message: int) -> bool:
        """Whether a message has any mark."""
        return any(mark.message == message for mark in self._marks.values())

    def read(self, rendered: str) -> Writing:
        """Take the marks out of what a template made of the messages."""
        pieces: list[str] = []
        places: list[Place] = []
        length = last = 0
        for found in _letters(rendered):
            mark = self._marks.get(_letter(found))
            if mark is not None:
                pieces.append(rendered[last : found.start()])
                length += found.start() - last
                last = found.end()
                places.append(Place(length, mark))
        return Writing("".join([*pieces, rendered[last:]]), places)

    def _new(self, kind: Kind, message: int = -1, own: bool = False) -> str:
        letter = next(self._free, None)
        if letter is None:
            raise InvalidInputError("there are more messages than marks to tell them apart by")
        self._marks[letter] = Mark(letter, kind, message, own)
        return letter

    def _marked(self, index: int, message: Message) -> Message:
        result = dict(message)

        def ended(text: str) -> str:
            return self._ended(text, Kind.END, index)

        def between(text: str) -> str:
            return self._between(text, index)

        if message.get("role") != "assistant":
            system = message.get("role") in ("system", "developer")
            if "content" in message and (self._degree.systems or not system):
                result["content"] = _strings(message["content"], between)
            return result
        for key in ("content", *THOUGHT_FIELDS):
            if key in message:
                result[key] = _strings(message[key], ended)
        if isinstance(message.get("tool_calls"), Sequence):
            result["tool_calls"] = [self._call(call, index) for call in message["tool_calls"]]
        if "function_call" in message:
            result["function_call"] = self._call(message["function_call"], index)
        if "tool_responses" in message:
            result["tool_responses"] = _strings(message["tool_responses"], between)
        return result

    def _call(self, call: Any, index: int) -> Any:
        if not isinstance(call, Mapping):
            return call
        result = dict(call)
        if isinstance(call.get("function"), Mapping):
            result["function"] = self._call(call["function"], index)
        if self._degree.names and isinstance(call.get("name"), str):
            result["name"] = self._ended(call["name"], Kind.NAME, index)
        if "arguments" in call:
            result["arguments"] = _strings(
                call["arguments"], lambda text: self._ended(text, Kind.END, index), typed=False
            )
        return result

    def _ended(self, text: str, kind: Kind, message: int) -> str:
        """A text with a mark after its last character that is no blank."""
        end = len(text.rstrip())
        return text[:end] + self._new(kind, message, own=True) + text[end:] if end else text

    def _between(self, text: str, message: int) -> str:
        """A text with marks around it, and within tags around it: those are for templates to recognise."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if end == 0:
            if not self._degree.blanks:
                return text
            begin = 0
        else:
            if text[begin] == "<":
                begin = text.find(">", begin, end) + 1 or begin
            if text[end - 1] == ">":
                end = max(text.rfind("<", begin, end), begin)
        first = self._new(Kind.BEGIN, message)
        last = self._new(Kind.END, message) if self._degree.ends else ""
        return f"{text[:begin]}{first}{text[begin:end]}{last}{text[end:]}"


def _letters(text: str) -> Iterator[re.Match[str]]:
    """Where a text may have marks."""
    # The longer pattern takes three times as long.
    return (_ESCAPED if "\\ud8" in text else _LETTER).finditer(text)


def _letter(found: re.Match[str]) -> str:
    letter: str = found[0] if len(found[0]) == 1 else json.loads(f'"{found[0]}"')
    return letter


def _strings(value: Any, change: Callable[[str], str], *, typed: bool = True) -> Any:
    """A value with all texts in it changed.

    :param typed: of mappings with a ``type``, which are parts of a content, only what is read as text.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        part = typed and isinstance(value.get("type"), str)
        return {
            key: _strings(item, change, typed=typed) if not part or key in _TEXTS else item
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_strings(item, change, typed=typed) for item in value]
    return value
