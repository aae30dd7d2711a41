"""Stage of Ray Data: rows in, rows with hidden states out."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.batch_computation import nonfinite_reason
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.plan import chosen_layers, extractor_options, longest_sample
from llamatap.dataset.row_files import COLUMNS
from llamatap.dataset.rows_to_samples import Preparer
from llamatap.errors import Error, InvalidInputError
from llamatap.extraction.extractor import Extractor
from llamatap.model import Model
from llamatap.states import DTYPES, States, dtype_name

__all__ = ["HiddenStates"]

_NAMES = ("input_ids", "loss_mask", "hidden_states", "error")

#: Columns of a row: token ids, loss mask, states, and the reason if there are no states.
_Made: TypeAlias = "tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[Any], str | None]"


class HiddenStates:
    """Class for :meth:`ray.data.Dataset.map_batches`, in its default batch format. Each worker has a model.

    >>> states = rows.map_batches(                                              # doctest: +SKIP
    ...     HiddenStates,
    ...     batch_size=64,
    ...     compute=ray.data.ActorPoolStrategy(size=8),
    ...     num_gpus=1,
    ...     fn_constructor_kwargs={"model": path, "options": options, "n_gpu_layers": -1},
    ... )

    Reads the same columns of a row as :func:`llamatap.dataset.write`, and passes the others on. Returned rows
    have

    * ``input_ids``, int32 ``(n,)``, and ``loss_mask``, bool ``(n,)``;
    * ``hidden_states``, ``(n, n_layers, n_embd)``, of exactly the options' layers, in their dtype. bfloat16,
      which Arrow does not have, comes as uint16 of the same bits;
    * ``error``: None, or the reason why the row has no states (its arrays then have 0 tokens).

    Ray chooses which rows share a batch, and rounding depends on that: :func:`llamatap.ray.write` is
    reproducible to the bit, this class is not.

    :param model: the GGUF file, by a path that is valid for the workers.
    :param options: the layers, dtype, lengths, template, ``on_error``, ``batch_tokens`` and ``context`` are
        used; the other options concern files.
    :param n_gpu_layers: see :class:`llamatap.Model`.
    :param weights: see :class:`llamatap.Model`.
    :raises InvalidInputError: an option is wrong; or, in a call, ``on_error`` is "stop" and a row cannot be
        used.
    :raises ModelLoadError: the file cannot be loaded.
    :raises UnsupportedError: the model carries no single residual stream.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: DatasetOptions | None = None,
        *,
        n_gpu_layers: int = 0,
        weights: Literal["f32", "f16", "bf16"] | None = None,
    ) -> None:
        self._options = options = options or DatasetOptions()
        self._model = Model(model, n_gpu_layers=n_gpu_layers, weights=weights)
        self._layers = chosen_layers(self._model, options)
        self._dtype = dtype_name(options.dtype)
        self._stored = np.dtype(np.uint16) if self._dtype == "bfloat16" else DTYPES[self._dtype]
        longest = longest_sample(self._model, options)
        date = options.date or datetime.date.today().isoformat()
        self._preparer = Preparer(self._model, replace(options, max_length=longest, date=date))
        self._extractor = Extractor(self._model, **extractor_options(self._model, options, longest))

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Compute a batch of rows.

        :param batch: columns of the same length, as NumPy arrays.
        """
        if not isinstance(batch, Mapping):
            raise InvalidInputError(
                f"a batch must be a dict of NumPy arrays, not {type(batch).__name__}: leave out batch_format"
            )
        names = [name for name in COLUMNS if name in batch]
        count = len(next(iter(batch.values()), ()))
        prepared = [self._prepared({name: _plain(batch[name][i]) for name in names}) for i in range(count)]
        tokens = [found[0] for found in prepared if not isinstance(found, str)]
        states = iter(self._extractor(tokens, self._layers, dtype=self._dtype) if tokens else [])
        made = [
            self._failed(found) if isinstance(found, str) else self._computed(*found, next(states))
            for found in prepared
        ]
        columns = {name: _objects([row[i] for row in made]) for i, name in enumerate(_NAMES)}
        return {name: column for name, column in batch.items() if name not in _NAMES} | columns

    def _prepared(self, row: Mapping[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | str:
        """The token ids and the loss mask of a row, or the reason why there are none."""
        try:
            tokens, mask, _ = self._preparer(row)
        except Error as error:
            return str(error)
        return tokens, mask

    def _computed(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_], states: States) -> _Made:
        layers = states.nonfinite_layers()
        if layers:
            return self._failed(nonfinite_reason(layers, self._dtype))
        return tokens, mask, states.array.view(self._stored), None

    def _failed(self, reason: str) -> _Made:
        if self._options.on_error == "stop":
            raise InvalidInputError(reason)
        shape = (0, len(self._layers), self._model.n_embd)
        return np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(shape, self._stored), reason


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of objects, which may be arrays of different lengths."""
    found = np.empty(len(values), object)
    for index, value in enumerate(values):
        found[index] = value
    return found


def _plain(value: Any) -> Any:
    """Convert a value of Ray to plain Python: arrays to lists, structs without null fields."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items() if entry is not None}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
