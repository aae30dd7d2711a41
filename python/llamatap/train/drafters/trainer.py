"""Training loop of a drafting head: order of samples, learning rate, measurements, and its state on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamatap._extras import needs
from llamatap.errors import InvalidInputError, NotFiniteError
from llamatap.storage.atomic_writes import atomic_path
from llamatap.train.drafters.heads import DraftHead
from llamatap.train.drafters.multi_step_loss import PaddedBatch, StepCounts, multi_step_loss
from llamatap.train.drafters.options import HeadTrainingOptions
from llamatap.train.drafters.sample_tensors import SampleTensors

with needs("train", "training drafters"):
    import torch
    from torch import Tensor

__all__ = ["HeadTrainer", "device_of", "is_bfloat16", "read_state"]

# The learning rate at the end, relative to its highest value.
_LAST_RATE = 0.02


def device_of(name: str | None) -> torch.device:
    """PyTorch's device of that name; a GPU, if there is one, without a name.

    :raises InvalidInputError: there is no such device.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise InvalidInputError(f"device {name!r} cannot be used: {first}. Give cpu, or cuda") from None
    return device


def is_bfloat16(options: HeadTrainingOptions, device: torch.device) -> bool:
    """Whether matrix products are computed in bfloat16."""
    return options.precision == "bfloat16" or (options.precision == "auto" and device.type == "cuda")


