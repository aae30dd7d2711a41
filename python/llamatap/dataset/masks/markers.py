"""Markers in messages: characters that show where a chat template writes the text of a message.

A marker is a character that the conversation does not contain. It is put beside the text of a message, which
itself stays unchanged. If the template renders the same text apart from the markers, they show where each
piece lies.
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

__all__ = ["COVERAGES", "Coverage", "MarkedMessages", "Marker", "MarkerKind", "Message", "Place", "Rendering"]

Message = Mapping[str, Any]

# Markers are ideographs of CJK extension B: no template trims, folds or searches for them.
_FIRST, _LAST = 0x20000, 0x2A6DF
_LETTER = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
# Their spelling in ASCII-only JSON.
_ESCAPED = re.compile(rf"{_LETTER.pattern}|\\ud8[4-6][0-9a-f]\\ud[c-f][0-9a-f]{{2}}")

# Fields of a content's parts that may hold text.
_TEXTS = ("text", "thinking", "content")


@dataclass(frozen=True)
class Coverage:
    """Degree to which a conversation gets markers. Templates that react to markers get fewer.

    :ivar blanks: blank contents of roles other than the assistant; some templates treat blank contents
        differently.
    :ivar names: names of functions, which some templates compare.
    :ivar ends: the ends of what other roles say, where some templates look for a command.
    :ivar systems: system messages, which may consist of a command only.
    """

    blanks: bool = True
    names: bool = True
    ends: bool = True
    systems: bool = True


#: Coverages to try, the largest first.
COVERAGES = (
    Coverage(),
    Coverage(blanks=False),
    Coverage(blanks=False, names=False, ends=False),
    Coverage(blanks=False, names=False, ends=False, systems=False),
)


class MarkerKind(enum.Enum):
    """The meaning of a marker."""

    BEGIN = enum.auto()
    """Text of a role other than the assistant begins here."""
    END = enum.auto()
    """Text of any role ended before."""
    NAME = enum.auto()
    """The name of a called function ended before. Templates may repeat the name with the result."""
    GENERATION_START = enum.auto()
    """The template's ``{% generation %}`` begins."""
    GENERATION_END = enum.auto()
    """The template's ``{% generation %}`` ends."""


@dataclass(frozen=True)
class Marker:
    """A marker.

    :ivar letter: the character.
    :ivar message: the index of the message that it is in; -1 for markers that the template itself writes.
    :ivar own: whether it marks text that the assistant says.
    """

    letter: str
    kind: MarkerKind
    message: int
    own: bool


@dataclass(frozen=True)
class Place:
    """Position of a marker in a rendered text: the offset of the next character, markers not counted."""

    position: int
    marker: Marker


@dataclass(frozen=True)
class Rendering:
    """The output of a template, with its markers taken out.

    :ivar text: the output without markers.
    :ivar places: the places of the markers, in order.
    """

    text: str
    places: Sequence[Place]

    def ends_of_message(self, message: int) -> list[Place]:
        """The places of the markers of an assistant's message, in order; repeated names left out."""
        return [
            place
            for place in self.without_repeated_names()
            if place.marker.own and place.marker.message == message
        ]

    def without_repeated_names(self) -> Iterator[Place]:
        """The places, except names that the template repeats."""
        seen = set()
        for place in self.places:
            if place.marker.kind is not MarkerKind.NAME or place.marker.letter not in seen:
                yield place
            seen.add(place.marker.letter)


class MarkedMessages:
    """A conversation with markers.

    :param text: the rendered conversation, whose characters are not used as markers.
    :ivar messages: the messages with markers.
    :ivar variables: variables that have a template write markers around its ``{% generation %}``.
    """

    def __init__(self, messages: Sequence[Message], text: str, coverage: Coverage) -> None:
        taken = {_letter(found) for found in _letters(text)}
        self._free = (chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in taken)
        self._markers: dict[str, Marker] = {}
        self._coverage = coverage
        self.variables: dict[str, Any] = {
            GENERATION_START: self._new(MarkerKind.GENERATION_START),
            GENERATION_END: self._new(MarkerKind.GENERATION_END),
        }
        self.messages: list[Message] = [self._marked(*pair) for pair in enumerate(messages)]

    def assistant_speaks(self, message: int) -> bool:
        """Whether the assistant says anything in a message."""
        return any(marker.own and marker.message == message for marker in self._markers.values())

    def has_marker(self, message: int) -> bool:
        """Whether a message has any marker."""
        return any(marker.message == message for marker in self._markers.values())

    def read(self, rendered: str) -> Rendering:
        """Take the markers out of a template's output for these messages."""
        pieces: list[str] = []
        places: list[Place] = []
        length = last = 0
        for found in _letters(rendered):
            marker = self._markers.get(_letter(found))
            if marker is not None:
                pieces.append(rendered[last : found.start()])
                length += found.start() - last
                last = found.end()
                places.append(Place(length, marker))
        return Rendering("".join([*pieces, rendered[last:]]), places)

    def _new(self, kind: MarkerKind, message: int = -1, own: bool = False) -> str:
        letter = next(self._free, None)
        if letter is None:
            raise InvalidInputError("there are more messages than markers to distinguish them")
        self._markers[letter] = Marker(letter, kind, message, own)
        return letter

    def _marked(self, index: int, message: Message) -> Message:
        result = dict(message)

        def ended(text: str) -> str:
            return self._ended(text, MarkerKind.END, index)

        def between(text: str) -> str:
            return self._between(text, index)

        if message.get("role") != "assistant":
            system = message.get("role") in ("system", "developer")
            if "content" in message and (self._coverage.systems or not system):
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
        if self._coverage.names and isinstance(call.get("name"), str):
            result["name"] = self._ended(call["name"], MarkerKind.NAME, index)
        if "arguments" in call:
            result["arguments"] = _strings(
                call["arguments"], lambda text: self._ended(text, MarkerKind.END, index), typed=False
            )
        return result

    def _ended(self, text: str, kind: MarkerKind, message: int) -> str:
        """The text with a marker after its last non-blank character."""
        end = len(text.rstrip())
        return text[:end] + self._new(kind, message, own=True) + text[end:] if end else text

    def _between(self, text: str, message: int) -> str:
        """The text with markers around it, but inside enclosing tags, which templates may look for."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if end == 0:
            if not self._coverage.blanks:
                return text
            begin = 0
        else:
            if text[begin] == "<":
                begin = text.find(">", begin, end) + 1 or begin
            if text[end - 1] == ">":
                end = max(text.rfind("<", begin, end), begin)
        first = self._new(MarkerKind.BEGIN, message)
        last = self._new(MarkerKind.END, message) if self._coverage.ends else ""
        return f"{text[:begin]}{first}{text[begin:end]}{last}{text[end:]}"


def _letters(text: str) -> Iterator[re.Match[str]]:
    """Characters of a text that may be markers."""
    # The longer pattern takes three times as long.
    return (_ESCAPED if "\\ud8" in text else _LETTER).finditer(text)


def _letter(found: re.Match[str]) -> str:
    letter: str = found[0] if len(found[0]) == 1 else json.loads(f'"{found[0]}"')
    return letter


def _strings(value: Any, change: Callable[[str], str], *, typed: bool = True) -> Any:
    """A copy of a value with all of its strings changed.

    :param typed: in mappings with a ``type`` (parts of a content), change only the fields that hold text.
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
