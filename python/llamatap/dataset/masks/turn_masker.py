"""TurnMasker: from the assistant's turns in a text to the tokens that the loss is computed on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.masks.assistant_turns import Turn
from llamatap.dataset.masks.token_spans import TokenAligner, TokenSpans
from llamatap.errors import InvalidInputError
from llamatap.model import Model

__all__ = ["TurnMasker"]


class TurnMasker:
    """Tokenises texts and masks the tokens of their turns; caches facts of the vocabulary."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._aligner = TokenAligner(model)
        self._ends_generation: dict[int, bool] = {}

    def mask(self, text: str, turns: Sequence[Turn]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The tokens of a text, int32 ``(n,)``, and whether each belongs to a turn, bool ``(n,)``.

        A token belongs to a turn if all of its bytes do. A turn includes the token that ends it, if there is
        one, and nothing that the template writes after it.

        :raises InvalidInputError: the tokens are not the text's, byte for byte; or no token ends a turn whose
            end is not known otherwise.
        """
        spans = self._aligner.align(text)
        chosen = np.zeros(len(spans.tokens), np.bool_)

        def byte(position: int) -> int:
            return len(text[:position].encode())

        for turn in turns:
            first = spans.first_from(byte(turn.start))
            if turn.prompt is not None:
                first = self._common_prefix(spans.tokens, turn.prompt)
            end = None if turn.end is None else byte(turn.end)
            if end is None or not turn.closed:
                latest = spans.first_from(byte(turn.limit))
                if turn.follows is not None:
                    latest = min(latest, spans.first_from(byte(turn.follows)) + 1)
                end = self._end(spans, byte(turn.text_end), end, latest)
            last = spans.count_until(end)
            chosen[first:last] = True
        return spans.tokens, chosen

    def _common_prefix(self, tokens: NDArray[np.int32], prompt: str) -> int:
        """The number of leading tokens that a text and a prompt have in common."""
        other = self._model.tokenize(prompt)
        length = min(len(tokens), len(other))
        differs = np.flatnonzero(tokens[:length] != other[:length])
        return int(differs[0]) if len(differs) else length

    def _end(self, spans: TokenSpans, text_end: int, end: int | None, latest: int) -> int:
        """The byte after the token that ends a turn; if none does, after all that the turn writes.

        :param text_end: the byte after the last text of the turn's message.
        :param end: the byte after what the template writes to end the turn, if known.
        :param latest: the first token that may not end the turn any more.
        """
        first = spans.first_from(text_end)
        for index in range(first, latest):
            if self._is_end(int(spans.tokens[index])):
                return int(spans.ends[index])
        if end is None:
            raise InvalidInputError(
                "no token ends an assistant's turn; give input_ids with a loss_mask instead"
            )
        # Blanks between turns belong to no turn.
        last = spans.count_until(end)
        while last > first and not self._aligner.piece(int(spans.tokens[last - 1])).strip():
            last -= 1
        return max(int(spans.ends[last - 1]), text_end) if last else text_end

    def _is_end(self, token: int) -> bool:
        if token not in self._ends_generation:
            self._ends_generation[token] = self._model.is_end_of_generation(token)
        return self._ends_generation[token]
