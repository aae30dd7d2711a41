"""Shared batches: which queued prompts are extracted together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from llamatap.layers import LayerId
from llamatap.serve.workers.tasks import ExtractionTask, WantedStates

__all__ = ["MOST_TOKENS", "take_batch"]

# Limits of a batch: one forward pass, so that generation gets its rounds and an abandoned prompt costs no
# more than that. A longer prompt gets its own batch.
MOST_TOKENS = 512
_MOST_PROMPTS = 64

# Layers that a batch may compute for other prompts, beyond a prompt's own.
_MOST_FOREIGN_LAYERS = 4


def take_batch(
    queue: Iterable[ExtractionTask], most_tokens: int
) -> tuple[list[ExtractionTask], deque[ExtractionTask]]:
    """Choose the next batch: the prompt that has waited longest, and others that can share its pass.

    They share its deepest layer (so that no prompt costs more layers than it requests), dtype and pooling.
    Cancelled prompts are dropped.

    :returns: the batch, and what stays in the queue.
    """
    batch: list[ExtractionTask] = []
    left: deque[ExtractionTask] = deque()
    n_tokens = 0
    layers: frozenset[LayerId] = frozenset()
    for task in queue:
        if task.result.cancelled():
            continue
        union = layers.union(task.wanted.layers)
        if batch:
            # If the layers stay the same, the others in the batch cost no more than before.
            affected = (task,) if union == layers else (*batch, task)
            if (
                not _same_pass(task.wanted, batch[0].wanted)
                or len(batch) == _MOST_PROMPTS
                or n_tokens + len(task.prompt) > most_tokens
                or not all(_costs_little(one.wanted, union) for one in affected)
            ):
                left.append(task)
                continue
        if task.result.set_running_or_notify_cancel():
            n_tokens += len(task.prompt)
            layers = union
            batch.append(task)
    return batch, left


def _same_pass(one: WantedStates, other: WantedStates) -> bool:
    return (one.deepest, one.dtype, one.pooling) == (other.deepest, other.dtype, other.pooling)


def _costs_little(wanted: WantedStates, layers: frozenset[LayerId]) -> bool:
    """Whether a batch with these layers takes little more memory than the prompt's own would."""
    return len(layers.union(wanted.layers)) <= len(wanted.layers) + _MOST_FOREIGN_LAYERS
