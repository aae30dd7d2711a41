"""Options of co-training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llamatap._validate import choice, flag, integer, number
from llamatap.errors import InvalidInputError
from llamatap.states import dtype_name
from llamatap.train.batch import (
    PAIRINGS,
    Pairing,
    TrainingBatch,
    nothing_to_train_on,
    trainable,
    training_batch,
)
from llamatap.train.buffer import DataBuffer
from llamatap.train.sample import TrainingSample

__all__ = ["TrainOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of co-training: the size of the buffer, when training runs, and on which samples.

    The defaults are those of verl's co-training, which never trains on the samples of 8 steps in 10. To train
    on all of them, set ``buffer_steps`` to ``training_interval_steps``.

    :ivar data_buffer_max_size: maximum number of samples that are kept over the steps.
    :ivar data_buffer_max_bytes: maximum memory of the states, as ``max_bytes`` of :class:`DataBuffer`.
    :ivar buffer_max_samples: maximum number of samples of the current step that are kept.
    :ivar store_hidden_states: keep states over the steps, as in :class:`DataBuffer`.
    :ivar dtype: dtype of the states in the buffer.
    :ivar training_interval_steps: the number of steps from one training to the next.
    :ivar buffer_steps: the number of steps whose samples a training uses, including the current one.
    :ivar batch_size: samples in a batch.
    :ivar max_len: maximum number of tokens of a sample.
    :ivar pairing: the pairing of tokens with states; see :data:`Pairing`.
    :ivar vloss_weight: weight of the loss between states; see :func:`llamatap.train.pytorch.eagle_loss`.
    :ivar ploss_weight: weight of the loss between distributions.
    :raises InvalidInputError: a value is wrong.
    """

    data_buffer_max_size: int = 10000
    data_buffer_max_bytes: int | None = None
    buffer_max_samples: int = 2000
    store_hidden_states: bool = True
    dtype: str = "bfloat16"
    training_interval_steps: int = 10
    buffer_steps: int = 2
    batch_size: int = 32
    max_len: int = 512
    pairing: Pairing = "eagle"
    vloss_weight: float = 0.5
    ploss_weight: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "data_buffer_max_size",
            "buffer_max_samples",
            "training_interval_steps",
            "buffer_steps",
            "batch_size",
        ):
            integer(name, getattr(self, name), 1)
        if self.data_buffer_max_bytes is not None:
            integer("data_buffer_max_bytes", self.data_buffer_max_bytes, 1, 2**63 - 1)
        integer("max_len", self.max_len, 2)
        flag("store_hidden_states", self.store_hidden_states)
        dtype_name(self.dtype)
        choice("pairing", self.pairing, PAIRINGS)
        for name in ("vloss_weight", "ploss_weight"):
            # NaN fails the comparison.
            if not number(name, getattr(self, name)) >= 0:
                raise InvalidInputError(f"{name} must be 0 or more, not {getattr(self, name)!r}")

    def buffer(self) -> DataBuffer:
        """Make a buffer of these sizes."""
        return DataBuffer(
            self.data_buffer_max_size,
            self.store_hidden_states,
            current_size=self.buffer_max_samples,
            dtype=self.dtype,
            max_bytes=self.data_buffer_max_bytes,
        )

    def due(self, buffer: DataBuffer) -> bool:
        """Whether training runs at the end of the buffer's current step, before
        :meth:`DataBuffer.increment_step`: with an interval of 10, at the steps 9, 19, 29, ..."""
        return (buffer.step + 1) % self.training_interval_steps == 0

    def samples(self, buffer: DataBuffer) -> list[TrainingSample]:
        """The samples of one training: of the last ``buffer_steps`` steps, oldest first, or of the current
        step only if the buffer keeps no states over the steps.

        :raises InvalidInputError: there is nothing to train on, with the numbers of samples by reason.
        """
        kept = buffer.store_hidden_states
        found = buffer.get_data_from_last_n_steps(self.buffer_steps) if kept else buffer.collected_data
        chosen, reasons = trainable(found, self.max_len)
        if not chosen:
            raise InvalidInputError(nothing_to_train_on(len(found), reasons))
        return chosen

    def batches(self, buffer: DataBuffer) -> Iterator[TrainingBatch]:
        """The batches of one training: :meth:`samples`, ``batch_size`` at a time.

        :raises InvalidInputError: there is nothing to train on, with the numbers of samples by reason; or,
            while iterating, the samples of a batch have different layers.
        """
        samples = self.samples(buffer)
        firsts = range(0, len(samples), self.batch_size)
        return (self.batch(samples[first : first + self.batch_size]) for first in firsts)

    def batch(self, samples: Iterable[TrainingSample]) -> TrainingBatch:
        """Make a batch with these options; see :func:`training_batch`."""
        return training_batch(samples, max_len=self.max_len, pairing=self.pairing)
