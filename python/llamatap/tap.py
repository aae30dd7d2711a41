"""Taps: the hidden states of each decode of a context."""

from __future__ import annotations

from typing import Literal

from llamatap._engine_context import Capture, EngineContext
from llamatap._validate import NotCopied
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.states import States

__all__ = ["Tap"]


class Tap(NotCopied):
    """Captures the states of each decode of a context inside a ``with`` block; see :meth:`Context.tap`. It
    may be opened again later. A tap that was entered without ``with`` is closed when its last reference is
    gone."""

    def __init__(self, engine: EngineContext, capture: Capture) -> None:
        self._engine = engine
        self._capture = capture
        self._entered = False

    @property
    def layers(self) -> tuple[LayerId, ...]:
        """The layer of each column of the states, in 0..n or ``"norm"``."""
        return self._capture.layers

    @property
    def rows(self) -> Literal["all", "outputs"]:
        """Whether all entries of a batch have a row, or only its outputs."""
        return self._capture.rows

    @property
    def dtype(self) -> str:
        """The dtype of the states: "float32", "float16" or "bfloat16"."""
        return self._capture.dtype

    def __enter__(self) -> Tap:
        self._engine.native  # noqa: B018  raises now, not at the first decode, if the context is closed
        if self._engine.capture is not None:
            raise InvalidInputError("this context already has an open tap; request all layers from it")
        self._capture.states = None
        self._entered = True
        self._engine.capture = self._capture
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine.capture is self._capture:
            self._engine.capture = None

    @property
    def states(self) -> States:
        """The states of the last decode, rows in the order of the batch; with ``rows="outputs"``, only of its
        outputs. Arrays of earlier decodes stay valid.

        :raises InvalidInputError: nothing was decoded yet.
        """
        if self._capture.states is None:
            if not self._entered:
                raise InvalidInputError(
                    "the tap was never opened; decode within `with context.tap(...) as tap:`"
                )
            raise InvalidInputError("nothing was decoded since the tap was opened")
        return self._capture.states
