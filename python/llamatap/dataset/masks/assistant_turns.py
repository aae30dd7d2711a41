"""Locating the assistant's turns in a rendered conversation.

Chat templates are programs: they trim contents, drop them beside tool calls, drop thoughts of earlier turns,
add empty ones, and render the last turn differently. So a turn is located by how the template renders the
conversation, never by its wording. Markers in all texts of the messages show where each is written:

* A turn begins where the prompt that asks for it ends: the messages before it, rendered with
  ``add_generation_prompt``.
* It ends after the last text of its message and what the template writes to end it: the end of the messages
  up to it, rendered alone.
* It contains no text of other roles, and all text of its message; otherwise the conversation is refused.

Templates with ``{% generation %}`` mark what the assistant generates themselves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llamatap.dataset.masks.markers import (
    COVERAGES,
    MarkedMessages,
    Marker,
    MarkerKind,
    Message,
    Place,
    Rendering,
)
from llamatap.errors import InvalidInputError

__all__ = ["Render", "Turn", "assistant_turns"]


class Render(Protocol):
    """Renders messages with one template, always with the same variables."""

    def __call__(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = False, **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, in offsets of characters in the rendered conversation.

    :ivar start: the first character that the assistant generates.
    :ivar text_end: the end of the last text of the message (content, thought or tool call), trailing blanks
        excluded.
    :ivar end: the end of what the template writes to end the turn; None if that cannot be distinguished from
        the beginning of the next message: then a token must end the turn.
    :ivar limit: the position where another role begins to speak: the token that ends the turn begins before.
    :ivar follows: the position of the first text after the turn, blanks excluded. The first token that begins
        there may still end the turn (GLM's ``<|user|>``), no later one may.
    :ivar prompt: a prompt that the text departs from within what the prompt begins for the assistant
        (``<think>``): the turn starts at the first token that differs from the prompt's.
    :ivar closed: whether ``end`` is final: no further token is searched for.
    :ivar message: the index of the turn's message; None if unknown.
    """

    start: int
    text_end: int
    end: int | None
    limit: int
    follows: int | None = None
    prompt: str | None = None
    closed: bool = False
    message: int | None = None


def assistant_turns(render: Render, messages: Sequence[Message], text: str) -> list[Turn]:
    """Locate the assistant's turns that answer somebody, in order.

    Messages of the assistant before the first user message are left out.

    :param render: renders messages as ``text`` was rendered.
    :param messages: the conversation, each message with a ``role``.
    :param text: the conversation, rendered without a generation prompt.
    :raises InvalidInputError: a turn cannot be located.
    """
    marked, whole = _mark(render, messages, text)
    if any(place.marker.kind is MarkerKind.GENERATION_START for place in whole.places):
        return _generation_turns(whole)
    conversation = _Conversation(render, marked, whole)
    turns = []
    asked = False
    for index, message in enumerate(messages):
        role = message.get("role")
        asked = asked or role not in ("system", "developer", "assistant")
        if role == "assistant" and asked:
            turns.append(conversation.turn(index))
    for number, (before, after) in enumerate(itertools.pairwise(turns)):
        if after.start < (before.end or before.text_end):
            raise InvalidInputError("the template does not write the assistant's turns one after another")
        turns[number] = replace(before, limit=min(before.limit, after.start))
    return turns


def _mark(render: Render, messages: Sequence[Message], text: str) -> tuple[MarkedMessages, Rendering]:
    """The conversation with as many markers as its text allows, and that text with their places."""
    for coverage in COVERAGES:
        marked = MarkedMessages(messages, text, coverage)
        whole = marked.read(render(marked.messages, **marked.variables))
        if whole.text == text:
            return marked, whole
    raise InvalidInputError(
        "the template renders other text when markers are put into the messages, so the assistant's turns "
        "cannot be located; give input_ids with a loss_mask instead"
    )


