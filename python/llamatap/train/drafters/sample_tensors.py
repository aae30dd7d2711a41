"""Samples with their states as tensors, and batches of samples of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.dataset.samples import Samples
from llamatap.errors import InvalidInputError
from llamatap.train.drafters.multi_step_loss import PaddedBatch

with needs("train", "training drafters"):
    import torch
    from torch import Tensor

__all__ = ["SampleTensors"]


class SampleTensors:
    """Samples one after another.

    :param columns: the states of each layer, bfloat16 ``(n_tokens, n_embd)``; the last one is H_n, which is
        predicted. The others are what a head reads, side by side; without others it reads H_n.
    :ivar tokens: int32 ``(n_tokens,)``.
    :ivar loss_mask: bool ``(n_tokens,)``.
    :ivar offsets: the rows of sample i are ``offsets[i]:offsets[i+1]``.
    """

    def __init__(self, tokens: Tensor, loss_mask: Tensor, columns: list[Tensor], offsets: list[int]) -> None:
        self.tokens = tokens
        self.loss_mask = loss_mask
        self.columns = columns
        self.offsets = offsets

    @classmethod
    def empty(cls, n_tokens: int, n_columns: int, n_embd: int, device: Any = "cpu") -> SampleTensors:
        """Room for the samples that :meth:`add` adds."""
        return cls(
            torch.zeros(n_tokens, dtype=torch.int32, device=device),
            torch.zeros(n_tokens, dtype=torch.bool, device=device),
            [torch.zeros(n_tokens, n_embd, dtype=torch.bfloat16, device=device) for _ in range(n_columns)],
            [0],
        )

    @classmethod
    def of_texts(cls, texts: Samples, n_columns: int, n_embd: int, device: Any = "cpu") -> SampleTensors:
        """Samples whose states :meth:`put` fills in."""
        found = cls.empty(texts.n_tokens, n_columns, n_embd, device)
        offsets = texts.offsets.tolist()
        for text, first, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
            part = slice(first, end)
            found.tokens[part] = torch.from_numpy(text.tokens)
            found.loss_mask[part] = torch.from_numpy(text.loss_mask)
        found.offsets = offsets
        return found

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Tokens of the samples that were added."""
        return self.offsets[-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample."""
        offsets = np.asarray(self.offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def sha256(self) -> str:
        """Hash of tokens, loss masks and lengths."""
        digest = hashlib.sha256(np.asarray(self.offsets, np.int64).tobytes())
        for part in (self.tokens[: self.n_tokens], self.loss_mask[: self.n_tokens]):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()

    def add(self, tokens: NDArray[np.int32], loss_mask: NDArray[Any], states: NDArray[Any]) -> None:
        """Add a sample.

        :param states: ``(n, n_columns, n_embd)``, float32, float16 or bfloat16.
        :raises InvalidInputError: there is no room for it, or its parts differ in length.
        """
        first, end = self.offsets[-1], self.offsets[-1] + len(tokens)
        if not len(tokens) == len(loss_mask) == len(states):
            raise InvalidInputError(
                f"a sample of {len(tokens)} tokens has {len(loss_mask)} in its loss mask and {len(states)} "
                "rows of states"
            )
        if end > len(self.tokens):
            raise InvalidInputError(f"there is room for {len(self.tokens)} tokens; found {end}")
        part = slice(first, end)
        self.tokens[part] = torch.from_numpy(np.array(tokens, np.int32))
        self.loss_mask[part] = torch.from_numpy(np.array(loss_mask, np.bool_))
        self.offsets.append(end)
        self.put(len(self) - 1, states)

    def put(self, sample: int, states: NDArray[Any]) -> None:
        """Set the states of a sample; as in :meth:`add`."""
        part = slice(self.offsets[sample], self.offsets[sample + 1])
        rows = torch.from_numpy(np.array(states, np.float32)).to(self.tokens.device).bfloat16()
        for i, column in enumerate(self.columns):
            column[part] = rows[:, i]

    def batches(
        self, samples: Sequence[int], batch_tokens: int, rng: np.random.Generator | None = None
    ) -> list[list[int]]:
        """Sort samples into batches of similar length. Their number does not depend on ``rng``.

        :param batch_tokens: maximum number of tokens of a batch, padding included (or one longer sample).
        :param rng: shuffles the samples and the batches; None keeps them in order of length.
        """
        lengths = self.lengths
        chosen = np.asarray(samples, np.int64)
        if rng is not None:
            chosen = rng.permutation(chosen)
        found: list[list[int]] = []
        for one in chosen[np.argsort(lengths[chosen], kind="stable")].tolist():
            # The newest is the longest.
            if not found or (len(found[-1]) + 1) * lengths[one] > batch_tokens:
                found.append([])
            found[-1].append(one)
        return found if rng is None else [found[i] for i in rng.permutation(len(found))]

    def batch(self, samples: Sequence[int], device: Any = None) -> PaddedBatch:
        """Pad samples to a batch, on a device (None: where the samples are)."""
        starts = np.array([self.offsets[i] for i in samples])
        lengths = self.lengths[list(samples)]
        columns = np.arange(lengths.max())
        inside = columns < lengths[:, None]
        rows = np.where(inside, starts[:, None] + columns, starts[:, None])
        where = self.tokens.device
        index = torch.from_numpy(rows).to(where)
        mask = torch.from_numpy(inside).to(where)
        states = [column[index].to(device) for column in self.columns]
        return PaddedBatch(
            self.tokens[index].long().to(device),
            torch.cat(states[:-1], -1) if len(states) > 1 else states[0],
            states[-1],
            (self.loss_mask[index] & mask).to(device),
        )
