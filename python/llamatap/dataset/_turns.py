"""Where an assistant's turns lie in a rendered conversation.

Chat templates are programs: they trim what is said, leave it out beside tool calls, leave out thoughts of
earlier turns, add empty ones, and tell the last turn apart. So a turn is found by what the template makes of
the conversation, never by its wording. Everything that is said gets marks, which show where it is written:

* A turn begins where the prompt that would have asked for it ends: the messages before it, rendered with
  ``add_generation_prompt``.
* It ends after the last that the message says, and what the template writes to end it: what the messages up
  to it, rendered alone, end with.
* Nothing that others say lies in it, and all that the message says does, or the conversation is refused.

Templates with ``{% generation %}`` say themselves what the assistant generates.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llamatap.dataset._marks import DEGREES, Kind, Mark, Marks, Message, Place, Writing
from llamatap.errors import InvalidInputError

__all__ = ["Render", "Turn", "assistant_turns"]


class Render(Protocol):
    """Renders messages by one template, always with the same variables."""

    def __call__(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = False, **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class Turn:
    """Offsets of characters in the rendered conversation.

    :ivar start: of the first that the assistant generates.
    :ivar said: after the last that the message says, blanks aside: content, thoughts or a tool call.
    :ivar end: after what the template writes to end the turn; None where that cannot be told from what
        begins the next message: some token must end the turn.
    :ivar limit: where others begin to say something: the token that ends the turn begins before.
    :ivar follows: where something follows that is not of the turn, blanks aside. The first token that begins
        there may still end it (GLM's ``<|user|>``), none after that.
    :ivar prompt: a prompt that the text leaves in the middle of what it begins for the assistant
        (``<think>``): the turn starts at the first token that is not of it.
    :ivar closed: whether the template says that the turn ends at ``end``: nothing is left to look for.
    :ivar message: the index of the message that the turn is of; None where that is not known.
    """

    start: int
    said: int
    end: int | None
    limit: int
    follows: int | None = None
    prompt: str | None = None
    closed: bool = False
    message: int | None = None


def assistant_turns(render: Render, messages: Sequence[Message], text: str) -> list[Turn]:
    """The assistant's turns that answer somebody, in order.

    What an assistant says before any user did is no answer and is left out.

    :param render: renders messages, as ``text`` was.
    :param messages: the conversation, each with a ``role``.
    :param text: the conversation, rendered without a generation prompt.
    :raises InvalidInputError: a turn cannot be told.
    """
    for degree in DEGREES:
        marks = Marks(messages, text, degree)
        whole = marks.read(render(marks.messages, **marks.variables))
        if whole.text == text:
            break
    else:
        raise InvalidInputError(
            "the template writes another text around marks in what is said, so where the assistant's turns "
            "lie cannot be told; give input_ids with a loss_mask instead"
        )
    if any(place.mark.kind is Kind.GENERATION_START for place in whole.places):
        return _tagged(whole)
    conversation = _Conversation(render, marks, whole)
    turns = []
    asked = False
    for index, message in enumerate(messages):
        role = message.get("role")
        asked = asked or role not in ("system", "developer", "assistant")
        if role == "assistant" and asked:
            turns.append(conversation.turn(index))
    for number, (before, after) in enumerate(itertools.pairwise(turns)):
        if after.start < (before.end or before.said):
            raise InvalidInputError("the template does not write the assistant's turns one after another")
        turns[number] = replace(before, limit=min(before.limit, after.start))
    return turns


def _tagged(whole: Writing) -> list[Turn]:
    """The turns that the template's own ``{% generation %}`` marks."""
    turns = []
    start: int | None = None
    message: int | None = None
    for place in whole.places:
        kind = place.mark.kind
        message = place.mark.message if place.mark.own else message
        if kind is Kind.GENERATION_START and start is None:
            start, message = place.position, None
        elif kind is Kind.GENERATION_END and start is not None:
            end = place.position
            turns.append(Turn(start, end, end, end, closed=True, message=message))
            start = None
        elif kind in (Kind.GENERATION_START, Kind.GENERATION_END):
            raise InvalidInputError("the template's {% generation %} and {% endgeneration %} are no pairs")
        elif kind is Kind.BEGIN and start is not None:
            raise InvalidInputError("the template's {% generation %} holds what others say")
    return turns


@dataclass(frozen=True)
class _Start:
    """Where a turn starts.

    :ivar position: as in :class:`Turn`.
    :ivar prompt: as in :class:`Turn`.
    :ivar anchor: the last mark that prompt and text have in common before it.
    :ivar anchored: where that is in the text; 0 where there is none.
    :ivar trailer: what the template writes after the last message, whatever that is.
    """

    position: int
    prompt: str | None
    anchor: Mark | None
    anchored: int
    trailer: str = ""


class _Conversation:
    """A conversation as a template writes it, and parts of it."""

    def __init__(self, render: Render, marks: Marks, whole: Writing) -> None:
        self._render = render
        self._marks = marks
        self._whole = whole
        self._header: str | None = None

    def turn(self, index: int) -> Turn:
        """The turn of the assistant that is message ``index``."""
        try:
            return self._turn(index)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"message {index}: where this turn of the assistant lies in the text cannot be told "
                f"({error}); give input_ids with a loss_mask instead"
            ) from None

    def _turn(self, index: int) -> Turn:
        said = self._whole.said(index)
        if not said and self._marks.says(index):
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
        if index + 1 < len(self._marks.messages):
            end = follows = self._end(index, start, said[-1].mark if said else None, last)
            # Only marks show where the next message begins.
            if end is None and not self._marks.holds(index + 1):
                raise InvalidInputError("later messages change what ends it")
        else:
            follows = max(last, len(text) - len(start.trailer))
            end = None if start.trailer else follows
        if end is not None and not last <= end <= limit:
            raise InvalidInputError("the template ends it after what others say")
        if follows is not None:
            follows = len(text) - len(text[follows:].lstrip())
        return Turn(start.position, last, end, limit, follows, start.prompt, message=index)

    def _start(self, index: int, first: int | None) -> _Start:
        """Where a turn starts.

        :param first: where the first that its message says has ended; None where nothing is said.
        """
        text = self._whole.text
        history = self._marks.messages[:index]
        prompt = self._read(history, add_generation_prompt=True)
        anchor, in_prompt, in_text = self._anchor(prompt, first)
        tail = prompt.text[in_prompt:]
        if text.startswith(tail, in_text):
            return _Start(in_text + len(tail), None, anchor, in_text)
        written = self._read(history)
        body = _after(written, written.places, anchor)
        if body is not None and tail.startswith(body) and text.startswith(body, in_text):
            common = len(os.path.commonprefix([tail, text[in_text:]]))
            return _Start(in_text + common, text[:in_text] + tail, anchor, in_text)
        # The template writes something after the last message, whatever that is.
        trailer = os.path.commonprefix([written.text[::-1], text[:in_text:-1]])[::-1]
        header = _header(prompt, written)
        if header and first is not None and text.count(header, in_text, first) == 1:
            return _Start(text.index(header, in_text) + len(header), None, anchor, in_text, trailer)
        # It writes the prompt whether that is wanted or not.
        common = len(os.path.commonprefix([tail, text[in_text:]]))
        if header == "" and body is not None and (common or history[-1].get("role") == "assistant"):
            return _Start(in_text + common, text[:in_text] + tail, anchor, in_text, trailer)
        raise InvalidInputError("the template writes earlier messages otherwise once the turn is there")

    def _without_header(self, index: int, start: _Start, first: int) -> _Start:
        """Where a turn starts whose header the template writes, and no prompt ends with.

        :param first: where the first that its message says has ended.
        """
        content = self._marks.messages[index].get("content")
        between = self._whole.text[start.position : first]
        if not isinstance(content, str) or not (content := self._marks.read(content).text.strip()):
            return start
        before, found, after = between.rpartition(content)
        if not found or after.strip() or not before.strip():
            return start
        history = self._marks.messages[:index]
        if self._read(history, add_generation_prompt=True).text != self._read(history).text:
            return start
        return replace(start, position=start.position + len(before))

    def _anchor(self, prompt: Writing, first: int | None) -> tuple[Mark | None, int, int]:
        """The last mark that a prompt and the text have in common before a turn, and where it is in both."""
        in_text = {
            place.mark: place.position
            for place in self._whole.places
            if first is None or place.position <= first
        }
        for place in reversed(prompt.places):
            if place.mark in in_text:
                return place.mark, place.position, in_text[place.mark]
        return None, 0, 0

    def _limit(self, index: int, start: int) -> int:
        """Where the first that others say after the start of a turn begins, or has ended at the latest."""
        for place in self._whole.once():
            mark = place.mark
            other = not mark.own or mark.message != index
            if other and place.position >= start + (mark.kind is not Kind.BEGIN):
                return place.position
        return len(self._whole.text)

    def _end(self, index: int, start: _Start, mark: Mark | None, last: int) -> int | None:
        """The end of a turn that others follow, where it is written as when none do.

        :param mark: of the last that its message says.
        :param last: where that has ended.
        """
        text = self._whole.text
        until = self._marks.messages[: index + 1]
        reference, position = (mark, last) if mark else (start.anchor, start.anchored)
        alone = self._read(until)
        own = _after(alone, alone.once(), reference)
        if own is not None and text.startswith(own, position):
            return position + len(own)
        # The last turn may end otherwise than those before it, which a prompt asks for more after.
        if self._header is None:
            # Of this turn or of an earlier one that ended so: after an assistant a prompt may be empty.
            history = self._marks.messages[:index]
            self._header = _header(self._read(history, add_generation_prompt=True), self._read(history))
        prompt = self._read(until, add_generation_prompt=True)
        asking = _after(prompt, prompt.once(), reference)
        if self._header and asking is not None and asking.endswith(self._header):
            own = asking[: len(asking) - len(self._header)]
            if text.startswith(own, position):
                return position + len(own)
        return None

    def _read(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Writing:
        return self._marks.read(self._render(messages, add_generation_prompt=add_generation_prompt))


def _after(writing: Writing, places: Iterable[Place], mark: Mark | None) -> str | None:
    """The text after the last place of a mark, or all of it without a mark; None if the mark has no place."""
    if mark is None:
        return writing.text
    found = [place.position for place in places if place.mark is mark]
    return writing.text[found[-1] :] if found else None


def _header(prompt: Writing, written: Writing) -> str | None:
    """The generation prompt: the end of ``prompt`` after ``written``; None if it does not begin with that."""
    return prompt.text[len(written.text) :] if prompt.text.startswith(written.text) else None
