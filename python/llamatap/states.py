"""Captured hidden states and their provenance; saving and loading them."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import layers as layer_ids
from llamatap._validate import flag, integer, shown
from llamatap._validate import path as checked_path
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.storage.model_files import ModelFiles
from llamatap.storage.safetensors_metadata import JSON_KEYS
from llamatap.storage.tensor_files import check_suffix, read_tensors, write_tensors

__all__ = ["DTYPES", "Source", "States", "array_facts", "check_finite", "dtype_name"]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# The names of tensors that are read from files: those of States.save, and other writers' names for them.
_TENSORS = ("hidden_states", "prompt_embeds", "tokens", "token_ids")
# Fields of the server's bodies that stand beside the provenance.
_OF_BODIES = ("preset", "truncated")
# Provenance that is computed from the arrays.
_OF_ARRAYS = ("dtype", "layers", "norm")
# Fields that describe the arrays, or how to read a file of them; details must not have these names.
_NOT_DETAILS = frozenset(
    (
        "convention",
        "dtype",
        "layers",
        "n_embd",
        "n_layer",
        "norm",
        "pooling",
        "provenance",
        "truncated",
        JSON_KEYS,
    )
)


def dtype_name(dtype: DTypeLike | str, what: str = "dtype") -> str:
    """The dtype's name, "float32", "float16" or "bfloat16", from anything that NumPy takes for one.

    :raises InvalidInputError: another dtype, or one of another byte order.
    """
    if isinstance(dtype, str) and dtype in ("bfloat16", "bf16"):
        return "bfloat16"
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        found = None
    for name, known in DTYPES.items():
        if found == known:
            return name
    raise InvalidInputError(f"{what} must be float32, float16 or bfloat16, not {shown(dtype)}")


def typed_view(array: NDArray[Any], name: str) -> NDArray[Any]:
    """View `array` as the named dtype: the core gives bfloat16 as uint16."""
    return array.view(DTYPES[name]) if name == "bfloat16" else array


def array_facts(layers: Sequence[LayerId], dtype: str) -> dict[str, Any]:
    """Provenance that describes an array of states: its layers, their numbering, its dtype."""
    return {
        "layers": list(layers),
        "convention": "llamatap: id i is the residual stream that enters block i, n the one after "
        'the last block, both without the final norm; "norm" is norm(H_n)',
        "norm": ["post" if layer == "norm" else "pre" for layer in layers],
        "dtype": dtype,
    }


class Source:
    """Origin of the states of a context: the model's files, and the provenance that all its states share."""

    def __init__(self, files: ModelFiles, facts: dict[str, Any]) -> None:
        self._files = files
        self._facts = facts

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The facts, with the model's sha256 (computed once per file, then cached)."""
        return {"model": self._files.paths[0].name, "model_sha256": self._files.sha256(), **self._facts}


