"""Drafters that see only the text: a class with one method, or a function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap._validate import instance, integer
from llamatap.context import Batch
from llamatap.drafting.draft_length import MaxTokens, numeric_n_max, request_limit
from llamatap.drafting.drafter import Draft, Drafter, DraftRequest, check_requests
from llamatap.errors import InvalidInputError
from llamatap.states import States
from llamatap.tokenizer import token_array

__all__ = ["CallableDrafter", "TextDrafter"]


class _TokenBuffer:
    """The tokens of a sequence, in an array with room to grow.

    :ivar n: the number of tokens.
    :ivar start: position of the first token of the last batch.
    """

    def __init__(self) -> None:
        self.n = 0
        self.start = 0
        self._array = np.zeros(256, np.int32)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Write tokens from ``start`` on; the sequence ends after them."""
        end = start + len(tokens)
        if end > len(self._array):
            self._array = np.concatenate([self._array[:start], np.zeros(2 * end - start, np.int32)])
        self._array[start:end] = tokens
        self.start, self.n = start, end

    def followed_by(self, token: int) -> NDArray[np.int32]:
        """A copy with one more token."""
        return np.append(self._array[: self.n], np.int32(token))


class TextDrafter(Drafter):
    """Drafts from only the text of a sequence: a subclass implements :meth:`guess`, and calls this class's
    ``__init__`` if it has its own. The accepted tokens of each sequence are kept here.
    """

    draws = False

    def __init__(self) -> None:
        self._buffers: dict[int, _TokenBuffer] = {}

    @abstractmethod
    def guess(self, tokens: NDArray[np.int32], n_max: int) -> ArrayLike | None:
        """Guess the token ids that follow a text; empty or None for no draft.

        :param tokens: int32 ``(n,)``: the whole text, including prompt and newest token; a copy, which may be
            changed.
        :param n_max: maximum number of tokens that can be used; more are cut off.
        """

    def process(self, batch: Batch, states: States | None = None) -> None:
        instance("batch", batch, Batch)
        if batch.n_embd > 0:
            raise InvalidInputError("the drafter needs token ids; this batch holds embeddings")
        entries: dict[int, list[tuple[int, int]]] = {}
        for position, token, seqs in zip(
            batch.positions.tolist(), batch.tokens.tolist(), batch.sequences, strict=True
        ):
            for seq in seqs:
                entries.setdefault(seq, []).append((position, token))
        for seq, found in entries.items():
            found.sort()
            known = self._buffers.get(seq)
            expected = min(found[0][0], 0 if known is None else known.n)
            for position, _ in found:
                if position != expected:
                    raise InvalidInputError(
                        f"sequence {seq} continues at position {expected}, not {position}; a drafter must "
                        "process every batch"
                    )
                expected += 1
        for seq, found in entries.items():
            buffer = self._buffers.setdefault(seq, _TokenBuffer())
            buffer.write(found[0][0], [token for _, token in found])

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        check_requests(requests)
        drafts = {}
        n_own = request_limit(self.n_max)
        for seq, request in requests.items():
            buffer = self._buffers.get(seq) or _TokenBuffer()
            if request.position != buffer.n:
                raise InvalidInputError(
                    f"sequence {seq}: the last token must be at position {buffer.n}, not {request.position}"
                )
            n_max = max(min(n_own, request.n_max), 0)
            found = self.guess(buffer.followed_by(request.last_token), n_max)
            try:
                tokens = token_array([] if found is None else found)
            except InvalidInputError as error:
                raise InvalidInputError(
                    f"{type(self).__name__}.guess() did not return a draft: {error}"
                ) from None
            drafts[seq] = Draft(tokens[:n_max])
        return drafts

    def accept(self, seq: int, n: int) -> None:
        buffer = self._buffers.get(seq) or _TokenBuffer()
        n_entries = buffer.n - buffer.start
        if not 0 <= integer("n", n) < n_entries:
            raise InvalidInputError(
                f"sequence {seq} had {n_entries} entries in the last batch: the newest token and "
                f"{max(n_entries - 1, 0)} drafted ones; it cannot accept {n}"
            )
        buffer.n = buffer.start + n + 1

    def reset(self, seq: int) -> None:
        self._buffers.pop(seq, None)


class CallableDrafter(TextDrafter):
    """Drafts with a function of the whole text, such as llama-cpp-python's ``LlamaDraftModel`` objects.

    :param function: called with the token ids so far, int32 ``(n,)``; returns guesses of the next ones, or
        None.
    :param n_max: maximum number of tokens in a draft, or "auto".
    :raises InvalidInputError: not a function, or ``n_max`` is out of range.
    """

    def __init__(self, function: Callable[[NDArray[np.int32]], Any], *, n_max: MaxTokens = 10) -> None:
        super().__init__()
        if not callable(function):
            raise InvalidInputError(f"function must be callable, not {type(function).__name__}")
        numeric_n_max(n_max)
        self.n_max = n_max
        self._function = function

    def guess(self, tokens: NDArray[np.int32], n_max: int) -> Any:
        return self._function(tokens)
