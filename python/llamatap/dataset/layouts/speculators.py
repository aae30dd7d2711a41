"""Layout of the ``speculators`` library (0.9.0), for its ``ArrowDataset``.

An Arrow data set with ``input_ids``, ``loss_mask`` and ``seq_len``, and for its row i the file
``hidden_states/hs_{i}.safetensors`` with ``token_ids`` [n] int64 and ``hidden_states`` [n, n_layers, hidden],
whose last layer is H_n, without the final norm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.layouts.arrow_dataset import write_dataset
from llamatap.dataset.layouts.layout import FilePerSample
from llamatap.storage.safetensors_metadata import to_metadata
from llamatap.storage.tensor_files import write_tensors

__all__ = ["SpeculatorsLayout"]

# Names of dtypes in safetensors.
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class SpeculatorsLayout(FilePerSample):
    """Layout ``speculators``: see the module."""

    name = "speculators"
    needs = ("pyarrow",)

    def path(self, index: int) -> Path:
        return self.folder / "hidden_states" / f"hs_{index}.safetensors"

    def size(self, n_tokens: int, row: int) -> int:
        ids = 8 * n_tokens
        states = n_tokens * len(self.columns) * self.n_embd * self.item_bytes
        header = {
            "__metadata__": to_metadata(self._metadata(row)),
            "token_ids": {"dtype": "I64", "shape": [n_tokens], "data_offsets": [0, ids]},
            "hidden_states": {
                "dtype": _DTYPES[self.dtype],
                "shape": [n_tokens, len(self.columns), self.n_embd],
                "data_offsets": [ids, ids + states],
            },
        }
        length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
        # The length of the header, and the header, which is padded with blanks to a multiple of 8 bytes.
        return 8 + (length + 7) // 8 * 8 + ids + states

    def _metadata(self, row: int) -> dict[str, Any]:
        return {**self.provenance, "row": row}

    def write(self, index: int, states: NDArray[Any]) -> None:
        sample = self.samples[index]
        tensors = {"token_ids": sample.tokens.astype(np.int64), "hidden_states": states}
        write_tensors(self.path(index), tensors, self._metadata(sample.row))

    def finish(self, lost: Sequence[int]) -> None:
        kept = self._without_gaps(lost)
        for place, index in enumerate(kept):
            # Files that were moved before an interruption are in place already.
            if place != index and self.path(index).exists():
                self.path(index).replace(self.path(place))
        write_dataset(self.folder, (self.samples[index] for index in kept), self.samples.sha256()[:16])

    def _without_gaps(self, lost: Sequence[int]) -> list[int]:
        """The samples in the order of their files, with the last ones moved into the places of lost ones.

        The number of a file is its row in the data set, so there may be no gaps. Each file moves once, to a
        place that no other file leaves, so that after an interruption a missing file shows that it was moved.
        """
        gaps = set(lost)
        n_kept = len(self.samples) - len(gaps)
        kept = list(range(n_kept))
        movers = iter([index for index in range(n_kept, len(self.samples)) if index not in gaps])
        for gap in sorted(gaps):
            if gap < n_kept:
                kept[gap] = next(movers)
        return kept
