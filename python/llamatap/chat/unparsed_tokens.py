"""Finding control tokens that a chat template writes and the model's file does not mark as such.

A tokenizer parses the tokens that the file marks as control or user-defined. One that is marked as normal, by
a converter's mistake, is split into pieces, and the model reads a chat that it was never trained on.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    from llamatap._native import _core

__all__ = ["find_unparsed", "probe_texts", "warning_text"]

# Maximum number of characters of a token.
_LONGEST = 64
# Maximum number of pieces that are looked up. No known template writes more than 4,000; a hostile one may.
_MOST_PIECES = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = "quarn"
_TOOL = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": _WORD,
        "parameters": {"type": "object", "properties": {_WORD: {"type": "string", "description": _WORD}}},
    },
}


def _chats() -> Iterator[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]]:
    """Chats that together make a template write all its tokens, with their variables."""
    user, answer = {"role": "user", "content": _WORD}, {"role": "assistant", "content": _WORD}
    call = {"type": "function", "id": "123456789", "function": {"name": _WORD, "arguments": {_WORD: _WORD}}}
    result = {"role": "tool", "tool_call_id": "123456789", "name": _WORD, "content": _WORD}
    yield [user], {}
    yield [user, answer, user, {**answer, "reasoning_content": _WORD}], {}
    yield [{"role": "system", "content": _WORD}, user, answer], {}
    yield [user, {**answer, "content": "", "tool_calls": [call]}, result, answer], {"tools": [_TOOL]}


def probe_texts(render: Callable[..., str]) -> list[str]:
    """The texts that a template writes around the messages of some chats.

    :param render: renders messages, with variables; it raises InvalidInputError.
    """
    found = []
    for messages, variables in _chats():
        for prompt in (False, True):
            try:
                text = render(messages, add_generation_prompt=prompt, **variables)
            except InvalidInputError:
                # The template refuses system messages, tools or this chat.
                continue
            found.append(text.replace(_WORD, " "))
    return found


def find_unparsed(vocab: _core.Model, texts: Iterable[str]) -> dict[str, int]:
    """Find the control tokens in texts that the tokenizer splits: parts of words that look like a control
    token and are spelled as a token of the vocabulary, which the tokenizer does not give for them.

    :returns: spelling and id of each, in the order of the texts.
    """
    words = dict.fromkeys(word for text in texts for word in text.split())
    pieces = itertools.chain.from_iterable(map(_pieces, words))
    candidates = list(dict.fromkeys(itertools.islice(pieces, _MOST_PIECES)))
    # A template may write lone surrogates, which no token contains.
    candidates = [text for text in candidates if text.isascii() or not _SURROGATE.search(text)]
    ids = vocab.find_tokens(candidates)
    found = {text: token for text, token in zip(candidates, ids, strict=True) if token is not None}
    return {
        text: token
        for text, token in found.items()
        if token not in vocab.tokenize(text.encode(), False, True).tolist()
    }


def warning_text(tokens: Mapping[str, int]) -> str:
    """A warning that names the tokens that the tokenizer splits, with advice."""
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
    letters = [index for index, letter in enumerate(word) if letter.isalnum()]
    # A word of marks only (a ruler) has no parts; any other has at most _LONGEST for each of its marks.
    for first in marks:
        following = bisect_right(letters, first)
        if following == len(letters):
            return
        nearest = bisect_right(marks, letters[following])
        for last in marks[nearest : bisect_left(marks, first + _LONGEST)]:
            yield word[first : last + 1]
