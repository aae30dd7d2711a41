"""Samples with their states as tensors, and batches of samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.errors import InvalidInputError
from llamatap.train.drafters.multi_step_loss import PaddedBatch

with needs("train", "training drafters"):
    import torch
    from torch import Tensor

__all__ = ["SampleTensors"]


class SampleTensors:
    """Samples one after another.

    :param n_tokens: the number of tokens of all samples.
    :param n_features: features that the head reads of a token; 0 where it reads H_n.
    :param n_embd: features of H_n.
    :param device: where the tensors are.
    :ivar tokens: int32 ``(n_tokens,)``.
    :ivar loss_mask: bool ``(n_tokens,)``.
    :ivar features: bfloat16 ``(n_tokens, n_features)``.
    :ivar last: bfloat16 ``(n_tokens, n_embd)``.
    :ivar offsets: int64 ``(n_samples + 1,)``: the rows of sample i are ``offsets[i]:offsets[i+1]``.
    """

    def __init__(self, n_tokens: int, n_features: int, n_embd: int, device: Any = "cpu") -> None:
        self.tokens = torch.zeros(n_tokens, dtype=torch.int32, device=device)
        self.loss_mask = torch.zeros(n_tokens, dtype=torch.bool, device=device)
        self.features = torch.zeros(n_tokens, n_features, dtype=torch.bfloat16, device=device)
        self.last = torch.zeros(n_tokens, n_embd, dtype=torch.bfloat16, device=device)
        self.offsets = [0]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Tokens of the samples that were added."""
        return self.offsets[-1]

    def add(self, tokens: NDArray[np.int32], loss_mask: NDArray[Any], states: NDArray[np.float32]) -> None:
        """Add a sample.

        :param states: ``(n, n_layers, n_embd)``; the last layer is H_n, the others are the head's features.
        """
        first, end = self.offsets[-1], self.offsets[-1] + len(tokens)
        if end > len(self.tokens):
            raise InvalidInputError(f"there is room for {len(self.tokens)} tokens; found {end}")
        part = slice(first, end)
        self.tokens[part] = torch.from_numpy(np.asarray(tokens, np.int32))
        self.loss_mask[part] = torch.from_numpy(np.asarray(loss_mask, np.bool_))
        rows = torch.from_numpy(np.array(states)).to(self.last.device).bfloat16()
        self.last[part] = rows[:, -1]
        if self.features.shape[1]:
            self.features[part] = rows[:, :-1].flatten(1)
        self.offsets.append(end)

    def batches(
        self, samples: Sequence[int], batch_tokens: int, rng: np.random.Generator | None = None
    ) -> Iterator[list[int]]:
        """Sort samples into batches of similar length.

        :param batch_tokens: maximum number of tokens of a batch, padding included (or one longer sample).
        :param rng: shuffles the samples and the batches; None keeps them in order of length.
        """
        lengths = np.diff(self.offsets)
        chosen = np.asarray(samples)
        if rng is not None:
            chosen = rng.permutation(chosen)
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
        found: list[list[int]] = [[]]
        for one in chosen.tolist():
            # The newest is the longest.
            if found[-1] and (len(found[-1]) + 1) * lengths[one] > batch_tokens:
                found.append([])
            found[-1].append(one)
        order = range(len(found)) if rng is None else rng.permutation(len(found))
        return (found[i] for i in order)

    def batch(self, samples: Sequence[int], device: Any = None) -> PaddedBatch:
        """Pad samples to a batch."""
        starts = np.array([self.offsets[i] for i in samples])
        lengths = np.array([self.offsets[i + 1] for i in samples]) - starts
        columns = np.arange(lengths.max())
        inside = columns < lengths[:, None]
        rows = np.where(inside, starts[:, None] + columns, starts[:, None])
        where = self.tokens.device
        index = torch.from_numpy(rows).to(where)
        mask = torch.from_numpy(inside).to(where)
        features = self.features if self.features.shape[1] else self.last

        def moved(x: Tensor) -> Tensor:
            return x.to(device) if device is not None else x

        return PaddedBatch(
            moved(self.tokens[index].long()),
            moved(features[index]),
            moved(self.last[index]),
            moved(self.loss_mask[index] & mask),
        )
