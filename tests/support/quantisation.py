"""Files with quantised weights, made by the gguf package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from support.tiny import copy_keys

#: Not for multiplication with a matrix, or never quantised by the engine's own tool.
KEPT = re.compile(
    r"norm|bias|conv|lerp|time_mix_(first|w|a|v|g)\d?\.|decay|token_types|position|rel_b|ffn_gate_inp|ssm_[ad]$"
)


def quantise(source: Path, path: Path, kind: gguf.GGMLQuantizationType) -> int:
    """Write the file with its matrices quantised by the gguf package. Returns how many there are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    copy_keys(reader, writer)
    count = 0
    for tensor in reader.tensors:
        data: NDArray[Any] = tensor.data
        if (
            data.ndim > 1
            and data.dtype == np.float32
            and data.shape[-1] % 32 == 0
            and not KEPT.search(tensor.name)
        ):
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
            count += 1
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count
