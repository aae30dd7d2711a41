"""Plan of a data set for a model: layers, batches, extractor options, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamatap._engine_context import engine_of
from llamatap._native import native_of
from llamatap.context import Context
from llamatap.dataset.layouts import Layout
from llamatap.dataset.options import DatasetOptions
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.extraction.packing import batch_sequence_limit, pack_prompts
from llamatap.layers import LayerId, default_eagle3_layers, translate_for
from llamatap.model import Model
from llamatap.states import array_facts

__all__ = [
    "chosen_layers",
    "columns",
    "extractor_options",
    "longest_sample",
    "provenance",
    "sample_batches",
]

# Number of samples that are packed into batches together, so that batches stay near the input order.
_WINDOW = 512


def chosen_layers(model: Model, options: DatasetOptions) -> tuple[LayerId, ...]:
    """The layers that the options name, in llamatap's numbering, without what a layout appends.

    :raises InvalidInputError: there are none, or the model has no such layers.
    :raises UnsupportedError: the model carries no single residual stream.
    """
    if options.layers is None:
        found = translate_for(model, default_eagle3_layers(model.n_layer))
    else:
        found = translate_for(model, options.layers, source=options.convention)
    if not found:
        raise InvalidInputError("layers is empty; give at least one layer id")
    return tuple(found)


def columns(model: Model, options: DatasetOptions, layout: type[Layout]) -> tuple[LayerId, ...]:
    """The layers to extract: those of the options, and the last layer that the layout stores.

    :raises InvalidInputError: the options name no layers, or some that the model does not have.
    :raises UnsupportedError: the model carries no single residual stream, or has no final norm and the
        layout stores its output.
    """
    found = chosen_layers(model, options)
    last: LayerId = "norm" if layout.last_is_norm else model.n_layer
    if last == "norm" and not model.layer_map.has_norm:
        raise UnsupportedError(
            f'the layout {layout.name} stores the layer "norm", and this model has no final norm; choose '
            "another layout"
        )
    return found if found[-1] == last else (*found, last)


def longest_sample(model: Model, options: DatasetOptions) -> int:
    """Maximum tokens of a sample: the least of ``max_length``, the context's size and the trained length."""
    limits = [options.max_length, options.context.get("n_ctx"), model.n_ctx_train, 2**31 - 1]
    return min(limit for limit in limits if limit)


def extractor_options(model: Model, options: DatasetOptions, longest: int) -> dict[str, Any]:
    """Options of the extractor.

    :param longest: the number of tokens of the longest sample.
    """
    found: dict[str, Any] = {"n_ubatch": options.batch_tokens, **options.context}
    if model.layer_map.at_once:
        found["n_ubatch"] = found["n_batch"] = max(found["n_ubatch"], longest)
    most = batch_sequence_limit(native_of(model)) if found.get("kv_unified", True) else 1
    found.setdefault("n_seq_max", most)
    return found


def sample_batches(lengths: Sequence[int], room: int, most: int) -> list[list[int]]:
    """Pack samples into batches: lists of their indices.

    The number of workers has no influence, because rounding depends on the batches.

    :param lengths: the number of tokens of each sample.
    :param room: maximum number of tokens in a batch; a longer sample gets its own batch.
    :param most: maximum number of samples in a batch.
    """
    found: list[list[int]] = []
    for start in range(0, len(lengths), _WINDOW):
        part = pack_prompts(lengths[start : start + _WINDOW], room, most)
        found += sorted(sorted(start + index for index in pack) for pack in part)
    return found


def provenance(
    model: Model, options: DatasetOptions, layers: Sequence[LayerId], dtype: str
) -> dict[str, Any]:
    """Provenance that the states of all samples share: file, engine, back end, layers, ...

    Makes a small context and computes nothing: only a context knows whether flash attention is in use.

    :param layers: the layers, in llamatap's numbering.
    :param dtype: dtype of the states.
    """
    small = {"n_ctx": 512, "n_outputs_max": options.context.get("n_seq_max", 1)}
    with Context(model, **{**small, **options.context}) as context:
        facts = {**engine_of(context).source.facts, **array_facts(layers, dtype)}
    return {key: value for key, value in facts.items() if value is not None}
