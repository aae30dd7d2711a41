"""``echo``: the text of a prompt, and the offsets of its tokens in it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from llamatap.model import Model

__all__ = ["offsets_in", "text_of"]


def text_of(model: Model, given: str | Sequence[int]) -> str:
    """The text of a prompt: as given, or the text of its token ids, special tokens included."""
    if isinstance(given, str):
        return given
    return b"".join(map(model.token_bytes, given)).decode(errors="replace")


def offsets_in(model: Model, given: str | Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The offset of each token in :func:`text_of`, in characters.

    A token inside a character begins where the character does. A BOS that the tokenizer added is empty, and a
    blank that it added before the text does not count.
    """
    pieces = [model.token_bytes(token) for token in tokens]
    skip, left = 0, sum(map(len, pieces))
    if isinstance(given, str):
        text = given.encode()
        joined = b"".join(pieces)
        added = len(tokens) > 0 and tokens[0] == model.bos_token and not text.startswith(pieces[0])
        begin = len(pieces[0]) if added else 0
        found = joined.find(text, begin)
        # If the tokenizer changes texts, the offsets are approximate.
        skip = begin if found < 0 else found
        left = len(text)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, n_characters = [], 0
    for piece in pieces:
        offsets.append(n_characters)
        part = piece[skip:][:left]
        skip = max(skip - len(piece), 0)
        left -= len(part)
        n_characters += len(decoder.decode(part))
    return offsets
