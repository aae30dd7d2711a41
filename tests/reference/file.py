"""GGUF files as the oracles see them: what the gguf package reads, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from reference.decoder import Array


def read(path: Path) -> tuple[Callable[..., Any], dict[str, Array]]:
    """The keys and tensors of a file.

    :returns: ``key(name, default)``, where a name that begins with a dot is one of the architecture's and no
        default means that the file must have it; and the tensors by name, (rows, columns) of a matrix that
        maps columns to rows. Integers come as they are.
    """
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()

    def key(name: str, *default: Any) -> Any:
        full = arch + name if name.startswith(".") else name
        if default and full not in reader.fields:
            return default[0]
        return reader.fields[full].contents()

    tensors: dict[str, Array] = {}
    for tensor in reader.tensors:
        if np.issubdtype(tensor.data.dtype, np.signedinteger):
            tensors[tensor.name] = np.array(tensor.data)
        else:
            tensors[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    return key, tensors


def rotary_base(key: Callable[..., Any]) -> float:
    return float(key(".rope.freq_base", 10000.0))
