"""From turns of an assistant in a text to the tokens that a loss is computed on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset._turns import Turn
from llamatap.errors import InvalidInputError
from llamatap.model import Model

__all__ = ["Masker"]

# SentencePiece's blank (U+2581), in a vocabulary that has its bytes alone.
_BLANK = [b"\xe2", b"\x96", b"\x81"]
# Until which token the rest of a text is compared at once.
_LATEST = 3


class Masker:
    """Tokens of texts, and which of them are in the turns; remembers what it learnt of the vocabulary."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def mask(self, text: str, turns: Sequence[Turn]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The text's tokens, int32 ``(n,)``, and whether each is of a turn, bool ``(n,)``.

        A token is of a turn when all of its bytes are. A turn includes the token that ends it, where there
        is one, and nothing that the template writes after that.

        :raises InvalidInputError: the tokens are not those of the text, byte for byte, or no token ends a
            turn that cannot be told otherwise.
        """
        tokens = self._model.tokenize(text)
        begins, ends = self._spans(text, tokens)
        chosen = np.zeros(len(tokens), np.bool_)

        def byte(position: int) -> int:
            return len(text[:position].encode())

        for turn in turns:
            first = int(np.searchsorted(begins, byte(turn.start)))
            if turn.prompt is not None:
                first = self._common(tokens, turn.prompt)
            end = None if turn.end is None else byte(turn.end)
            if end is None or not turn.closed:
                latest = int(np.searchsorted(begins, byte(turn.limit)))
                if turn.follows is not None:
                    latest = min(latest, int(np.searchsorted(begins, byte(turn.follows))) + 1)
                end = self._end(tokens, begins, ends, byte(turn.said), end, latest)
            last = int(np.searchsorted(ends, end, side="right"))
            chosen[first:last] = True
        return tokens, chosen

    def _common(self, tokens: NDArray[np.int32], prompt: str) -> int:
        """How many tokens a text has in common with a prompt."""
        other = self._model.tokenize(prompt)
        length = min(len(tokens), len(other))
        differs = np.flatnonzero(tokens[:length] != other[:length])
        return int(differs[0]) if len(differs) else length

    def _end(
        self,
        tokens: NDArray[np.int32],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        said: int,
        end: int | None,
        latest: int,
    ) -> int:
        """The byte after the token that ends a turn, or after all that the turn writes where none does.

        :param said: the byte after the last that the turn says.
        :param end: the byte after what the template writes to end it, if that is known.
        :param latest: the first token after it that does not end it.
        """
        first = int(np.searchsorted(begins, said))
        for index in range(first, latest):
            if self._is_end(int(tokens[index])):
                return int(ends[index])
        if end is None:
            raise InvalidInputError(
                "no token ends an assistant's turn; give input_ids with a loss_mask instead"
            )
        # Blanks that only set turns apart do not belong to them.
        last = int(np.searchsorted(ends, end, side="right"))
        while last > first and not self._piece(int(tokens[last - 1])).strip():
            last -= 1
        return max(int(ends[last - 1]), said) if last else said

    def _is_end(self, token: int) -> bool:
        if token not in self._ends:
            self._ends[token] = self._model.is_end_of_generation(token)
        return self._ends[token]

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self._model.token_bytes(token)
        return self._pieces[token]

    def _spans(self, text: str, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bytes [begin, end) of the text that each token stands for.

        Some tokenizers add BOS, EOS and a blank before words, or leave out blanks beside special tokens.
        """
        data = text.encode()
        begins = np.zeros(len(tokens), np.int64)
        ends = np.zeros(len(tokens), np.int64)
        pieces = [self._piece(token) for token in tokens.tolist()]
        position = index = 0
        while index < len(tokens):
            # Mostly the rest is its tokens as they stand, at the latest after BOS and a first word's blank.
            if index < _LATEST and b"".join(pieces[index:]) == data[position:]:
                lengths = np.array([len(piece) for piece in pieces[index:]], np.int64)
                ends[index:] = position + np.cumsum(lengths)
                begins[index:] = ends[index:] - lengths
                break
            piece, count = pieces[index], 1
            begin = self._found(data, piece, position)
            if begin is None and self._is_added(tokens, index):
                begin, piece = position, b""
            elif (
                begin is None
                and pieces[index : index + 3] == _BLANK
                and data[position : position + 1] == b" "
            ):
                begin, piece, count = position, b" ", 3
            elif begin is None and piece.startswith(b" "):
                piece = piece[1:]
                begin = self._found(data, piece, position)
            if begin is None:
                raise InvalidInputError(
                    f"the tokenizer changes the text: token {index} is {piece!r}, where the text has "
                    f"{data[position : position + 20]!r}; give input_ids with a loss_mask instead"
                )
            position = begin + len(piece)
            begins[index : index + count], ends[index : index + count] = begin, position
            index += count
        return begins, ends

    def _is_added(self, tokens: NDArray[np.int32], index: int) -> bool:
        """Whether it may be a token that the tokenizer adds."""
        ends = (self._model.bos_token, self._model.eos_token)
        return index in (0, len(tokens) - 1) and int(tokens[index]) in ends

    @staticmethod
    def _found(data: bytes, piece: bytes, position: int) -> int | None:
        """Where a piece begins, blanks before it aside; None where it does not follow."""
        if data.startswith(piece, position):
            return position
        blanks = len(data) - position - len(data[position:].lstrip())
        # Nothing but blanks is ever left out.
        return position + blanks if blanks and data.startswith(piece, position + blanks) else None