class States:
    """Hidden states of some layers, one row per token.

    :ivar array: ``(n_tokens, n_layers, n_embd)``, or ``(n_layers, n_embd)`` when pooled; float32,
        float16 or bfloat16; a read-only view of native memory (with ``out``: of that array).
    :ivar tokens: int32 ``(n_tokens,)``, the ids of the rows' tokens (-1 for embeddings); of a pooled
        result, those of the tokens that were pooled.
    :ivar layers: the layer of each column, in 0..n or ``"norm"``.
    """

    def __init__(
        self,
        array: NDArray[Any],
        tokens: NDArray[np.int32],
        layers: Sequence[LayerId],
        *,
        n_layer: int,
        source: Source | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        self.array = array
        self.tokens = tokens
        self.layers: tuple[LayerId, ...] = tuple(layers)
        self._n_layer = n_layer
        self._source = source
        self._details = {key: value for key, value in (details or {}).items() if value is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.array.flags.writeable = self.tokens.flags.writeable = False  # copies and pickles lose this

    @property
    def n_layer(self) -> int:
        """The number of blocks of the model: the id of the last layer before the final norm."""
        return self._n_layer

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Origin and description of the states.

        ``model`` (file name), ``model_sha256`` (of a split model: of the lines with its shards' sha256, in
        order; None if a file is gone or was replaced), ``arch``, ``file_type``, ``weights`` (the type that
        they were converted to, if any), ``n_layer``, ``n_embd``, ``engine_commit``, ``llamatap_version``,
        ``backend``, ``type_k``, ``type_v``, ``flash_attention``, ``layers``, ``convention``, ``norm`` ("pre"
        or "post" for each layer), ``dtype``, and further arguments of the call (``window``, ``pooling``,
        ``max_length``, ``rows``, ``preset``). Extraction adds ``prompt_tokens`` (the length of the prompt)
        and ``truncated`` (:attr:`truncated`). The first use hashes the model file, once.
        """
        return {
            **(self._source.facts if self._source is not None else {}),
            **array_facts(self.layers, dtype_name(self.array.dtype)),
            **self._details,
        }

    def with_details(self, **details: Any) -> States:
        """The same states, in the same memory, with more entries in their :attr:`provenance`.

        :param details: how the states were made: strings, numbers and other JSON values. Files keep them.
        :raises InvalidInputError: a value is not a JSON value, or a name is one that describes the arrays.
        """
        if taken := sorted(_NOT_DETAILS & details.keys()):
            raise InvalidInputError(f"{', '.join(taken)} cannot be given: the states already record it")
        try:
            # In the form that a file gives back: tuples become lists.
            details = json.loads(json.dumps(details, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"details must be JSON values: {error}") from error
        states = copy.copy(self)
        states._details = {**self._details, **details}
        if (known := self.__dict__.get("provenance")) is not None:
            states.__dict__["provenance"] = {**known, **details}
        return states

    @property
    def truncated(self) -> bool:
        """Whether ``max_length`` cut the prompt."""
        return bool(self._details.get("truncated", False))

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    # Indexing is by layer, so iterating by 0, 1, 2, ... would take layers for tokens.
    __iter__ = None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """:attr:`array`, for ``numpy.asarray`` and similar functions.

        :raises ValueError: ``copy=False``, but another dtype needs a copy.
        """
        wanted = self.array.dtype if dtype is None else np.dtype(dtype)
        if not copy and wanted == self.array.dtype:
            return self.array
        if copy is False:
            raise ValueError(f"{self.array.dtype} as {wanted} needs a copy, which copy=False forbids")
        return self.array.astype(wanted)

    def __getitem__(self, layer: LayerId) -> NDArray[Any]:
        """The states of one layer: ``(n_tokens, n_embd)``, ``(n_embd,)`` when pooled; a view.

        :raises InvalidInputError: the layer was not captured.
        """
        (wanted,) = layer_ids.normalize([layer], self._n_layer)
        if wanted not in self.layers:
            raise InvalidInputError(f"layer {shown(layer)} was not captured; there are {list(self.layers)}")
        column: NDArray[Any] = self.array[..., self.layers.index(wanted), :]
        return column

    def select(self, layers: Iterable[LayerId] | LayerId) -> States:
        """Select layers, in the given order: the same object if they are all of them, else a copy.

        :raises InvalidInputError: a layer was not captured.
        """
        wanted = layer_ids.normalize(layers, self._n_layer)
        if wanted == self.layers:
            return self
        array = np.stack([self[layer] for layer in wanted], axis=-2)
        array.flags.writeable = False
        states = copy.copy(self)
        states.array, states.layers = array, wanted
        states.__dict__.pop("provenance", None)
        return states

    def __repr__(self) -> str:
        return (
            f"States(shape={self.array.shape}, dtype={dtype_name(self.array.dtype)}, "
            f"layers={list(self.layers)})"
        )

    def nonfinite_layers(self) -> list[LayerId]:
        """The layers that contain NaN or infinity.

        These come from the weights or embeddings, or from an overflow of the dtype: float16 ends at 65504,
        which the residual streams of some models exceed; bfloat16 has the range of float32.
        """
        columns = enumerate(self.layers)
        return [layer for column, layer in columns if not np.isfinite(self.array[..., column, :]).all()]

    def save(self, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> None:
        """Write a safetensors file: ``hidden_states``, ``tokens``, and the provenance as metadata.

        The write is atomic; the folder must exist.

        :param path: its name should end with .safetensors.
        :param allow_nonfinite: write NaN and infinity too, which spoil training.
        :raises InvalidInputError: there are such values, and they are not allowed; or the name is that
            of another format.
        :raises OSError: it cannot be written.
        """
        check_suffix(path)
        if not allow_nonfinite:
            check_finite(self, ", or write them anyway with allow_nonfinite")
        write_tensors(path, {"hidden_states": self.array, "tokens": self.tokens}, self.provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> States:
        """Read a file that :meth:`save` wrote, or another file of the states of one text: of ``llamatap
        encode``, of a connector, of a data set in the layout ``speculators``, or a body of the server.

        :raises InvalidInputError: it is not such a file.
        :raises OSError: it cannot be read.
        """
        path = checked_path("path", path)
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}; expected a safetensors file, as save() writes it")
        try:
            tensors, fields, others = read_tensors(path, _TENSORS)
            if several := [name for name in others if name.startswith("hidden_states.")]:
                raise ValueError(f"it holds several prompts ({', '.join(several)}); read it with safetensors")
            return cls._of_file(tensors, fields)
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(f"{path} holds no states of llamatap: {error}") from error

    @classmethod
    def _of_file(cls, tensors: Mapping[str, NDArray[Any]], fields: dict[str, Any]) -> States:
        """Make states of a file's tensors and metadata.

        :raises KeyError, ValueError, TypeError, AttributeError, OverflowError: it is not a file of states.
        """
        if "provenance" in fields:
            # A body of the server: beside the provenance, layers are numbered as in the request.
            fields = {key: fields[key] for key in _OF_BODIES if key in fields} | fields["provenance"]
        if missing := {"layers", "n_layer", "n_embd"} - fields.keys():
            raise ValueError(f"its metadata has no {', '.join(sorted(missing))}")
        n_layer, n_embd = integer("n_layer", fields["n_layer"], 1), integer("n_embd", fields["n_embd"], 1)
        layers = fields["layers"]
        # Files hold normalised ids.
        if not isinstance(layers, list) or list(layer_ids.normalize(layers, n_layer)) != layers:
            raise ValueError(f'layers must be a list of ids in 0..{n_layer} or "norm", not {shown(layers)}')
        flag("truncated", fields.get("truncated", False))
        names = [name for name in ("hidden_states", "prompt_embeds") if name in tensors]
        if not names:
            raise ValueError("it has neither hidden_states nor prompt_embeds")
        array = tensors[names[0]]
        dtype_name(array.dtype, f"the dtype of {names[0]}")
        # Image pipelines have no use for the ids: `llamatap encode` writes them to the metadata.
        of_pipeline = names[0] == "prompt_embeds"
        ids = fields.pop("token_ids") if of_pipeline else tensors.get("tokens", tensors.get("token_ids"))
        tokens = np.array(ids, np.int32)
        if not np.array_equal(tokens, np.asarray(ids)):
            raise ValueError("its tokens are not ids")
        rows = () if fields.get("pooling") else (len(tokens),)
        expected = (*rows, len(layers), n_embd)
        # A file of one layer may lack the axis of layers.
        shapes = (expected, (*rows, n_embd)) if len(layers) == 1 else (expected,)
        if array.shape not in shapes or tokens.ndim != 1:
            raise ValueError(f"{names[0]} has the shape {array.shape}, but the metadata says {expected}")
        array = array.reshape(expected)
        array.flags.writeable = tokens.flags.writeable = False
        states = cls(array, tokens, layers, n_layer=n_layer)
        states._details = {key: value for key, value in fields.items() if key not in _OF_ARRAYS}
        states._details.setdefault("model_sha256", None)
        return states


def captured_rows(states: States) -> str | None:
    """The tokens whose rows were captured: ``rows`` of the provenance; None if it has none."""
    return states._details.get("rows")


def join_states(parts: Sequence[States], dtype: np.dtype[Any] | None = None) -> States:
    """Concatenate the states of consecutive spans of a text (a copy), with their context's provenance.

    :param dtype: the dtype to convert to; None keeps it.
    """
    array = np.concatenate([one.array for one in parts], dtype=dtype, casting="unsafe")
    tokens = np.concatenate([one.tokens for one in parts])
    array.flags.writeable = tokens.flags.writeable = False
    last = parts[-1]
    n_layer, source = last._n_layer, last._source
    return States(array, tokens, last.layers, n_layer=n_layer, source=source)


def take_rows(states: States, rows: Sequence[int], dtype: np.dtype[Any] | None = None) -> States:
    """The states of some tokens, in the given order: a copy, with the provenance of their context alone.

    :param rows: indices of rows.
    :param dtype: the dtype to convert to; None keeps it.
    """
    array = states.array[list(rows)]
    if dtype is not None:
        array = array.astype(dtype, copy=False)
    tokens = states.tokens[list(rows)]
    array.flags.writeable = tokens.flags.writeable = False
    return States(array, tokens, states.layers, n_layer=states._n_layer, source=states._source)


def check_finite(states: States, otherwise: str = "") -> None:
    """Check that the states contain neither NaN nor infinity.

    :param otherwise: further advice, for the end of the message.
    :raises InvalidInputError: they do.
    """
    if layers := states.nonfinite_layers():
        dtype = dtype_name(states.array.dtype)
        advice = "float16 ends at 65504, take bfloat16 or float32" if dtype == "float16" else "see lt.probe"
        raise InvalidInputError(
            f"NaN or infinity in layers {layers} ({dtype}): nothing was written; {advice}{otherwise}"
        )
