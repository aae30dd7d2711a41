"""Admission to a model's queue: the limit of waiting prompts, and when further requests should try again."""

from __future__ import annotations

import math

from llamatap.serve.errors import ApiError

__all__ = ["Admission"]


class Admission:
    """Limit of a model's queue.

    :param name: name of the model.
    :param max_queue: maximum number of waiting prompts.
    """

    def __init__(self, name: str, max_queue: int) -> None:
        self.name = name
        self.max_queue = max_queue
        #: Moving average of the seconds per prompt; and seconds since a prompt was last finished.
        self._seconds_each = 0.1
        self._seconds_since = 0.0

    def check(self, n: int, waiting: int) -> None:
        """Check that ``n`` more prompts may wait.

        :param waiting: prompts that are already waiting.
        :raises ApiError: 429 with ``Retry-After``, or 400 if waiting would not help.
        """
        if n > self.max_queue:
            raise ApiError.invalid(
                f"{n} prompts in a request; {self.name} takes at most {self.max_queue}", "too_many_inputs"
            )
        if waiting + n > self.max_queue:
            seconds = min(max(math.ceil(waiting * self._seconds_each), 1), 60)
            raise ApiError.queue_full(
                f"{waiting} prompts are waiting for {self.name}, the limit is {self.max_queue}; try again in "
                f"{seconds} s",
                retry_after=seconds,
            )

    def note(self, seconds: float, n_done: int) -> None:
        """Account for a turn of the worker: its duration, and the prompts that it finished."""
        self._seconds_since += seconds
        if n_done:
            self._seconds_each += 0.1 * (self._seconds_since / n_done - self._seconds_each)
            self._seconds_since = 0.0
