"""Layout of SpecForge (0.2.0), for offline training of EAGLE-3 drafters.

Files ``rows_{g}-{g+2000}/data_{i}.ckpt`` of ``torch.save``: a mapping with ``input_ids`` and ``loss_mask``,
both [n] int64, ``aux_hidden_state`` [1, n, n_layers * hidden], the layers concatenated, and ``hidden_state``
[1, n, hidden], which is norm(H_n), the input of the output head. ``provenance`` is JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamatap.dataset.layouts.layout import FilePerSample
from llamatap.storage.atomic_writes import atomic_path

if TYPE_CHECKING:
    import torch

__all__ = ["SpecForgeLayout"]

#: Files in a folder.
_GROUP = 2000


class SpecForgeLayout(FilePerSample):
    """Layout ``specforge``: see the module."""

    name = "specforge"
    last_is_norm = True
    needs = ("torch",)

    def path(self, index: int) -> Path:
        group = index // _GROUP * _GROUP
        return self.folder / f"rows_{group}-{group + _GROUP}" / f"data_{index}.ckpt"

    def size(self, n_tokens: int, row: int) -> int:
        import torch

        width = self.n_embd
        ids = torch.empty(n_tokens, dtype=torch.int64)
        aux = torch.empty(1, n_tokens, (len(self.columns) - 1) * width, dtype=getattr(torch, self.dtype))
        last = torch.empty(1, n_tokens, width, dtype=aux.dtype)
        with tempfile.TemporaryDirectory() as folder, torch.serialization.skip_data():
            # torch names the archive after the file; written to a file object, as below, it is "archive".
            path = Path(folder) / "archive.ckpt"
            torch.save(self._content(ids, ids.clone(), aux, last, row), path)
            return path.stat().st_size

    def _content(
        self, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, last: torch.Tensor, row: int
    ) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "aux_hidden_state": aux,
            "hidden_state": last,
            "provenance": json.dumps({**self.provenance, "row": row}),
        }

    def write(self, index: int, states: NDArray[Any]) -> None:
        import torch

        sample = self.samples[index]
        aux = _tensor(states[:, :-1].reshape(len(states), -1), self.dtype)
        last = _tensor(states[:, -1], self.dtype)
        ids, mask = (torch.from_numpy(part.astype(np.int64)) for part in (sample.tokens, sample.loss_mask))
        content = self._content(ids, mask, aux[None], last[None], sample.row)
        # Opened by Python: errors are OSErrors, and the file's name does not get into its content.
        with atomic_path(self.path(index)) as scratch, scratch.open("wb") as file:
            torch.save(content, file)

    def finish(self, lost: Sequence[int]) -> None:
        """Nothing to write: the loader lists the files."""


def _tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    import torch

    # PyTorch takes no bfloat16 of NumPy's. Copied, because torch.save writes the whole memory of a view.
    array = array.view(np.int16) if dtype == "bfloat16" else array
    tensor: torch.Tensor = torch.from_numpy(np.array(array, order="C"))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
