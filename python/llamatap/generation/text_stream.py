"""Text that grows token by token: characters that are whole, and stop strings found as soon as they are."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of generated tokens.

    :param piece: the bytes of a token.
    :param stops: strings that end the text.
    :ivar text: what is given out so far; ends before a stop string that was found.
    :ivar stopped: whether one was found.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` completes. What may be the beginning of a stop string is held back."""
        return self._give(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """End the text. Returns the text that was held back."""
        piece = self._give(self._decoder.decode(b"", final=True))
        if not self.stopped:
            piece += self._held
            self.text += self._held
        self._held = ""
        return piece

    def _give(self, new: str) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = min((at for at in map(held.find, self._stops) if at >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            piece, self._held = held[:found], ""
        else:
            keep = max(
                (
                    n
                    for stop in self._stops
                    for n in range(1, min(len(stop), len(held) + 1))
                    if held.endswith(stop[:n])
                ),
                default=0,
            )
            piece, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += piece
        return piece
