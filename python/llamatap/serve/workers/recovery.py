"""Recovery from failed rounds of generation: which texts restart, and together with which others.

A failed round may be the fault of one text. All its restartable texts restart one by one, on trial, until
each has got past its first event; a text that fails a second time runs alone.
"""

from __future__ import annotations

from collections.abc import Collection

from llamatap.serve.workers.tasks import GenerationTask

__all__ = ["may_enter", "restart"]


def may_enter(task: GenerationTask, in_flight: Collection[GenerationTask]) -> bool:
    """Whether a text may be admitted now. Only one text at a time is on trial, and never beside a stream that
    could not restart."""
    if any(other.on_trial for other in in_flight):
        return False
    if task.failures > 1:
        return not in_flight
    return task.failures == 0 or all(other.restartable for other in in_flight)


def restart(failed: Collection[GenerationTask]) -> list[GenerationTask]:
    """Choose and mark the texts of a failed round that restart; the others fail. A text that fails alone does
    not restart."""
    if len(failed) == 1:
        return []
    # If one was on trial, the texts that ran before it are not the cause.
    suspects = [task for task in failed if task.on_trial] or failed
    restarted = [task for task in failed if task.restartable]
    for task in restarted:
        task.failures += task in suspects
        task.begun = False
    return restarted
