"""Training drafters on the model that they are to draft for, while it generates: what is collected, and the
batches that are made of it. NumPy alone; :mod:`llamatap.train.pytorch` has it as PyTorch wants it."""

from __future__ import annotations

from llamatap.train.batch import Pairing, TrainingBatch, trainable, training_batch, window
from llamatap.train.buffer import DataBuffer, Sample
from llamatap.train.options import TrainOptions

__all__ = [
    "DataBuffer",
    "Pairing",
    "Sample",
    "TrainOptions",
    "TrainingBatch",
    "trainable",
    "training_batch",
    "window",
]
