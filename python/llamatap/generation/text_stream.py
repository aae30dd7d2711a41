"""Text that grows token by token: whole characters only, and stop strings found at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of generated tokens.

    :param token_bytes: function from a token to its bytes.
    :param stops: strings that end the text.
    :ivar text: the text returned so far; ends before a stop string that was found.
    :ivar stopped: whether a stop string was found.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._held_back = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes; what may begin a stop string is held back."""
        return self._give(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """End the text. Returns the text that was held back."""
        piece = self._give(self._decoder.decode(b"", final=True))
        if not self.stopped:
            piece += self._held_back
            self.text += self._held_back
        self._held_back = ""
        return piece

    def _give(self, new: str) -> str:
        if self.stopped:
            return ""
        held = self._held_back + new
        found = min((at for at in map(held.find, self._stops) if at >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            piece, self._held_back = held[:found], ""
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
            piece, self._held_back = held[: len(held) - keep], held[len(held) - keep :]
        self.text += piece
        return piece
