"""Co-training with PyTorch: a data set that reads a buffer, batches of tensors, and EAGLE's loss.

Needs the extra ``llamatap[train]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llamatap._extras import needs
from llamatap.errors import UnsupportedError
from llamatap.states import DTYPES
from llamatap.train.buffer import DataBuffer
from llamatap.train.options import TrainOptions
from llamatap.train.sample import TrainingSample

with needs("train", "llamatap.train.pytorch"):
    import torch
    import torch.nn.functional as functional
    from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["BufferDataset", "collate", "eagle_loss", "tensor_of"]


class BufferDataset(IterableDataset):  # type: ignore[misc]  # PyTorch may be absent where types are checked
    """Data set of the samples of one training, :meth:`TrainOptions.samples` when an iteration begins:

        loader = DataLoader(BufferDataset(buffer, options), options.batch_size, collate_fn=collate(options))

    :param seed: shuffle with this seed, differently each time; None for the order in which they were added.
    """

    def __init__(self, buffer: DataBuffer, options: TrainOptions, seed: int | None = None) -> None:
        self.buffer = buffer
        self.options = options
        self._rng = None if seed is None else np.random.default_rng(seed)

    def __iter__(self) -> Iterator[TrainingSample]:
        """Iterate over the samples of one training.

        :raises InvalidInputError: there is nothing to train on, with the numbers of samples by reason.
        :raises UnsupportedError: in a worker process of a loader, whose copy of the buffer gets no samples.
        """
        if get_worker_info() is not None:
            raise UnsupportedError("the buffer is in the memory of this process; use num_workers=0")
        samples = self.options.samples(self.buffer)
        if self._rng is not None:
            self._rng.shuffle(samples)
        return iter(samples)


def collate(options: TrainOptions) -> Callable[[Iterable[TrainingSample]], dict[str, torch.Tensor]]:
    """Make a ``collate_fn`` for ``DataLoader``: samples to the tensors of a :class:`TrainingBatch`, with its
    names, shapes and dtypes. It raises what :func:`training_batch` raises.
    """
    return lambda samples: {name: tensor_of(array) for name, array in options.batch(samples).items()}


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor in the memory of an array.

    :param array: a NumPy array. A read-only one must have memory that may be written to, such as the private
        pages that a connector reads.
    """
    if not array.flags.writeable:
        array = array.view()
        array.flags.writeable = True
    if array.dtype == DTYPES["bfloat16"]:
        # PyTorch does not accept NumPy's bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def eagle_loss(
    predicted: torch.Tensor,
    batch: dict[str, torch.Tensor],
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    options: TrainOptions,
) -> torch.Tensor:
    """The loss of EAGLE-1 and EAGLE-2, as in verl's co-training.

    ``vloss_weight`` times the smooth L1 distance of the states, plus ``ploss_weight`` times the cross-entropy
    of the target's and the drafter's distributions; averaged over the tokens of the loss mask, in float32.

    :param predicted: the states that the drafter predicts, ``[1, L-1, n_embd]``, any floating dtype.
    :param batch: a batch of :func:`collate`, on the same device.
    :param lm_head: the target's output head, from ``"norm"`` states ``[1, L-1, n_embd]`` to logits ``[1, L-1,
        n_vocab]``. A module gets states in the dtype of its weights, another function in the dtype of
        ``predicted``.
    :returns: a float32 scalar.
    """
    target, mask = batch["target"], batch["loss_mask"]
    dtype = _dtype_of(lm_head) or predicted.dtype
    with torch.no_grad():
        wanted = lm_head(target.to(dtype)).float().softmax(-1)
    entropy = -(wanted * lm_head(predicted.to(dtype)).float().log_softmax(-1)).sum(-1)
    distance = functional.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean(-1)
    loss = options.vloss_weight * distance + options.ploss_weight * entropy
    return (mask * loss).sum() / mask.sum()


def _dtype_of(head: object) -> torch.dtype | None:
    """The dtype of a module's first floating-point weight; None without one."""
    parameters = head.parameters() if isinstance(head, torch.nn.Module) else ()
    return next((one.dtype for one in parameters if one.is_floating_point()), None)
