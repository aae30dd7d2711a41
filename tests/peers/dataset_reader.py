"""Reads a data set of states as a trainer does, by the trainer's own code. Runs in its environment, without
llamatap: `nox -t peers`.

    python dataset_reader.py speculators|specforge FOLDER WIDTH N_LAYERS OUT.npz

OUT.npz gets, of each sample i: ids_i, mask_i, aux_i [n, n_layers * width] and last_i [n, width].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def speculators(folder: Path, width: int, n_layers: int) -> Iterator[dict[str, Any]]:
    """Read through speculators' data set, collation and a loader with two workers; nothing may be missing."""
    from speculators.train.data import ArrowDataset, CollateFn
    from torch.utils.data import DataLoader

    data = ArrowDataset(4096, folder, on_missing="raise")
    lengths = data.approx_lengths
    collate = CollateFn(4096, width, n_layers, dtype=torch.float32)
    for length, batch in zip(lengths, DataLoader(data, 1, collate_fn=collate, num_workers=2), strict=True):
        assert batch["error_records"] == 0
        assert (batch["document_ids"] == 0).sum() == length
        yield {
            "ids": batch["input_ids"][0, :length],
            "mask": batch["loss_mask"][0, :length],
            "aux": batch["hidden_states"][0, :length],
            "last": batch["verifier_last_hidden_states"][0, :length],
        }


def specforge(folder: Path, width: int, n_layers: int) -> Iterator[dict[str, Any]]:
    """Read through SpecForge's reader of offline features, its store and its normalisation."""
    from specforge.algorithms.eagle3.data import build_offline_normalizer
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    normalize = build_offline_normalizer(4096)
    store = LocalFeatureStore()
    references = OfflineManifestReader(str(folder), validate_files=True).read()
    found = {}
    for reference in references:
        raw, handle = store.get(reference)
        sample = normalize(raw)
        store.release(handle)
        number = int(Path(reference.feature_store_uri).stem.removeprefix("data_"))
        assert reference.num_tokens == sample["input_ids"].shape[1]
        found[number] = {
            "ids": sample["input_ids"][0],
            "mask": sample["loss_mask"][0],
            "aux": sample["hidden_state"][0],
            "last": sample["target"][0],
        }
    for number in sorted(found):
        yield found[number]


def main() -> None:
    way, folder, width, n_layers, out = sys.argv[1:]
    read = {"speculators": speculators, "specforge": specforge}[way]
    samples = enumerate(read(Path(folder), int(width), int(n_layers)))
    arrays = {f"{name}_{i}": part.float().numpy() for i, sample in samples for name, part in sample.items()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main()
