"""Training batches: the window of each sample, and the pairing of tokens with states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import choice, integer
from llamatap.errors import InvalidInputError
from llamatap.train.sample import TrainingSample

__all__ = ["PAIRINGS", "Pairing", "TrainingBatch", "trainable", "training_batch", "window"]

#: The token paired with the state h[t]. "eagle": the next one, token[t+1], as in the engine and in EAGLE's
#: own code (llama.cpp, speculators, SpecForge). "verl": its own, token[t], as in the co-training of verl.
Pairing = Literal["eagle", "verl"]
PAIRINGS = get_args(Pairing)


class TrainingBatch(TypedDict):
    """Concatenated samples, L tokens in all, shifted by one: at t, the drafter reads the token
    ``input_ids[t]`` and the states ``hidden_states[t]``, and learns to predict ``target[t]``.

    :ivar input_ids: int64 ``[1, L-1]``: token[t+1] or token[t], see :data:`Pairing`.
    :ivar hidden_states: ``[1, L-1, D]``: h[t]. EAGLE-1/2: of the last layer, D = n_embd. EAGLE-3: of all
        layers but the last one, concatenated, D = (n_layers - 1) * n_embd.
    :ivar target: ``[1, L-1, n_embd]``: h[t+1] of the last layer.
    :ivar loss_mask: float32 ``[1, L-1]``: 1 where token t+1 is to be learnt; 0 where t and t+1 belong to two
        samples.
    :ivar attention_mask: int64 ``[1, L-1]``: ones; there is no padding.
    :ivar document_ids: int64 ``[1, L-1]``: the sample of h[t], from 0. Samples must not attend to one
        another: t attends to u <= t of its own document only.
    :ivar position_ids: int64 ``[1, L-1]``: the position of ``input_ids[t]`` in its window.
    """

    input_ids: NDArray[np.int64]
    hidden_states: NDArray[Any]
    target: NDArray[Any]
    loss_mask: NDArray[np.float32]
    attention_mask: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]


def window(sample: TrainingSample, max_len: int = 512) -> tuple[int, int]:
    """The part of a sample to train on: ``max_len`` tokens, or the whole sample if that is shorter.

    It starts at the first token of the response if the response fits; otherwise it is the end of the
    response. Without a response it is the end of the sample.

    :returns: (start, stop): 2,048 tokens of which the last 548 are the response give (1536, 2048).
    """
    max_len = integer("max_len", max_len, 2)
    n = len(sample.input_ids)
    length = min(n, max_len)
    response = np.flatnonzero(sample.loss_mask)
    if not len(response):
        return n - length, n
    begin, end = int(response[0]), int(response[-1]) + 1
    # Not so late that the window would be shorter than necessary.
    start = min(begin, n - length)
    if end - start > length:
        start = end - length
    return start, start + length


def trainable(
    samples: Iterable[TrainingSample], max_len: int = 512
) -> tuple[list[TrainingSample], dict[str, int]]:
    """Select the samples that can be trained on.

    :returns: these samples, in order, and the number of the others by reason: "no states", "rows, tokens and
        loss mask of unlike lengths", "fewer than 2 rows", "NaN or infinity in the states", "no token in the
        window counts for the loss".
    """
    found = []
    reasons: Counter[str] = Counter()
    for sample in samples:
        if reason := _why_not(sample, max_len):
            reasons[reason] += 1
        else:
            found.append(sample)
    return found, dict(reasons)


def _why_not(sample: TrainingSample, max_len: int) -> str | None:
    if sample.hidden_states is None:
        return "no states"
    if not len(sample.hidden_states) == len(sample.input_ids) == len(sample.loss_mask):
        return "rows, tokens and loss mask of unlike lengths"
    if len(sample.hidden_states) < 2:
        return "fewer than 2 rows"
    if not sample.finite:
        return "NaN or infinity in the states"
    start, stop = window(sample, max_len)
    # The first token of a window is not predicted: no token comes before it.
    if not sample.loss_mask[start + 1 : stop].any():
        return "no token in the window counts for the loss"
    return None


def training_batch(
    samples: Iterable[TrainingSample], *, max_len: int = 512, pairing: Pairing = "eagle"
) -> TrainingBatch:
    """Make a batch of the windows of the samples that can be trained on (:func:`trainable`).

    :param max_len: maximum number of tokens in a window.
    :param pairing: "eagle" to train drafters that the engine runs; see :data:`Pairing`.
    :raises InvalidInputError: there is nothing to train on, with the numbers of samples by reason; or the
        samples differ in layers, shapes or dtypes.
    """
    choice("pairing", pairing, PAIRINGS)
    samples = list(samples)
    chosen, reasons = trainable(samples, max_len)
    if not chosen:
        raise InvalidInputError(nothing_to_train_on(len(samples), reasons))
    parts = [slice(*window(sample, max_len)) for sample in chosen]
    inputs, last = _columns(chosen, parts)
    lengths = [part.stop - part.start for part in parts]
    tokens = np.concatenate([sample.input_ids[part] for sample, part in zip(chosen, parts, strict=True)])
    counts = np.concatenate([sample.loss_mask[part] for sample, part in zip(chosen, parts, strict=True)])
    places = np.concatenate([np.arange(length) for length in lengths])
    documents = np.repeat(np.arange(len(lengths)), lengths)
    # The last row of a sample does not predict the first of the next one.
    counts[1:][documents[1:] != documents[:-1]] = 0
    is_next = pairing == "eagle"
    return {
        "input_ids": (tokens[1:] if is_next else tokens[:-1])[None],
        "hidden_states": inputs[None, :-1],
        "target": last[None, 1:],
        "loss_mask": counts[None, 1:],
        "attention_mask": np.ones((1, len(tokens) - 1), np.int64),
        "document_ids": documents[None, :-1],
        "position_ids": places[None, :-1] + is_next,
    }


def _columns(samples: Sequence[TrainingSample], parts: Sequence[slice]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The inputs ``(L, D)`` and targets ``(L, n_embd)`` of a drafter.

    They share no memory, because trainers add noise to the inputs in place.
    """
    arrays = [np.asarray(sample.hidden_states) for sample in samples]
    kinds = {
        (one.layers, array.shape[1:], str(array.dtype)) for one, array in zip(samples, arrays, strict=True)
    }
    if len(kinds) > 1:
        found = "; ".join(
            f"layers {'unknown' if layers is None else list(layers)}, rows of {shape}, {dtype}"
            for layers, shape, dtype in sorted(kinds, key=str)
        )
        raise InvalidInputError(
            f"samples of one batch must have the same layers, shape and dtype; found {found}"
        )
    windows = [array[part] for array, part in zip(arrays, parts, strict=True)]
    if windows[0].ndim == 2:
        last = np.concatenate(windows)
        return last.copy(), last
    inputs = np.concatenate([rows[:, :-1].reshape(len(rows), -1) for rows in windows])
    return inputs, np.concatenate([rows[:, -1] for rows in windows])


def nothing_to_train_on(n_samples: int, reasons: dict[str, int]) -> str:
    """Error message that there is nothing to train on, with the reasons."""
    if not n_samples:
        return (
            "there is nothing to train on: no sample was added; give on_states=buffer.add_generation to "
            "lt.generate, or what lt.extract returns to buffer.add_states"
        )
    counts = ", ".join(f"{count} with {reason}" for reason, count in reasons.items())
    return f"there is nothing to train on in {n_samples} samples: {counts}"
