"""Control tokens that a chat template writes and a file does not mark as such.

A tokenizer parses the tokens that the file marks as control or user-defined. One that is marked as normal, by
a converter's mistake, is split into pieces, and the model reads a chat that it was never trained on.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    from llamatap._native import _core

__all__ = ["probe_texts", "say", "unparsed"]

# Characters of a token.
_LONGEST = 64
_SAID = "quarn"
_TOOL = {
    "type": "function",
    "function": {
        "name": _SAID,
        "description": _SAID,
        "parameters": {"type": "object", "properties": {_SAID: {"type": "string", "description": _SAID}}},
    },
}


def _chats() -> Iterator[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]]:
    """Chats in which a template may write all that it has, with their variables."""
    user, answer = {"role": "user", "content": _SAID}, {"role": "assistant", "content": _SAID}
    call = {"type": "function", "id": "123456789", "function": {"name": _SAID, "arguments": {_SAID: _SAID}}}
    result = {"role": "tool", "tool_call_id": "123456789", "name": _SAID, "content": _SAID}
    yield [user], {}
    yield [user, answer, user, {**answer, "reasoning_content": _SAID}], {}
    yield [{"role": "system", "content": _SAID}, user, answer], {}
    yield [user, {**answer, "content": "", "tool_calls": [call]}, result, answer], {"tools": [_TOOL]}


def probe_texts(render: Callable[..., str]) -> list[str]:
    """What a template writes into chats, without what is said.

    :param render: renders messages, with variables; it raises InvalidInputError.
    """
    found = []
    for messages, variables in _chats():
        for prompt in (False, True):
            try:
                text = render(messages, add_generation_prompt=prompt, **variables)
            except InvalidInputError:
                # Of systems, tools or such a chat it will have nothing.
                continue
            found.append(text.replace(_SAID, " "))
    return found


def unparsed(vocab: _core.Model, texts: Iterable[str]) -> dict[str, int]:
    """The tokens in texts that stand in the vocabulary for what looks like a control token and that the
    tokenizer never makes: their spelling and ids, in the order of the texts."""
    candidates = list(
        dict.fromkeys(piece for text in texts for word in text.split() for piece in _pieces(word))
    )
    ids = vocab.find_tokens(candidates)
    found = {text: token for text, token in zip(candidates, ids, strict=True) if token is not None}
    return {
        text: token
        for text, token in found.items()
        if token not in vocab.tokenize(text.encode(), False, True).tolist()
    }


def say(tokens: Mapping[str, int]) -> str:
    """Says which tokens a template writes in vain, and what to do."""
    names = " and ".join(f"{text}, token {token}" for text, token in tokens.items())
    marked, are, their = (
        ("a control token", "it is", "its type")
        if len(tokens) == 1
        else ("control tokens", "they are", "their types")
    )
    return (
        f"the template writes {names}, which this file does not mark as {marked}, so {are} not parsed; set "
        f"{their} to 3 (control) in the file's tokenizer.ggml.token_type"
    )


def _pieces(word: str) -> Iterator[str]:
    """The parts of a word that begin and end with a mark and have a letter between: "<|im_start|>"."""
    marks = [index for index, letter in enumerate(word) if unicodedata.category(letter)[0] in "PS"]
    for first in marks:
        for last in marks:
            piece = word[first : last + 1]
            if len(piece) <= _LONGEST and any(map(str.isalnum, piece)):
                yield piece
