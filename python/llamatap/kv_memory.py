"""The KV cache of a context, or the state of a recurrent model: its operations on sequences."""

from __future__ import annotations

from collections.abc import Callable

from llamatap._native import _core
from llamatap._validate import NotCopied, integer

__all__ = ["Memory", "sequence_id"]


class Memory(NotCopied):
    """The memory of a context: the KV cache, or the state of recurrent models, of each sequence.

    Ranges of positions are half-open, ``[p0, p1)``; None stands for the start and for the end.

    While a generation or a :class:`llamatap.Session` uses the context, calls that change the memory raise
    BusyError.
    """

    def __init__(self, readable: Callable[[], _core.Context], writable: Callable[[], _core.Context]) -> None:
        # The core's object, for calls that read and for calls that change the memory.
        self._readable = readable
        self._writable = writable

    def clear(self) -> None:
        """Remove all sequences, and set the whole cache to zero."""
        self._writable().memory_clear()

    def remove(self, seq: int, p0: int | None = None, p1: int | None = None) -> None:
        """Remove the positions ``[p0, p1)`` of a sequence. Once no sequence is left, the cache is set to
        zero; until then, NaN that a removed sequence left in it can reach others.

        :param p0: None for the beginning.
        :param p1: None for the end.
        :raises InvalidInputError: no such sequence id, or an invalid range of positions.
        :raises UnsupportedError: the memory cannot remove a part: a recurrent model's, or a sliding
            window's without ``swa_full``.
        """
        self._writable().memory_remove(sequence_id(seq), _position(p0), _position(p1))

    def copy(self, source: int, target: int, p0: int | None = None, p1: int | None = None) -> None:
        """Copy the positions ``[p0, p1)`` of ``source`` to ``target``, replacing what it holds there; a whole
        sequence replaces all that it holds.

        :raises InvalidInputError: no such sequence id, or an invalid range of positions.
        :raises UnsupportedError: a part of a sequence, where only whole ones can be copied; or a part without
            the tokens that its sliding windows reach back to.
        """
        self._writable().memory_copy(sequence_id(source), sequence_id(target), _position(p0), _position(p1))

    def keep(self, seq: int) -> None:
        """Remove all sequences except one.

        :raises InvalidInputError: no such sequence id.
        """
        self._writable().memory_keep(sequence_id(seq))

    def shift(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Move the positions ``[p0, p1)`` of a sequence by ``delta``. Positions that it shares with other
        sequences (:meth:`copy`, batches of several sequences) move there too.

        :raises InvalidInputError: no such sequence id, or an invalid range of positions; or two tokens of a
            sequence, this one or one that shares some, would get the same position.
        :raises UnsupportedError: the model's positions cannot be moved; those of a recurrent model only in
            whole sequences that share nothing.
        """
        self._writable().memory_shift(sequence_id(seq), _position(p0), _position(p1), integer("delta", delta))

    def first(self, seq: int) -> int:
        """The first position of a sequence in memory; -1 when there is none.

        :raises InvalidInputError: no such sequence id.
        """
        return self._readable().memory_first(sequence_id(seq))

    def last(self, seq: int) -> int:
        """The last position of a sequence in memory; -1 when there is none.

        :raises InvalidInputError: no such sequence id.
        """
        return self._readable().memory_last(sequence_id(seq))


def _position(position: int | None) -> int:
    if position is None:
        return -1
    return integer("a position", position, 0)


def sequence_id(seq: int) -> int:
    """`seq` as an int; the engine checks its range."""
    return integer("a sequence id", seq)