def _generation_turns(whole: Rendering) -> list[Turn]:
    """The turns that the template's own ``{% generation %}`` marks."""
    turns = []
    start: int | None = None
    message: int | None = None
    for place in whole.places:
        kind = place.marker.kind
        message = place.marker.message if place.marker.own else message
        if kind is MarkerKind.GENERATION_START and start is None:
            start, message = place.position, None
        elif kind is MarkerKind.GENERATION_END and start is not None:
            end = place.position
            turns.append(Turn(start, end, end, end, closed=True, message=message))
            start = None
        elif kind in (MarkerKind.GENERATION_START, MarkerKind.GENERATION_END):
            raise InvalidInputError("the template's {% generation %} and {% endgeneration %} are not paired")
        elif kind is MarkerKind.BEGIN and start is not None:
            raise InvalidInputError("the template's {% generation %} contains text of another role")
    return turns


@dataclass(frozen=True)
class _Start:
    """The start of a turn.

    :ivar position: :attr:`Turn.start`.
    :ivar prompt: :attr:`Turn.prompt`.
    :ivar anchor: the last marker before it that prompt and text have in common.
    :ivar anchor_position: the anchor's position in the text; 0 without an anchor.
    :ivar trailer: text that the template writes after the last message, whichever that is.
    """

    position: int
    prompt: str | None
    anchor: Marker | None
    anchor_position: int
    trailer: str = ""


