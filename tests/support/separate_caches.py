"""Sequences with separate KV caches (kv_unified=False), for which the engine arranges ubatches itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from support.numerics import relative

import llamatap as lt
from llamatap._engine_context import engine_of
from llamatap._native import native_of

Way = Literal["hooks", "callback", "copies", "automatic"]


def captured(context: lt.Context, batch: lt.Batch, way: Way) -> NDArray[np.float32]:
    """The inputs of all blocks, (rows, layers, width)."""
    layers = list(range(context.model.n_layer))
    array, _ = native_of(context).decode_tapped(
        engine_of(context).layer_map, layers, "float32", False, batch, way
    )
    return array


def token_by_token(model: lt.Model, text: Sequence[int], way: Way, **options: object) -> NDArray[np.float32]:
    """The rows of a text decoded token by token, with no other sequence present."""
    with model.context(n_ctx=256, **options) as context:  # type: ignore[arg-type]
        rows = [captured(context, lt.Batch.of([token], pos0=at), way) for at, token in enumerate(text)]
    return np.concatenate(rows)


def check_streams(
    model: lt.Model,
    texts: Sequence[Sequence[int]],
    way: Way,
    *,
    in_turns: bool,
    bound: float,
    **options: object,
) -> None:
    """Check that every row of texts in one batch equals the row of the text alone.

    :param in_turns: a token of each, then the next one of each; else text after text.
    """
    alone = [token_by_token(model, text, way, **options) for text in texts]
    entries = [(at, seq) for seq, text in enumerate(texts) for at in range(len(text))]
    if in_turns:
        entries.sort()
    batch = lt.Batch()
    for at, seq in entries:
        batch.add(texts[seq][at], at, seq, at + 1 == len(texts[seq]))
    n_ctx = 256 * len(texts)
    with model.context(
        n_ctx=n_ctx,
        n_seq_max=len(texts),
        n_ubatch=max(8, len(texts)),
        kv_unified=False,
        **options,  # type: ignore[arg-type]
    ) as context:
        found = captured(context, batch, way)
    for row, (at, seq) in zip(found, entries, strict=True):
        # The worst row: one in another's place would hardly show in all of them together.
        assert relative(row, alone[seq][at]) < bound, f"token {at} of sequence {seq}"
