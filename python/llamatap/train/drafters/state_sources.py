"""Where the states to train on come from: a data set with states, or texts that the target reads now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from llamatap._extras import needs
from llamatap._system_limits import require_memory
from llamatap.dataset.folder import MANIFEST, DatasetFolder
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.row_files import read_rows
from llamatap.dataset.rows_to_samples import prepare
from llamatap.dataset.samples import Samples
from llamatap.errors import Error, InvalidInputError, UnsupportedError
from llamatap.extraction.extractor import Extractor
from llamatap.extraction.packing import pack_prompts
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.train.drafters.sample_tensors import SampleTensors

with needs("train", "training drafters"):
    import torch

__all__ = ["capture_states", "is_state_folder", "read_texts", "stored_states"]


def is_state_folder(path: Path) -> bool:
    """Whether a path is a folder that ``llamatap dataset`` wrote."""
    return (path / MANIFEST).is_file()


def read_texts(model: Model, path: Path, options: DatasetOptions) -> tuple[Samples, dict[int, str]]:
    """Read texts, conversations or token ids, in the forms that ``llamatap dataset`` takes.

    :returns: the samples, and the reasons of rows that give none, by row.
    :raises InvalidInputError: the file holds no samples.
    """
    skipped: dict[int, str] = {}

    def skip(row: int, error: Error) -> None:
        if options.on_error == "stop":
            raise error
        skipped[row] = str(error)

    found = prepare(model, read_rows(path), options, skip).samples
    if not len(found):
        reasons = "; ".join(f"row {row}: {why}" for row, why in list(skipped.items())[:3])
        raise InvalidInputError(f"{path} holds no sample to train on: {reasons}")
    return found, skipped


def capture_states(
    model: Model,
    samples: Samples,
    layers: Sequence[LayerId],
    *,
    device: Any = "cpu",
    batch_tokens: int = 2048,
    progress: Callable[[int], object] | None = None,
    **context: Any,
) -> SampleTensors:
    """Compute the states of samples with the target, and keep them in memory.

    :param layers: the layers, the last one H_n.
    :param batch_tokens: tokens of a pass.
    :param progress: called with the number of tokens done, first with 0.
    :param context: options of the extractor.
    :raises OutOfMemoryError: they do not fit into memory.
    """
    n_bytes = 2 * samples.n_tokens * len(layers) * model.n_embd
    if torch.device(device).type == "cpu":
        require_memory(
            n_bytes,
            f"the states of {samples.n_tokens} tokens take",
            "use fewer texts, or write them with `llamatap dataset --layout npy` and train on that folder, "
            "which is read from the disk",
        )
    found = SampleTensors.of_texts(samples, len(layers), model.n_embd, device)
    done = 0
    if progress is not None:
        progress(done)
    with Extractor(model, n_batch=batch_tokens, n_ubatch=min(batch_tokens, 2048), **context) as extract:
        for pack in _packs(samples.lengths.tolist(), batch_tokens):
            texts = [samples[i].tokens for i in pack]
            for i, one in zip(pack, extract(texts, layers), strict=True):
                found.put(i, one.array)
                done += len(one)
            if progress is not None:
                progress(done)
    return found


def _packs(lengths: Sequence[int], room: int, window: int = 256, most: int = 64) -> Iterator[list[int]]:
    for start in range(0, len(lengths), window):
        for pack in pack_prompts(lengths[start : start + window], room, most):
            yield [start + i for i in pack]


def stored_states(folder: Path, layers: Sequence[LayerId]) -> tuple[SampleTensors, dict[str, Any]]:
    """Read a data set that ``llamatap dataset`` wrote.

    The layout ``npy`` stays on the disk if it is bfloat16 and no sample was left out of it; any other data
    set is read into memory.

    :param layers: the layers that the head needs, the last one H_n.
    :returns: the samples, and the data set's provenance.
    :raises InvalidInputError: it is incomplete or damaged, or lacks a layer.
    :raises OutOfMemoryError: it does not fit into memory.
    :raises UnsupportedError: its layout does not store H_n before the norm.
    """
    about = DatasetFolder(folder).manifest()
    if about is None or about["status"] != "complete":
        raise InvalidInputError(f"{folder} is not complete: continue it with `llamatap dataset ... --resume`")
    made = about["made_with"]
    if made["layout"] not in ("npy", "speculators"):
        raise UnsupportedError(
            f"{folder} has the layout {made['layout']}; training reads npy and speculators (--layout)"
        )
    stored = [one if one == "norm" else int(one) for one in made["layers"]]
    if absent := [one for one in layers if one not in stored]:
        raise InvalidInputError(
            f"{folder} holds the layers {stored}; the head needs {list(layers)}: {absent} are missing"
        )
    try:
        if made["layout"] == "npy":
            found = _stored_npy(folder, layers, made["dtype"])
        else:
            found = _stored_speculators(folder, [stored.index(one) for one in layers])
    except Error:
        raise
    except (EOFError, OSError, ValueError, SafetensorError) as error:
        raise InvalidInputError(f"{folder} is damaged: {error}; make the data set again") from error
    return found, {**made, **about.get("provenance", {})}


def _stored_npy(folder: Path, layers: Sequence[LayerId], dtype: str) -> SampleTensors:
    index = np.load(folder / "index.npy")
    tokens, mask = np.load(folder / "tokens.npy"), np.load(folder / "loss_mask.npy")
    columns = [np.load(folder / f"layer_{layer}.npy", mmap_mode="c") for layer in layers]
    firsts = index[:, 0].tolist()
    ends = (index[:, 0] + index[:, 1]).tolist()
    # Samples that were left out lie between the others.
    has_gaps = firsts[1:] != ends[:-1] or firsts[:1] != [0]
    if dtype == "bfloat16":
        if not has_gaps:
            on_disk = [torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) for rows in columns]
            return SampleTensors(torch.from_numpy(tokens), torch.from_numpy(mask), on_disk, [0, *ends])
        columns = [rows.view(ml_dtypes.bfloat16) for rows in columns]
    found = _room(
        folder,
        int(index[:, 1].sum()),
        len(layers),
        columns[0].shape[1],
        "only a data set in bfloat16 (--dtype) of which no row was left out is read from the disk",
    )
    for part in map(slice, firsts, ends):
        found.add(tokens[part], mask[part], np.stack([rows[part] for rows in columns], 1))
    return found


def _stored_speculators(folder: Path, columns: Sequence[int]) -> SampleTensors:
    masks = [np.asarray(row["loss_mask"], np.bool_) for row in read_rows(folder) if isinstance(row, Mapping)]
    if not masks:
        raise InvalidInputError(f"{folder} holds no samples")
    paths = [folder / "hidden_states" / f"hs_{i}.safetensors" for i in range(len(masks))]
    with safe_open(paths[0], "np") as file:
        n_embd = file.get_slice("hidden_states").get_shape()[-1]
    found = _room(
        folder,
        sum(map(len, masks)),
        len(columns),
        n_embd,
        "use fewer texts, or `llamatap dataset --layout npy`, which is read from the disk",
    )
    for path, mask in zip(paths, masks, strict=True):
        with safe_open(path, "np") as file:
            tokens, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        found.add(tokens.astype(np.int32), mask, states[:, list(columns)])
    return found


def _room(folder: Path, n_tokens: int, n_columns: int, n_embd: int, advice: str) -> SampleTensors:
    """Memory for the states of a folder.

    :raises OutOfMemoryError: there is not so much.
    """
    what = f"the states of {n_tokens} tokens in {folder} take"
    require_memory(2 * n_tokens * n_columns * n_embd, what, advice)
    return SampleTensors.empty(n_tokens, n_columns, n_embd)
