"""Where samples are kept: texts with the target's states of their tokens, of this step and those before."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap._validate import flag, instance, integer
from llamatap.errors import InvalidInputError
from llamatap.generation.results import Generation, whole_states
from llamatap.layers import LayerId, normalize
from llamatap.states import DTYPES, States, dtype_name

__all__ = ["DataBuffer", "Sample"]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A text to train on, with its states; :class:`llamatap.dataset.samples.Sample` has none yet.

    :ivar input_ids: int64 ``(n,)``.
    :ivar loss_mask: float32 ``(n,)``: 1 for tokens that are to be learnt (those of a response), else 0.
    :ivar hidden_states: the target's states of the tokens: ``(n, n_embd)`` of one layer, ``(n, n_layers,
        n_embd)`` of several, the last of which is the one to predict; float32, float16 or bfloat16. None
        where they are missing.
    :ivar layers: the layers of the states, as of :class:`llamatap.States`; None where nobody said.
    :ivar step: the step in which it was added.
    :ivar finite: whether the states hold neither NaN nor infinity.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    hidden_states: NDArray[Any] | None
    layers: tuple[LayerId, ...] | None
    step: int
    finite: bool


class DataBuffer:
    """Samples of several steps, the oldest of which make room for new ones. Any thread may add while others
    read.

    :param max_size: how many samples are kept over the steps.
    :param store_hidden_states: keep states over the steps; otherwise only those of the current step's samples
        (:attr:`collected_data`) are kept, and of earlier ones the tokens alone.
    :param current_size: how many samples of the current step are kept in :attr:`collected_data`.
    :param dtype: what states are converted to, "bfloat16" for half of the memory; None keeps them.
    :param max_bytes: how much memory all states take together, n_layers * n_embd values a token. Beyond it
        the oldest samples make room, in :attr:`collected_data` too, but the newest one stays, whatever it
        takes. None for no bound.
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
        self._samples: deque[Sample] = deque(maxlen=self.max_size)
        self._current: deque[Sample] = deque(maxlen=self.current_size)
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
        """Keep copies of the samples of a batch: of all of them, or of none when it raises.

        :param batch: NumPy arrays, PyTorch tensors or lists. ``input_ids``: ``(n_samples, n)``, or a list of
            ``(n,)`` of any lengths, or one ``(n,)``. The others, where given, have an entry for each sample.
            ``attention_mask``: 0 where ``input_ids`` are padding, which is left out. ``loss_mask``; without
            it the tokens of ``responses`` count, the last ones of ``input_ids``, or those after ``prompts``,
            padding included; without these all count.
        :param hidden_states: for each sample its states, or None where they are missing: ``(n, n_embd)`` or
            ``(n, n_layers, n_embd)``, of its tokens with or without the padding. ``(n_embd,)`` is one row;
            leading dimensions of 1 are dropped where there is more than one token, and so is that of a
            single layer.
        :param layers: which layers they are of, in order, the last of which is the one to predict: ``"norm"``
            or H_n. None where it is not known; the last one is predicted then, whatever it is.
        :param n_layer: the blocks of the model, for layers that count from the end, and for H_n.
        :raises InvalidInputError: the batch is none, states do not fit their tokens, or the last of the
            layers is neither ``"norm"`` nor H_n.
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
        named = None if layers is None else _checked_layers(layers, n_layer)
        found = []
        for i, text in enumerate(texts):
            tokens = _tokens(f"input_ids of sample {i}", text)
            kept = _mask(f"attention_mask of sample {i}", columns["attention_mask"][i], len(tokens)) != 0
            loss = _loss_mask(i, {name: column[i] for name, column in columns.items()}, len(tokens))
            rows = None
            if states[i] is not None:
                rows = _rows(f"hidden_states of sample {i}", states[i], kept, self._dtype)
                n_layers = 1 if rows is None or rows.ndim == 2 else rows.shape[1]
                if rows is not None and named is not None and len(named) != n_layers:
                    raise InvalidInputError(
                        f"hidden_states of sample {i} are of {n_layers} layers; layers= names {list(named)}"
                    )
            found.append((tokens[kept], loss[kept], rows))
        self._append(found, named)

    def add_generation(self, generation: Generation) -> None:
        """Keep what was generated, with the states of the passes that it was made in: to be given to
        :func:`llamatap.generate` as ``on_states``, with ``states="full"``, ``prompt_states=True`` and
        ``layers``, the last of which is the one to predict. The generated tokens count for the loss, the
        prompt's do not; without ``prompt_states`` a sample has no prompt. What has no state (the last token
        of a full context) is left out.

        :raises InvalidInputError: the generation has no states of each token, or the last of its layers is
            neither ``"norm"`` nor H_n.
        """
        instance("generation", generation, Generation)
        # whole_states has copied already.
        self._add(*whole_states(generation, self._dtype), copy=False)

    def add_states(self, states: States, loss_mask: Any = None) -> None:
        """Keep what a forward pass gave, :func:`llamatap.extract` of a whole text with ``layers``, the last
        of which is the one to predict.

        :param loss_mask: ``(n,)``: which tokens count, those of responses; None for all.
        :raises InvalidInputError: the states are pooled, the mask has another length, or the last of the
            layers is neither ``"norm"`` nor H_n.
        """
        instance("states", states, States)
        if states.array.ndim != 3:
            raise InvalidInputError("states must have a row for each token; extract without pool=")
        self._add(states, loss_mask)

    def _add(self, states: States, loss_mask: Any, copy: bool = True) -> None:
        layers = _checked_layers(states.layers, states._n_layer)
        tokens = _tokens("tokens", states.tokens)
        loss = _mask("loss_mask", loss_mask, len(tokens))
        rows = _rows("states", states.array, np.ones(len(tokens), bool), self._dtype, copy)
        self._append([(tokens, loss, rows)], layers)

    def _append(
        self,
        found: Sequence[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[Any] | None]],
        layers: tuple[LayerId, ...] | None,
    ) -> None:
        finite = [rows is None or bool(np.isfinite(rows).all()) for _, _, rows in found]
        for arrays in found:
            for array in arrays:
                if array is not None:
                    array.flags.writeable = False
        with self._lock:
            step = self._step
            for (ids, loss, rows), is_finite in zip(found, finite, strict=True):
                sample = Sample(ids, loss, rows, layers, step, is_finite)
                self._current.append(sample)
                if not self.store_hidden_states:
                    sample = Sample(ids, loss, None, layers, step, True)
                self._samples.append(sample)
            if self.max_bytes is not None:
                self._make_room(self.max_bytes)

    def _make_room(self, max_bytes: int) -> None:
        held = self._current
        if self.store_hidden_states:
            # Each is the end of what was added, so the longer one holds all that the other does.
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

    def get_all_data(self) -> list[Sample]:
        """All samples that are kept, oldest first."""
        with self._lock:
            return list(self._samples)

    def get_data_from_last_n_steps(self, n: int) -> list[Sample]:
        """The samples of the last n steps, the current one included, oldest first; none for n <= 0."""
        n = integer("n", n)
        with self._lock:
            first = self._step - n + 1
            return [sample for sample in self._samples if n > 0 and sample.step >= first]

    def get_data_count(self) -> int:
        """How many samples are kept."""
        with self._lock:
            return len(self._samples)

    @property
    def collected_data(self) -> list[Sample]:
        """The samples of the current step, oldest first, the newest ``current_size`` of them."""
        with self._lock:
            return list(self._current)

    @property
    def step(self) -> int:
        """The current step, from 0 on."""
        with self._lock:
            return self._step

    def increment_step(self) -> None:
        """The next step begins: :attr:`collected_data` is empty, what is kept over the steps stays."""
        with self._lock:
            self._step += 1
            self._current.clear()

    def __repr__(self) -> str:
        with self._lock:
            return f"DataBuffer({len(self._samples)} of {self.max_size} samples, step {self._step})"


#: Optional keys of a batch, besides input_ids.
_COLUMNS = ("attention_mask", "loss_mask", "responses", "prompts")


def _checked_layers(layers: Sequence[LayerId], n_layer: int | None) -> tuple[LayerId, ...]:
    """Layers as those of States, the last of which can be predicted."""
    if n_layer is not None:
        found = normalize(layers, integer("n_layer", n_layer, 1))
    else:
        what = "without n_layer= an id of layers="
        found = tuple(one if one == "norm" else integer(what, one, 0) for one in layers)
    if found[-1:] not in (("norm",), (n_layer,)):
        how = "" if n_layer is not None else ", with n_layer="
        raise InvalidInputError(
            "the last of layers= is the one that a drafter learns to predict: 'norm', which the output head "
            f"reads, or -1 (H_n{how}) for trainers that norm it themselves; found {list(layers)}"
        )
    return found


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
    """The entries of samples; of a single one, it alone."""
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


def _tokens(name: str, value: Any) -> NDArray[np.int64]:
    array = _array(value)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise InvalidInputError(
            f"{name} must be integers of the shape (n,); found {array.dtype} of {array.shape}"
        )
    if array.size and array.min() < 0:
        raise InvalidInputError(f"{name} must be token ids of 0 or more; found {array.min()}")
    return array.astype(np.int64)


def _mask(name: str, value: Any, n: int) -> NDArray[np.float32]:
    """Zeros and ones, one for each token; ones where nothing is given."""
    if value is None:
        return np.ones(n, np.float32)
    array = _array(value)
    if array.shape != (n,) or not np.isin(array, (0, 1)).all():
        raise InvalidInputError(
            f"{name} must be 0 or 1 for each of the {n} tokens; found {array.dtype} of {array.shape}"
        )
    return array.astype(np.float32)


def _loss_mask(i: int, entries: Mapping[str, Any], n: int) -> NDArray[np.float32]:
    mask = _mask(f"loss_mask of sample {i}", entries["loss_mask"], n)
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


def _rows(
    name: str, value: Any, kept: NDArray[np.bool_], dtype: np.dtype[Any] | None, copy: bool = True
) -> NDArray[Any] | None:
    """States, ``(n, n_embd)`` or ``(n, n_layers, n_embd)``, of the tokens that are kept."""
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
