"""SIGINT and SIGTERM between the steps of a training."""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["StopSignals"]


class StopSignals:
    """SIGINT and SIGTERM set a flag in this block, so that a step is never cut; a second one ends at once.

    :ivar requested: whether one came. Only the main thread gets signals.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                self._before[one] = signal.signal(one, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _stop(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
