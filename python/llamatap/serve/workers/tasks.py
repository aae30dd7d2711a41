"""Tasks of a model worker: prompts to extract states of, and texts to generate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from llamatap.extraction.inputs import CheckedPrompt
from llamatap.generation.api import GenerateOptions
from llamatap.generation.results import Event
from llamatap.layers import LayerId
from llamatap.states import States

__all__ = ["Dtype", "ExtractionTask", "GenerationTask", "Pooling", "WantedStates"]

Pooling = Literal["mean", "last", "max"]
Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class WantedStates:
    """The requested states of each prompt of a request.

    :ivar layers: normalised ids of llamatap.
    :ivar deepest: the slot of the deepest layer; nothing after it is computed.
    :ivar window: requested positions, as in :func:`llamatap.extract`.
    """

    layers: tuple[LayerId, ...]
    deepest: int
    dtype: Dtype = "float32"
    pooling: Pooling | None = None
    window: tuple[int | None, int | None] | None = None


@dataclass(eq=False)
class ExtractionTask:
    """A prompt to extract states of, and the future of its result."""

    prompt: CheckedPrompt
    wanted: WantedStates
    result: Future[States] = field(default_factory=Future)
    #: Set once no request waits for the result, also while it is being computed.
    abandoned: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class GenerationTask:
    """A text to generate, and where its events go."""

    prompt: CheckedPrompt
    options: GenerateOptions
    deliver: Callable[[Event | BaseException], None]
    #: Set once no request waits for its events.
    abandoned: threading.Event = field(default_factory=threading.Event)
    #: Whether its events are sent as they come, so that it cannot restart once one was sent.
    streamed: bool = False
    #: Whether an event was delivered since it was admitted.
    begun: bool = False
    #: Number of failed rounds that it shared with other texts.
    failures: int = 0

    @property
    def restartable(self) -> bool:
        """Whether it can restart: no client has read any of its events."""
        return not (self.streamed and self.begun)

    @property
    def on_trial(self) -> bool:
        """Whether it may be the cause of failures: after one failure until its first event, after two until
        its end."""
        return self.failures > 1 or (self.failures == 1 and not self.begun)