class HeadTrainer:
    """Trains a head on samples.

    :param samples: the samples with their states.
    :param training: indices of the samples to train on.
    :param held_out: indices of samples to measure on.
    :param full_head: the target's output head of its whole vocabulary, float32 ``(n_vocab, n_embd)``.
    :ivar step: optimizer steps that were made.
    :ivar seconds: time spent in them, measurements included.
    :ivar n_steps: optimizer steps of all epochs.
    :ivar counts: counts on the training batches since :meth:`take_counts`.
    """

    def __init__(
        self,
        head: DraftHead,
        samples: SampleTensors,
        training: Sequence[int],
        held_out: Sequence[int],
        full_head: Tensor,
        options: HeadTrainingOptions,
    ) -> None:
        self.options = options
        self.device = next(head.parameters()).device
        self.head = head
        self._samples = samples
        self._training = training
        self._held_out = held_out
        self._full_head = full_head
        self._weights = [one for one in head.parameters() if one.requires_grad]
        matrices = [one for one in self._weights if one.ndim > 1]
        vectors = [one for one in self._weights if one.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": vectors, "weight_decay": 0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.step = 0
        self.seconds = 0.0
        self._n_batches = len(samples.batches(training, options.batch_tokens))
        self.n_steps = options.epochs * self._n_batches
        self._epoch = -1
        self._order: list[list[int]] = []
        self.counts: StepCounts | None = None

    def step_bytes(self) -> int:
        """Estimate of the memory that a step takes beside weights and states: of each drafting step the
        attention's scores and weights and the logits of the draft vocabulary, with what their gradients need.
        """
        steps, tokens = self.options.steps, self.options.batch_tokens
        longest = int(self._samples.lengths[list(self._training)].max())
        tokens = max(tokens, longest)
        attention = 3 * steps * self.head.block.shape.n_head * longest
        n_vocab = len(self.head.target_head)
        return int(4 * tokens * (attention + (2 + 3 * steps) * n_vocab))

    @property
    def epoch(self) -> int:
        """Passes over the data that were finished."""
        return self.step // self._n_batches

    @property
    def progress(self) -> float:
        """The share of the training that is done, by steps or by time, 0 to 1."""
        by_time = 0.0 if self.options.minutes is None else self.seconds / (60 * self.options.minutes)
        return min(1.0, max(self.step / self.n_steps, by_time))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step: a linear rise, then a cosine."""
        rise = min(1.0, (self.step + 1) / (min(self.options.warmup, self.n_steps // 10) + 1))
        fall = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * self.progress))
        return self.options.learning_rate * rise * fall

    def run(self, after_step: Callable[[], object]) -> None:
        """Train to the end; ``after_step`` is called after each step, and its time counts.

        :raises NotFiniteError: the gradient holds NaN or infinity: the weights are those before the step.
        """
        started = time.monotonic() - self.seconds
        while self.progress < 1:
            self._one_step()
            self.seconds = time.monotonic() - started
            after_step()
            self.seconds = time.monotonic() - started

    def _one_step(self) -> None:
        if self.epoch != self._epoch:
            self._epoch = self.epoch
            rng = np.random.default_rng([self.options.seed, 1, self._epoch])
            self._order = self._samples.batches(self._training, self.options.batch_tokens, rng)
        batch = self._batch(self._order[self.step % self._n_batches])
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        with self._precision():
            loss, counts = multi_step_loss(self.head, batch, self.options.steps, self.options.decay)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        size = torch.nn.utils.clip_grad_norm_(self._weights, self.options.gradient_clip)
        if not torch.isfinite(size):
            raise NotFiniteError(
                f"the gradient is {float(size)} in step {self.step}: a state of its samples may hold NaN, or "
                f"the learning rate {self.options.learning_rate} may be too high"
            )
        self._optimizer.step()
        self.counts = counts if self.counts is None else self.counts + counts
        self.step += 1

    def take_counts(self) -> StepCounts | None:
        """The counts since the last call; None without a step."""
        found, self.counts = self.counts, None
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def measure(self) -> StepCounts | None:
        """Counts on the held-out samples, against the target's whole vocabulary; None without samples."""
        found: StepCounts | None = None
        for some in self._samples.batches(self._held_out, self.options.batch_tokens):
            batch = self._batch(some)
            with self._precision():
                best = torch.stack([self._most_likely(rows) for rows in batch.last])
                counts = multi_step_loss(self.head, batch, self.options.steps, self.options.decay, best)[1]
            found = counts if found is None else found + counts
        return found

    def _most_likely(self, last_state: Tensor) -> Tensor:
        # In float32: rounded to bfloat16, many logits are the same.
        with torch.autocast(self.device.type, enabled=False):
            return (self.head.target_norm(last_state.float()) @ self._full_head.T).argmax(-1)

    def _batch(self, samples: Sequence[int]) -> PaddedBatch:
        batch = self._samples.batch(samples, self.device)
        if self._is_bfloat16:
            return batch
        return PaddedBatch(batch.tokens, batch.features.float(), batch.last.float(), batch.loss_mask)

    @property
    def _is_bfloat16(self) -> bool:
        return is_bfloat16(self.options, self.device)

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_bfloat16)

    def save(self, path: Path, fingerprint: dict[str, Any]) -> None:
        """Save the state of the training, atomically.

        :param fingerprint: what a training that continues must be equal in.
        """
        state = {
            "fingerprint": fingerprint,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        with atomic_path(path) as scratch:
            torch.save(state, scratch)

    def load(self, path: Path, fingerprint: dict[str, Any]) -> None:
        """Continue from a saved state.

        :raises InvalidInputError: it belongs to another training, or cannot be read.
        """
        state = read_state(path, fingerprint, self.device)
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def read_state(path: Path, fingerprint: dict[str, Any], device: Any = "cpu") -> dict[str, Any]:
    """What :meth:`HeadTrainer.save` saved, on a device.

    :param fingerprint: what the training must be equal in, or a part of that.
    :raises InvalidInputError: it belongs to another training, or cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        saved = state["fingerprint"]
    except Exception as error:
        # PyTorch's own advice takes several lines, and is about files of unknown origin.
        raise InvalidInputError(
            f"{path} is damaged, or no training's state; remove it to begin anew"
        ) from error
    if differing := {
        key: (saved.get(key), value) for key, value in fingerprint.items() if saved.get(key) != value
    }:
        told = "; ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in differing.items())
        raise InvalidInputError(f"{path} belongs to another training: {told}")
    return state
