"""Co-training: training a drafter on its target's states while the target generates.

:class:`CoTrainer` does all of it, with a trainer in another process. For a trainer of your own,
:class:`DataBuffer` collects samples, :func:`training_batch` makes batches of them. Only NumPy is needed;
:mod:`llamatap.train.pytorch` gives PyTorch tensors.
"""

from __future__ import annotations

from llamatap.train.batch import Pairing, TrainingBatch, trainable, training_batch, window
from llamatap.train.buffer import DataBuffer
from llamatap.train.cotrain.cotrainer import CoTrainer
from llamatap.train.cotrain.options import CoTrainOptions, TrainerOptions
from llamatap.train.options import TrainOptions
from llamatap.train.sample import TrainingSample as Sample

__all__ = [
    "CoTrainOptions",
    "CoTrainer",
    "DataBuffer",
    "Pairing",
    "Sample",
    "TrainOptions",
    "TrainerOptions",
    "TrainingBatch",
    "trainable",
    "training_batch",
    "window",
]