class _Conversation:
    """A conversation as a template renders it, whole and in part."""

    def __init__(self, render: Render, marked: MarkedMessages, whole: Rendering) -> None:
        self._render = render
        self._marked = marked
        self._whole = whole
        self._header: str | None = None

    def turn(self, index: int) -> Turn:
        """Locate the turn of the assistant's message ``index``."""
        try:
            return self._turn(index)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"message {index}: this assistant turn cannot be located in the text "
                f"({error}); give input_ids with a loss_mask instead"
            ) from None

    def _turn(self, index: int) -> Turn:
        said = self._whole.ends_of_message(index)
        if not said and self._marked.assistant_speaks(index):
            raise InvalidInputError("the template does not write what the message says")
        start = self._start(index, said[0].position if said else None)
        if said:
            start = self._without_header(index, start, said[0].position)
        limit = self._limit(index, start.position)
        if said and not start.position <= said[0].position <= said[-1].position <= limit:
            raise InvalidInputError("the template does not write what the message says in one piece")
        last = said[-1].position if said else start.position
        text = self._whole.text
        end: int | None = None
        if index + 1 < len(self._marked.messages):
            end = follows = self._end(index, start, said[-1].marker if said else None, last)
            # Only markers show where the next message begins.
            if end is None and not self._marked.has_marker(index + 1):
                raise InvalidInputError("later messages change what ends it")
        else:
            follows = max(last, len(text) - len(start.trailer))
            end = None if start.trailer else follows
        if end is not None and not last <= end <= limit:
            raise InvalidInputError("the template ends it after text of another role")
        if follows is not None:
            follows = len(text) - len(text[follows:].lstrip())
        return Turn(start.position, last, end, limit, follows, start.prompt, message=index)

    def _start(self, index: int, first: int | None) -> _Start:
        """Locate the start of a turn.

        :param first: the end of the first text of its message; None if it says nothing.
        """
        text = self._whole.text
        history = self._marked.messages[:index]
        prompt = self._read(history, add_generation_prompt=True)
        anchor, in_prompt, in_text = self._anchor(prompt, first)
        tail = prompt.text[in_prompt:]
        if text.startswith(tail, in_text):
            return _Start(in_text + len(tail), None, anchor, in_text)
        written = self._read(history)
        body = _text_after(written, written.places, anchor)
        if body is not None and tail.startswith(body) and text.startswith(body, in_text):
            common = len(os.path.commonprefix([tail, text[in_text:]]))
            return _Start(in_text + common, text[:in_text] + tail, anchor, in_text)
        # The template writes a trailer after the last message.
        trailer = os.path.commonprefix([written.text[::-1], text[:in_text:-1]])[::-1]
        header = _generation_prompt(prompt, written)
        if header and first is not None and text.count(header, in_text, first) == 1:
            return _Start(text.index(header, in_text) + len(header), None, anchor, in_text, trailer)
        # The template always writes a generation prompt, requested or not.
        common = len(os.path.commonprefix([tail, text[in_text:]]))
        if header == "" and body is not None and (common or history[-1].get("role") == "assistant"):
            return _Start(in_text + common, text[:in_text] + tail, anchor, in_text, trailer)
        raise InvalidInputError("the template renders earlier messages differently once the turn is there")

    def _without_header(self, index: int, start: _Start, first: int) -> _Start:
        """The start of the turn after a header that the template writes and no generation prompt has.

        :param first: the end of the first text of its message.
        """
        content = self._marked.messages[index].get("content")
        between = self._whole.text[start.position : first]
        if not isinstance(content, str) or not (content := self._marked.read(content).text.strip()):
            return start
        before, found, after = between.rpartition(content)
        if not found or after.strip() or not before.strip():
            return start
        history = self._marked.messages[:index]
        if self._read(history, add_generation_prompt=True).text != self._read(history).text:
            return start
        return replace(start, position=start.position + len(before))

    def _anchor(self, prompt: Rendering, first: int | None) -> tuple[Marker | None, int, int]:
        """The last marker before a turn that a prompt and the text have in common; its position in each."""
        in_text = {
            place.marker: place.position
            for place in self._whole.places
            if first is None or place.position <= first
        }
        for place in reversed(prompt.places):
            if place.marker in in_text:
                return place.marker, place.position, in_text[place.marker]
        return None, 0, 0

    def _limit(self, index: int, start: int) -> int:
        """The first position after the start of a turn where text of another message begins or has ended."""
        for place in self._whole.without_repeated_names():
            marker = place.marker
            other = not marker.own or marker.message != index
            if other and place.position >= start + (marker.kind is not MarkerKind.BEGIN):
                return place.position
        return len(self._whole.text)

    def _end(self, index: int, start: _Start, marker: Marker | None, last: int) -> int | None:
        """The end of a turn that other messages follow, if it is written as when none follow.

        :param marker: the marker of the last text of its message.
        :param last: the end of that text.
        """
        text = self._whole.text
        until = self._marked.messages[: index + 1]
        reference, position = (marker, last) if marker else (start.anchor, start.anchor_position)
        alone = self._read(until)
        own = _text_after(alone, alone.without_repeated_names(), reference)
        if own is not None and text.startswith(own, position):
            return position + len(own)
        # The template may end the last turn differently from earlier ones, which a generation prompt follows.
        if self._header is None:
            # Remembered for later turns: after an assistant's message a generation prompt may be empty.
            history = self._marked.messages[:index]
            self._header = _generation_prompt(
                self._read(history, add_generation_prompt=True), self._read(history)
            )
        prompt = self._read(until, add_generation_prompt=True)
        asking = _text_after(prompt, prompt.without_repeated_names(), reference)
        if self._header and asking is not None and asking.endswith(self._header):
            own = asking[: len(asking) - len(self._header)]
            if text.startswith(own, position):
                return position + len(own)
        return None

    def _read(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Rendering:
        return self._marked.read(self._render(messages, add_generation_prompt=add_generation_prompt))


def _text_after(rendering: Rendering, places: Iterable[Place], marker: Marker | None) -> str | None:
    """The text after the last place of a marker: all of it without a marker, None if it has no place."""
    if marker is None:
        return rendering.text
    found = [place.position for place in places if place.marker is marker]
    return rendering.text[found[-1] :] if found else None


def _generation_prompt(prompt: Rendering, written: Rendering) -> str | None:
    """The generation prompt: what ``prompt`` has after ``written``; None if it does not begin with that."""
    return prompt.text[len(written.text) :] if prompt.text.startswith(written.text) else None
