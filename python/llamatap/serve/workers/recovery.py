"""Recovery from failed rounds of generation: which texts start over, and with whom.

A round that fails may be the fault of one text. All its texts that can start over do so one by one, on trial,
until each has got past its first event; a text that fails a second time runs alone.
"""

from __future__ import annotations

from collections.abc import Collection

from llamatap.serve.workers.tasks import GenerationTask

__all__ = ["may_enter", "restart"]


def may_enter(task: GenerationTask, in_flight: Collection[GenerationTask]) -> bool:
    """Whether a text may be admitted now. A text on trial is the only one on trial, and endangers no stream
    that could not start over."""
    if any(other.on_trial for other in in_flight):
        return False
    if task.failures > 1:
        return not in_flight
    return task.failures == 0 or all(other.restartable for other in in_flight)


def restart(failed: Collection[GenerationTask]) -> list[GenerationTask]:
    """Choose and mark the texts of a failed round that start over; the others must be told that they failed.
    A text that fails alone does not start over."""
    if len(failed) == 1:
        return []
    # Where one was on trial, the texts that ran before it came are not the cause.
    suspects = [task for task in failed if task.on_trial] or failed
    restarted = [task for task in failed if task.restartable]
    for task in restarted:
        task.failures += task in suspects
        task.begun = False
    return restarted
