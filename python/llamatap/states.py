"""Captured hidden states, with where they come from."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import layers as layer_ids
from llamatap.cache import atomic_path, file_sha256
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

__all__ = ["DTYPES", "Source", "States", "check_finite", "dtype_name", "write_tensors"]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# What provenance holds besides strings.
_JSON_KEYS = frozenset(("flash_attention", "layers", "max_length", "n_embd", "n_layer", "norm", "window"))


def dtype_name(dtype: DTypeLike | str, what: str = "dtype") -> str:
    """ "float32", "float16" or "bfloat16" of anything that names one of them.

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
    raise InvalidInputError(f"{what} must be float32, float16 or bfloat16, not {dtype!r}")


def typed_view(array: NDArray[Any], name: str) -> NDArray[Any]:
    """The same memory as the named dtype: the core knows bfloat16 as uint16."""
    return array.view(DTYPES[name]) if name == "bfloat16" else array


class Source:
    """What the states of a context come from, as far as it is the same for all of them."""

    def __init__(self, path: Path, status: os.stat_result, facts: dict[str, Any]) -> None:
        self._path = path
        self._facts = facts
        self._status = (status.st_size, status.st_mtime_ns)

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The facts, with the model's sha256 (computed once a file, then remembered)."""
        sha256: str | None = None
        with contextlib.suppress(OSError):
            status = self._path.stat()
            # A file that was replaced after it was loaded would be another model's hash.
            if (status.st_size, status.st_mtime_ns) == self._status:
                sha256 = file_sha256(self._path)
        return {"model": self._path.name, "model_sha256": sha256, **self._facts}


