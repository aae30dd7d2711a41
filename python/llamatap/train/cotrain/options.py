"""Options of co-training: of the serving side, and of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamatap._validate import choice, integer, number
from llamatap.errors import InvalidInputError

__all__ = ["CoTrainOptions", "TrainerOptions"]


def _at_least(name: str, value: object, low: float, *, above: bool = False) -> None:
    found = number(name, value)
    # NaN fails the comparison.
    if not (found > low if above else found >= low):
        raise InvalidInputError(f"{name} must be {'above ' if above else 'at least '}{low:g}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class CoTrainOptions:
    """Options of the serving side.

    :ivar share: share of the texts that are collected, above 0 to 1.
    :ivar max_length: tokens of a text that are collected, prompt included; the rest of it is not.
    :ivar text_bytes: memory of the states of texts in flight, in a context. When it is full, these texts are
        collected up to there.
    :ivar max_bytes: size limit of all samples in the folder. The oldest make room for new ones.
    :ivar queue_bytes: memory of samples that wait to be written. Samples that find no room are dropped.
    :ivar trial_rounds: rounds (one text, one pass of the target) with a draft asked for that a new drafter is
        tried for; before it comes, the one in use must have as many.
    :ivar margin: tokens per round that a new drafter may be below the one before it at the end of its trial.
        After a part of the trial it may be lower, by the inverse square root of that part, as chance would
        have it; before a tenth of the trial nothing is decided.
    :ivar poll_seconds: seconds between looks into the folder.
    :ivar log_seconds: seconds between entries of the log about acceptance.
    :raises InvalidInputError: a value is out of range.
    """

    share: float = 1.0
    max_length: int = 1024
    text_bytes: int = 256 * 2**20
    max_bytes: int = 2**30
    queue_bytes: int = 64 * 2**20
    trial_rounds: int = 2000
    margin: float = 0.1
    poll_seconds: float = 1.0
    log_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, low in (("max_length", 2), ("trial_rounds", 1)):
            integer(name, getattr(self, name), low)
        for name in ("text_bytes", "max_bytes", "queue_bytes"):
            integer(name, getattr(self, name), 1, 2**63 - 1)
        _at_least("share", self.share, 0, above=True)
        if self.share > 1:
            raise InvalidInputError(f"share must be at most 1, not {self.share!r}")
        _at_least("margin", self.margin, 0)
        for name in ("poll_seconds", "log_seconds"):
            _at_least(name, getattr(self, name), 0, above=True)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of the trainer. It works in cycles: it loads samples, trains on them, measures, publishes.

    :ivar min_tokens: tokens of samples to train on, before the first cycle.
    :ivar new_tokens: tokens of new samples to train on, before a further cycle.
    :ivar cycle_tokens: maximum number of tokens that a cycle trains on: the newest samples, then a random
        choice of the older ones. With ``held_out`` it bounds the memory for states.
    :ivar held_out: maximum number of samples that a cycle measures on: the newest of those whose prompt is
        never trained on, about an eighth of all.
    :ivar better_by: tokens per round on these samples that a head must gain over the one in use to be
        published.
    :ivar epochs: passes over the samples of a cycle.
    :ivar steps: drafting steps in the loss.
    :ivar decay: weight of a step, relative to the one before it.
    :ivar batch_tokens: tokens in a batch.
    :ivar learning_rate: its highest value in a cycle.
    :ivar type: type of the matrices of published GGUF files; None for "q8_0", with MTP blocks "bf16".
    :ivar keep: number of published drafters that stay in the folder, besides the one in use.
    :ivar n_threads: PyTorch's threads; None for the CPUs that the engine leaves, at least one.
    :ivar device: PyTorch's name of a device; None for a GPU if there is one.
    :ivar seed: of the order of samples and the choice of older ones.
    :ivar poll_seconds: seconds between looks for new samples.
    :ivar minutes: end after this time; None for no limit.
    :ivar follow: end when the serving side was closed, or gave no sign for half an hour.
    :raises InvalidInputError: a value is out of range.
    """

    min_tokens: int = 16384
    new_tokens: int = 8192
    cycle_tokens: int = 65536
    held_out: int = 64
    better_by: float = 0.02
    epochs: int = 1
    steps: int = 3
    decay: float = 0.8
    batch_tokens: int = 2048
    learning_rate: float = 3e-4
    type: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    keep: int = 3
    n_threads: int | None = None
    device: str | None = None
    seed: int = 0
    poll_seconds: float = 2.0
    minutes: float | None = None
    follow: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("min_tokens", 1),
            ("new_tokens", 1),
            ("cycle_tokens", 2),
            ("held_out", 1),
            ("epochs", 1),
            ("steps", 1),
            ("batch_tokens", 2),
            ("keep", 1),
            ("seed", 0),
        ):
            integer(name, getattr(self, name), low)
        if self.n_threads is not None:
            integer("n_threads", self.n_threads, 1)
        choice("type", self.type or "q8_0", ("f32", "f16", "bf16", "q8_0"))
        _at_least("better_by", self.better_by, 0)
        for name in ("decay", "learning_rate", "poll_seconds"):
            _at_least(name, getattr(self, name), 0, above=True)
        if self.minutes is not None:
            _at_least("minutes", self.minutes, 0, above=True)
