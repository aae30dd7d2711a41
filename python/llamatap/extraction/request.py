"""An extraction request: the checked arguments of one call, with the arrays for its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import layers as layer_ids
from llamatap._native import _core, native_of
from llamatap._system_limits import require_memory
from llamatap._validate import choice, integer, separate
from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import (
    CheckedPrompt,
    Input,
    Window,
    checked_out,
    checked_prompt,
    is_single,
    window_bounds,
)
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel
from llamatap.states import DTYPES, States, dtype_name, typed_view

__all__ = ["ExtractionRequest", "Pooling", "PromptJob"]

Pooling = Literal["mean", "last", "max"]


@dataclass
class PromptJob:
    """One prompt of a call: its window of positions and its output array."""

    prompt: CheckedPrompt
    begin: int
    end: int
    shape: tuple[int, ...]
    given: NDArray[Any] | None  # the caller's array for the states
    out: NDArray[Any] = field(init=False)


def _chosen_dtype(dtype: DTypeLike | str | None, outs: Sequence[object]) -> str:
    """The name of the requested dtype; by default that of the first output array, or float32."""
    if dtype is not None:
        return dtype_name(dtype)
    first = next((out for out in outs if isinstance(out, np.ndarray)), None)
    return "float32" if first is None else dtype_name(first.dtype, "the dtype of out")


class ExtractionRequest:
    """One call of :func:`llamatap.extract`, with its parameters, before anything is computed.

    :raises InvalidInputError: an argument is wrong.
    :raises OutOfMemoryError: the states do not fit into memory.
    :ivar layers: normalised layer ids.
    :ivar slots: the core's numbers of these layers.
    :ivar single: whether there is one prompt, not a list of them.
    """

    def __init__(
        self,
        model: LoadedModel,
        inputs: Input | Sequence[Input],
        layers: Iterable[LayerId] | LayerId,
        dtype: DTypeLike | str | None,
        max_length: int | None,
        window: Window | Sequence[Window | None] | None,
        pool: Pooling | None,
        out: NDArray[Any] | Sequence[NDArray[Any]] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        if cancelled is not None and not callable(cancelled):
            raise InvalidInputError(f"cancelled must be a function, not {type(cancelled).__name__}")
        self.cancelled = cancelled
        if model.n_layer == 0:
            model.layer_map  # noqa: B018  without weights there are no blocks either: raises
        self.n_layer = model.n_layer
        self.layers = layer_ids.normalize(layers, self.n_layer)
        self.slots = layer_ids.slots(self.layers, self.n_layer)
        if pool is not None:
            choice("pool", pool, ("mean", "last", "max"))
        self.pool = pool
        self.max_length = None if max_length is None else integer("max_length", max_length, 1)
        self.single = is_single(inputs)
        prompts: Sequence[Any] = [inputs] if self.single else inputs  # type: ignore[assignment]
        outs = self._one_each("out", out, len(prompts), isinstance(out, np.ndarray))
        windows = self._one_each("window", window, len(prompts), isinstance(window, tuple))
        self.dtype = _chosen_dtype(dtype, outs)
        self.jobs: list[PromptJob] = []
        for index, prompt in enumerate(prompts):
            where = "" if self.single else f"input {index}: "
            try:
                self.jobs.append(self._job(model, prompt, windows[index], outs[index]))
            except InvalidInputError as error:
                raise InvalidInputError(f"{where}{error}") from None
        separate("outs", [(i, job.given) for i, job in enumerate(self.jobs) if job.given is not None])
        self._allocate(model)

    @property
    def longest_prompt(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(job.prompt) for job in self.jobs)

    def result(self, states: Mapping[int, States]) -> States | list[States]:
        """The value that the call returns: the states of its prompt, or a list of them in order."""
        return states[0] if self.single else [states[i] for i in range(len(self.jobs))]

    def _one_each(self, name: str, value: Any, count: int, is_one: bool) -> list[Any]:
        if value is None:
            return [None] * count
        if is_one:
            if name == "out" and not self.single:
                raise InvalidInputError("a list of inputs needs a list of outs, one for each input")
            return [value] * count
        if self.single or not isinstance(value, Sequence):
            one = {"out": "a NumPy array", "window": "(start, stop)"}[name]
            many = "" if self.single else ", or a list of them, one for each input"
            raise InvalidInputError(f"{name} must be {one}{many}, not {type(value).__name__}")
        if len(value) != count:
            raise InvalidInputError(f"there are {count} inputs, but {len(value)} entries in {name}")
        return list(value)

    def _job(self, model: LoadedModel, prompt: Input, window: Window | None, out: object) -> PromptJob:
        checked = checked_prompt(model, prompt, self.max_length)
        begin, end = window_bounds(window, len(checked))
        rows = () if self.pool is not None else (end - begin,)
        shape = (*rows, len(self.layers), model.n_embd)
        given = None if out is None else checked_out(out, shape, self.dtype)
        return PromptJob(checked, begin, end, shape, given)

    def _allocate(self, model: LoadedModel) -> None:
        """Allocate states for the prompts without a given array."""
        shapes = [job.shape for job in self.jobs if job.given is None]
        n_rows = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)
        require_memory(
            sum(map(math.prod, shapes)) * DTYPES[self.dtype].itemsize,
            f"the states ({n_rows:,} rows of {len(self.layers)} layers, {self.dtype}) take",
            "request fewer layers or prompts, a window, a pool or float16, or give a memmap as out",
        )
        for job in self.jobs:
            if job.given is None:
                job.out = typed_view(_core.allocate(job.shape, self.dtype, native_of(model)), self.dtype)
            else:
                job.out = job.given