class States:
    """Hidden states of some layers, one row a token.

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
        self._details = details or {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.array.flags.writeable = self.tokens.flags.writeable = False  # which copies and pickles forget

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Where the states come from and what they are.

        ``model`` (file name), ``model_sha256`` (None when the file is gone or was replaced), ``arch``,
        ``file_type``, ``weights`` (what they were converted to, if they were), ``n_layer``, ``n_embd``,
        ``engine_commit``, ``llamatap_version``, ``backend``, ``type_k``, ``type_v``, ``flash_attention``,
        ``layers``, ``convention``, ``norm`` ("pre" or "post" of each layer), ``dtype``, and what was asked
        for besides (``window``, ``pooling``, ``max_length``, ``rows``, ``preset``), where it was.
        The first use hashes the model file, once.
        """
        return {
            **(self._source.facts if self._source is not None else {}),
            "layers": list(self.layers),
            "convention": "llamatap: id i is the residual stream that enters block i, n the one after "
            'the last block, both without the final norm; "norm" is norm(H_n)',
            "norm": ["post" if layer == "norm" else "pre" for layer in self.layers],
            "dtype": dtype_name(self.array.dtype),
            **{key: value for key, value in self._details.items() if value is not None},
        }

    def with_details(self, **details: Any) -> States:
        """The same states, in the same memory, with more in their :attr:`provenance`.

        :param details: strings, or what JSON has: how the states came about.
        """
        states = copy.copy(self)
        states._details = {**self._details, **details}
        if (known := self.__dict__.get("provenance")) is not None:
            states.__dict__["provenance"] = {**known, **details}
        return states

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    # Indexing is by layer: what iterates by 0, 1, 2, ... would read layers for tokens.
    __iter__ = None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """:attr:`array`, for ``numpy.asarray`` and its like."""
        array = self.array if dtype is None else self.array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __getitem__(self, layer: LayerId) -> NDArray[Any]:
        """The states of one layer: ``(n_tokens, n_embd)``, ``(n_embd,)`` when pooled; a view.

        :raises InvalidInputError: the layer is not among those asked for.
        """
        (wanted,) = layer_ids.normalize([layer], self._n_layer)
        if wanted not in self.layers:
            raise InvalidInputError(f"layer {layer!r} was not asked for; there are {list(self.layers)}")
        column: NDArray[Any] = self.array[..., self.layers.index(wanted), :]
        return column

    def select(self, layers: Iterable[LayerId] | LayerId) -> States:
        """The states of some of the layers, in the order given: a view when they are all of them, else a
        copy.

        :raises InvalidInputError: a layer is not among those asked for.
        """
        wanted = layer_ids.normalize(layers, self._n_layer)
        if wanted == self.layers:
            return self
        array = np.stack([self[layer] for layer in wanted], axis=-2)
        array.flags.writeable = False
        return States(
            array, self.tokens, wanted, n_layer=self._n_layer, source=self._source, details=self._details
        )

    def __repr__(self) -> str:
        return (
            f"States(shape={self.array.shape}, dtype={dtype_name(self.array.dtype)}, "
            f"layers={list(self.layers)})"
        )

    def nonfinite_layers(self) -> list[LayerId]:
        """The layers with NaN or infinity in them.

        They come of weights or embeddings that have some, or of a value beyond the dtype: float16 ends at
        65504, which the residual streams of some models pass; bfloat16 reaches as far as float32.
        """
        columns = enumerate(self.layers)
        return [layer for column, layer in columns if not np.isfinite(self.array[..., column, :]).all()]

    def save(self, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> None:
        """Write a safetensors file: ``hidden_states``, ``tokens``, and the provenance as metadata.

        The file appears whole or not at all; its folder must exist.

        :param allow_nonfinite: write NaN and infinity too, which spoil what is trained on them.
        :raises InvalidInputError: there are such values, and they are not allowed.
        :raises OSError: it cannot be written.
        """
        if not allow_nonfinite:
            check_finite(self, ", or write them all the same with allow_nonfinite")
        write_tensors(path, {"hidden_states": self.array, "tokens": self.tokens}, self.provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> States:
        """Read a file that :meth:`save` wrote.

        :raises InvalidInputError: it is no such file.
        :raises OSError: it cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            with safe_open(path, framework="np") as file:
                metadata = {
                    key: json.loads(value) if key in _JSON_KEYS else value
                    for key, value in (file.metadata() or {}).items()
                }
                if missing := {"layers", "n_layer", "n_embd"} - metadata.keys():
                    raise ValueError(f"its metadata has no {', '.join(sorted(missing))}")
                array = file.get_tensor("hidden_states")
                tokens = file.get_tensor("tokens")
            metadata.setdefault("model_sha256", None)
            layers = metadata["layers"]
            rows = () if metadata.get("pooling") else (len(tokens),)
            expected = (*rows, len(layers), metadata["n_embd"])
            if array.shape != expected or tokens.shape != (len(tokens),):
                raise ValueError(f"hidden_states of {array.shape}, where the metadata tells of {expected}")
            array.flags.writeable = tokens.flags.writeable = False
            states = cls(array, tokens, layers, n_layer=metadata["n_layer"])
        except (SafetensorError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{path} holds no states of llamatap: {error}") from error
        states.__dict__["provenance"] = metadata
        return states


def check_finite(states: States, otherwise: str = "") -> None:
    """The states hold neither NaN nor infinity.

    :param otherwise: what else to do, for the end of the message.
    :raises InvalidInputError: they do.
    """
    if layers := states.nonfinite_layers():
        dtype = dtype_name(states.array.dtype)
        advice = "float16 ends at 65504, take bfloat16 or float32" if dtype == "float16" else "see lt.probe"
        raise InvalidInputError(
            f"NaN or infinity in layers {layers} ({dtype}): nothing was written; {advice}{otherwise}"
        )


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NDArray[Any]], provenance: Mapping[str, Any]
) -> None:
    """Write a safetensors file, whole or not at all; what is None in the provenance is left out.

    :raises OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # The format's metadata holds strings only.
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in provenance.items()
        if value is not None
    }
    if not (folder := Path(path).parent).is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    with atomic_path(Path(path)) as scratch:
        try:
            # From the arrays' own memory; to bytes first, they would be there twice more.
            save_file(
                {name: np.ascontiguousarray(array) for name, array in tensors.items()},
                scratch,
                metadata=metadata,
            )
        except SafetensorError as error:
            # Its own error even for what the system refused: a full disk.
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), os.fspath(path)) from error
