"""Aligning tokens with their text: the bytes of each token in the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.model import Model

__all__ = ["TokenAligner", "TokenSpans"]

# SentencePiece's blank (U+2581) in a vocabulary that only has its bytes.
_BLANK = [b"\xe2", b"\x96", b"\x81"]
# The rest of a text is compared in one go before this token.
_LATEST = 3


@dataclass(frozen=True)
class TokenSpans:
    """Tokens of a text and their bytes [begin, end) in it.

    :ivar tokens: int32 ``(n,)``.
    :ivar begins: int64 ``(n,)``.
    :ivar ends: int64 ``(n,)``.
    """

    tokens: NDArray[np.int32]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def first_from(self, byte: int) -> int:
        """The index of the first token that begins at a byte or after it."""
        return int(np.searchsorted(self.begins, byte))

    def count_until(self, byte: int) -> int:
        """The number of tokens that end at a byte or before it."""
        return int(np.searchsorted(self.ends, byte, side="right"))


class TokenAligner:
    """Aligns the tokens of texts with their bytes; caches the bytes of tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        if token not in self._pieces:
            self._pieces[token] = self._model.token_bytes(token)
        return self._pieces[token]

    def align(self, text: str) -> TokenSpans:
        """Tokenise a text, and find the bytes of each token.

        Some tokenizers add BOS, EOS and a blank before words, or drop blanks beside special tokens.

        :raises InvalidInputError: the tokens are not the text's, byte for byte.
        """
        tokens = self._model.tokenize(text)
        data = text.encode()
        begins = np.zeros(len(tokens), np.int64)
        ends = np.zeros(len(tokens), np.int64)
        pieces = [self.piece(token) for token in tokens.tolist()]
        position = index = 0
        while index < len(tokens):
            # Mostly the rest is the concatenation of its tokens, at the latest after BOS and a first blank.
            if index < _LATEST and b"".join(pieces[index:]) == data[position:]:
                lengths = np.array([len(piece) for piece in pieces[index:]], np.int64)
                ends[index:] = position + np.cumsum(lengths)
                begins[index:] = ends[index:] - lengths
                break
            begin, length, count = self._locate(data, position, tokens, pieces, index)
            position = begin + length
            begins[index : index + count], ends[index : index + count] = begin, position
            index += count
        return TokenSpans(tokens, begins, ends)

    def _locate(
        self, data: bytes, position: int, tokens: NDArray[np.int32], pieces: list[bytes], index: int
    ) -> tuple[int, int, int]:
        """Locate a token at or near a position: its first byte, its number of bytes, and how many tokens
        share them."""
        piece = pieces[index]
        begin = _find(data, piece, position)
        if begin is not None:
            return begin, len(piece), 1
        if self._is_added(tokens, index):
            return position, 0, 1
        if pieces[index : index + 3] == _BLANK and data[position : position + 1] == b" ":
            return position, 1, 3
        if piece.startswith(b" "):
            piece = piece[1:]
            begin = _find(data, piece, position)
            if begin is not None:
                return begin, len(piece), 1
        raise InvalidInputError(
            f"the tokenizer changes the text: token {index} is {piece!r}, but the text has "
            f"{data[position : position + 20]!r}; give input_ids with a loss_mask instead"
        )

    def _is_added(self, tokens: NDArray[np.int32], index: int) -> bool:
        """Whether the tokenizer may have added a token: BOS or EOS, first or last."""
        added = (self._model.bos_token, self._model.eos_token)
        return index in (0, len(tokens) - 1) and int(tokens[index]) in added


def _find(data: bytes, piece: bytes, position: int) -> int | None:
    """Find the start of a piece, at a position or after blanks that follow it; None if it is not there."""
    if data.startswith(piece, position):
        return position
    blanks = len(data) - position - len(data[position:].lstrip())
    # Tokenizers drop nothing but blanks.
    return position + blanks if blanks and data.startswith(piece, position + blanks) else None
