"""Buffer of training samples: texts with the target's states, of the current step and earlier ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from llamatap._validate import flag, instance, integer
from llamatap.errors import InvalidInputError
from llamatap.generation.results import Generation, whole_states
from llamatap.layers import LayerId
from llamatap.states import DTYPES, States, dtype_name
from llamatap.train.batch_to_samples import (
    Arrays,
    checked_layers,
    read_batch,
    read_mask,
    read_states,
    read_tokens,
)
from llamatap.train.sample import TrainingSample

__all__ = ["DataBuffer"]


class DataBuffer:
    """Buffer of the samples of several steps; new samples replace the oldest. Thread-safe.

    :param max_size: maximum number of samples that are kept over the steps.
    :param store_hidden_states: keep states over the steps. Otherwise only samples of the current step
        (:attr:`collected_data`) have states, and earlier ones have tokens only.
    :param current_size: maximum number of samples of the current step that :attr:`collected_data` keeps.
    :param dtype: dtype that states are converted to, "bfloat16" for half of the memory; None keeps theirs.
    :param max_bytes: maximum memory of all states, n_layers * n_embd values per token. Beyond it the oldest
        samples are dropped, from :attr:`collected_data` too; the newest sample stays, whatever its size. None
        for no limit.
    :raises InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        max_size: int = 10000,
        store_hidden_states: bool = True,
        *,
        current_size: int = 2000,
        dtype: DTypeLike | str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.max_size = integer("max_size", max_size, 1)
        self.store_hidden_states = flag("store_hidden_states", store_hidden_states)
        self.current_size = integer("current_size", current_size, 1)
        self._dtype = None if dtype is None else DTYPES[dtype_name(dtype)]
        self.max_bytes = None if max_bytes is None else integer("max_bytes", max_bytes, 1, 2**63 - 1)
        self._samples: deque[TrainingSample] = deque(maxlen=self.max_size)
        self._current: deque[TrainingSample] = deque(maxlen=self.current_size)
        self._step = 0
        self._lock = threading.Lock()

    def add_batch(
        self,
        batch: Mapping[str, Any],
        hidden_states: Iterable[Any] | None = None,
        *,
        layers: Sequence[LayerId] | None = None,
        n_layer: int | None = None,
    ) -> None:
        """Add copies of the samples of a batch: all of them, or none if it raises.

        :param batch: NumPy arrays, PyTorch tensors or lists. ``input_ids``: ``(n_samples, n)``, or a list of
            ``(n,)`` of any lengths, or one ``(n,)``. The other keys are optional and have an entry for each
            sample. ``attention_mask``: 0 where ``input_ids`` are padding, which is left out. ``loss_mask``:
            the tokens to learn. Without it these are the tokens of ``responses``, the last ones of
            ``input_ids``, or those after ``prompts``, padding included; without any of these keys, all.
        :param hidden_states: the states of each sample, or None where they are missing: ``(n, n_embd)`` or
            ``(n, n_layers, n_embd)``, with or without rows for the padding. ``(n_embd,)`` is one row; leading
            dimensions of 1 are dropped if there is more than one token, and so is the dimension of a single
            layer.
        :param layers: the layers of the states, in order; the last is the one to predict: ``"norm"`` or H_n.
            None if unknown: then the last one is predicted, whichever it is.
        :param n_layer: the number of blocks of the model, for layers that count from the end, and for H_n.
        :raises InvalidInputError: it is not a batch, states do not fit their tokens, or the last of the
            layers is neither ``"norm"`` nor H_n.
        """
        named = None if layers is None else checked_layers(layers, n_layer)
        self._append(read_batch(batch, hidden_states, named, self._dtype), named)

    def add_generation(self, generation: Generation) -> None:
        """Add a finished generation, with the states of the forward passes that generated it.

        An ``on_states`` callback for :func:`llamatap.generate`, with ``states="full"``,
        ``prompt_states=True`` and ``layers``, the last of which is the one to predict. The loss mask holds
        the generated tokens, not the prompt; without ``prompt_states`` a sample has no prompt. A token
        without a state (the last one of a full context) is left out.

        :raises InvalidInputError: a generated token has no state, or the last of the layers is neither
            ``"norm"`` nor H_n.
        """
        instance("generation", generation, Generation)
        # whole_states copied already.
        self._add(*whole_states(generation, self._dtype), copy=False)

    def add_states(self, states: States, loss_mask: Any = None) -> None:
        """Add the states of a whole text, from :func:`llamatap.extract` with ``layers``, the last of which is
        the one to predict.

        :param loss_mask: ``(n,)``: the tokens to learn, those of responses; None for all.
        :raises InvalidInputError: the states are pooled, the mask has another length, or the last of the
            layers is neither ``"norm"`` nor H_n.
        """
        instance("states", states, States)
        if states.array.ndim != 3:
            raise InvalidInputError("states must have a row for each token; extract without pool=")
        self._add(states, loss_mask)

    def _add(self, states: States, loss_mask: Any, copy: bool = True) -> None:
        layers = checked_layers(states.layers, states.n_layer)
        tokens = read_tokens("tokens", states.tokens)
        loss = read_mask("loss_mask", loss_mask, len(tokens))
        rows = read_states("states", states.array, np.ones(len(tokens), bool), self._dtype, copy)
        self._append([Arrays(tokens, loss, rows)], layers)

    def _append(self, found: Sequence[Arrays], layers: tuple[LayerId, ...] | None) -> None:
        finite = [one.hidden_states is None or bool(np.isfinite(one.hidden_states).all()) for one in found]
        for arrays in found:
            for array in arrays:
                if array is not None:
                    array.flags.writeable = False
        with self._lock:
            step = self._step
            for (ids, loss, rows), is_finite in zip(found, finite, strict=True):
                sample = TrainingSample(ids, loss, rows, layers, step, is_finite)
                self._current.append(sample)
                if not self.store_hidden_states:
                    sample = TrainingSample(ids, loss, None, layers, step, True)
                self._samples.append(sample)
            if self.max_bytes is not None:
                self._make_room(self.max_bytes)

    def _make_room(self, max_bytes: int) -> None:
        held = self._current
        if self.store_hidden_states:
            # Both hold the newest samples, so the longer one contains the other.
            held = max(self._samples, self._current, key=len)
        sizes = [0 if one.hidden_states is None else one.hidden_states.nbytes for one in held]
        taken = sum(sizes)
        for size in sizes[:-1]:
            if taken <= max_bytes:
                return
            taken -= size
            oldest = held[0]
            for kept in (self._samples, self._current):
                if kept and kept[0] is oldest:
                    kept.popleft()

    def get_all_data(self) -> list[TrainingSample]:
        """All samples in the buffer, oldest first."""
        with self._lock:
            return list(self._samples)

    def get_data_from_last_n_steps(self, n: int) -> list[TrainingSample]:
        """The samples of the last n steps, including the current one, oldest first; none for n <= 0."""
        n = integer("n", n)
        with self._lock:
            first = self._step - n + 1
            return [sample for sample in self._samples if n > 0 and sample.step >= first]

    def get_data_count(self) -> int:
        """The number of samples in the buffer."""
        with self._lock:
            return len(self._samples)

    @property
    def collected_data(self) -> list[TrainingSample]:
        """The newest ``current_size`` samples of the current step, oldest first."""
        with self._lock:
            return list(self._current)

    @property
    def step(self) -> int:
        """The current step, from 0."""
        with self._lock:
            return self._step

    def increment_step(self) -> None:
        """Begin the next step: empty :attr:`collected_data`; samples kept over the steps stay."""
        with self._lock:
            self._step += 1
            self._current.clear()

    def __repr__(self) -> str:
        with self._lock:
            return f"DataBuffer({len(self._samples)} of {self.max_size} samples, step {self._step})"
