"""A trainer's batch to samples: arrays, PyTorch tensors or lists, checked and copied, without padding."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import integer
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId, normalize
from llamatap.states import DTYPES, dtype_name

__all__ = ["Arrays", "checked_layers", "read_batch", "read_mask", "read_states", "read_tokens"]

#: Optional keys of a batch, besides input_ids.
_COLUMNS = ("attention_mask", "loss_mask", "responses", "prompts")


class Arrays(NamedTuple):
    """The arrays of one sample, copied."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    hidden_states: NDArray[Any] | None


def read_batch(
    batch: Mapping[str, Any],
    hidden_states: Iterable[Any] | None,
    layers: tuple[LayerId, ...] | None,
    dtype: np.dtype[Any] | None,
) -> list[Arrays]:
    """The samples of a batch, as :meth:`llamatap.train.DataBuffer.add_batch` takes it.

    :param layers: the layers of the states; None if unknown.
    :param dtype: the dtype that states are converted to; None keeps theirs.
    :raises InvalidInputError: it is not a batch, or states do not fit their tokens.
    """
    if not isinstance(batch, Mapping) or batch.get("input_ids") is None:
        raise InvalidInputError("a batch must be a dict with 'input_ids'")
    texts = _split(batch["input_ids"])
    columns = {name: _column(batch, name, len(texts)) for name in _COLUMNS}
    states = [None] * len(texts) if hidden_states is None else list(hidden_states)
    if len(states) != len(texts):
        raise InvalidInputError(
            f"hidden_states must have an entry for each of the {len(texts)} samples, None where they are "
            f"missing; found {len(states)}"
        )
    found = []
    for i, text in enumerate(texts):
        tokens = read_tokens(f"input_ids of sample {i}", text)
        kept = read_mask(f"attention_mask of sample {i}", columns["attention_mask"][i], len(tokens)) != 0
        loss = _loss_mask(i, {name: column[i] for name, column in columns.items()}, len(tokens))
        rows = None
        if states[i] is not None:
            rows = read_states(f"hidden_states of sample {i}", states[i], kept, dtype)
            n_layers = 1 if rows is None or rows.ndim == 2 else rows.shape[1]
            if rows is not None and layers is not None and len(layers) != n_layers:
                raise InvalidInputError(
                    f"hidden_states of sample {i} have {n_layers} layers; layers= names {list(layers)}"
                )
        found.append(Arrays(tokens[kept], loss[kept], rows))
    return found


def checked_layers(layers: Sequence[LayerId], n_layer: int | None) -> tuple[LayerId, ...]:
    """Layers as in :class:`llamatap.States`, checked that the last of them can be predicted.

    :param n_layer: the number of blocks of the model, if known.
    :raises InvalidInputError: an id is wrong, or the last is neither ``"norm"`` nor H_n.
    """
    if n_layer is not None:
        found = normalize(layers, integer("n_layer", n_layer, 1))
    else:
        what = "without n_layer= an id of layers="
        found = tuple(one if one == "norm" else integer(what, one, 0) for one in layers)
    if found[-1:] not in (("norm",), (n_layer,)):
        how = "" if n_layer is not None else ", with n_layer="
        raise InvalidInputError(
            "the last of layers= is the one that a drafter learns to predict: 'norm', which the output head "
            f"reads, or -1 (H_n{how}) for trainers that apply the norm themselves; found {list(layers)}"
        )
    return found


def read_tokens(name: str, value: Any) -> NDArray[np.int64]:
    """Token ids, int64 ``(n,)``."""
    array = _array(value)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise InvalidInputError(
            f"{name} must be integers of the shape (n,); found {array.dtype} of {array.shape}"
        )
    if array.size and array.min() < 0:
        raise InvalidInputError(f"{name} must be token ids of 0 or more; found {array.min()}")
    return array.astype(np.int64)


def read_mask(name: str, value: Any, n: int) -> NDArray[np.float32]:
    """Zeros and ones for n tokens, float32 ``(n,)``; ones if the value is None."""
    if value is None:
        return np.ones(n, np.float32)
    array = _array(value)
    if array.shape != (n,) or not np.isin(array, (0, 1)).all():
        raise InvalidInputError(
            f"{name} must be 0 or 1 for each of the {n} tokens; found {array.dtype} of {array.shape}"
        )
    return array.astype(np.float32)


def read_states(
    name: str, value: Any, kept: NDArray[np.bool_], dtype: np.dtype[Any] | None, copy: bool = True
) -> NDArray[Any] | None:
    """States, ``(n, n_embd)`` or ``(n, n_layers, n_embd)``, of the tokens that are kept; None if empty.

    :param kept: which tokens are not padding, bool ``(n_padded,)``.
    :param dtype: the dtype to convert to; None keeps theirs.
    """
    array = np.asarray(value, np.float32) if isinstance(value, (list, tuple)) else _array(value)
    dtype_name(array.dtype, name)
    if array.size == 0:
        return None
    found = array.shape
    n_padded, n = len(kept), int(kept.sum())
    if array.ndim == 1:
        array = array[None]
    while array.ndim > 2 and len(array) == 1 and 1 not in (n, n_padded):
        array = array[0]
    if array.ndim == 3 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (2, 3) or len(array) not in (n, n_padded):
        padded = "" if n == n_padded else f" (or {n_padded}, with padding)"
        raise InvalidInputError(
            f"{name} must be (n, n_embd) or (n, n_layers, n_embd) with n={n}{padded}, a row for each of its "
            f"tokens; found {found}"
        )
    if len(array) != n:
        array = array[kept]
    return array.astype(array.dtype if dtype is None else dtype, order="C", copy=copy)


def _array(value: Any) -> NDArray[Any]:
    """A value as a NumPy array; a PyTorch tensor is moved to the CPU first."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        # NumPy has no bfloat16 of its own.
        bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(DTYPES["bfloat16"])
    array: NDArray[Any] = tensor.numpy()
    return array


def _split(value: Any) -> list[Any]:
    """The entries of a column, one per sample; a single sample may be given without a list around it."""
    if isinstance(value, (list, tuple)) and value and _array(value[0]).ndim:
        return list(value)
    array = _array(value)
    return list(array) if array.ndim == 2 else [array]


def _column(batch: Mapping[str, Any], name: str, n_samples: int) -> list[Any]:
    value = batch.get(name)
    entries = [None] * n_samples if value is None else _split(value)
    if len(entries) != n_samples:
        raise InvalidInputError(
            f"{name} must have {n_samples} entries, as input_ids have; found {len(entries)}"
        )
    return entries


def _loss_mask(i: int, entries: Mapping[str, Any], n: int) -> NDArray[np.float32]:
    mask = read_mask(f"loss_mask of sample {i}", entries["loss_mask"], n)
    if entries["loss_mask"] is not None:
        return mask
    if entries["responses"] is not None:
        n_prompt = n - len(entries["responses"])
    else:
        n_prompt = 0 if entries["prompts"] is None else len(entries["prompts"])
    if not 0 <= n_prompt <= n:
        raise InvalidInputError(f"the prompt or the response of sample {i} is longer than its {n} input_ids")
    mask[:n_prompt] = 0
    return mask
