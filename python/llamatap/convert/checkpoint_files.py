"""Files of checkpoints: a folder with config.json and weights, as transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap._validate import shown
from llamatap.errors import InvalidInputError, ModelLoadError, ModelNotFoundError
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["FLOATS", "Checkpoint", "read_checkpoint", "read_safetensors", "write_checkpoint"]

#: Dtypes of weights that are converted.
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_EXPECTED = (
    "expected a folder with config.json and model.safetensors (or pytorch_model.bin), or an mtp.safetensors"
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder's config.json and weights.

    :ivar tensors: by name; float32, float16, bfloat16 (of ml_dtypes), or integers and bools.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, NDArray[Any]]


def read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata.

    :raises ModelLoadError: it is not such a file, or cut short.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it has no iterator
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} has tensors of a type that NumPy lacks: {error}") from error


def _read_bin(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a file of ``torch.save``.

    :raises MissingPackageError: PyTorch is missing.
    :raises ModelLoadError: it is not such a file.
    """
    with needs("train", f"reading {path.name}"):
        import torch
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{path} is not a readable file of PyTorch: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(one, torch.Tensor) for one in state.values()):
        raise ModelLoadError(
            f"{path} holds no state dict: expected tensors by name, found {type(state).__name__}"
        )
    found = {}
    for name, tensor in state.items():
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            found[name] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            found[name] = tensor.numpy()
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must be a JSON object, not {shown(found)}")
    return found


def _weight_files(folder: Path) -> list[Path]:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            weights = _read_json(index).get("weight_map")
            if not isinstance(weights, dict) or not all(isinstance(one, str) for one in weights.values()):
                raise ModelLoadError(f"{index} has no weight_map with the file of each tensor")
            files = [folder / Path(one).name for one in sorted(set(weights.values()))]
            if absent := [file.name for file in files if not file.is_file()]:
                raise ModelLoadError(f"{folder} lacks {', '.join(absent)}, which {index.name} names")
            return files
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    found = ", ".join(sorted(one.name for one in folder.iterdir())[:8]) or "nothing"
    raise ModelNotFoundError(f"no weights in {folder}: {_EXPECTED}; found {found}")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's folder.

    :raises ModelNotFoundError: the folder, its config.json or its weights are missing.
    :raises InvalidInputError: a file, or a GGUF file, in place of a folder.
    :raises ModelLoadError: a file of it cannot be read.
    :raises MissingPackageError: the weights are PyTorch's, which is missing.
    """
    if not path.exists():
        raise ModelNotFoundError(f"no such checkpoint: {path}; {_EXPECTED}")
    if not path.is_dir():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            raise InvalidInputError(
                f"{path} is a GGUF file; {_EXPECTED}. To turn a draft back into a checkpoint, use --to"
            )
        raise InvalidInputError(f"{path} is a file; {_EXPECTED}")
    config = path / "config.json"
    if not config.is_file():
        found = ", ".join(sorted(one.name for one in path.iterdir())[:8]) or "nothing"
        raise ModelNotFoundError(f"no config.json in {path}: {_EXPECTED}; found {found}")
    tensors: dict[str, NDArray[Any]] = {}
    for weights in _weight_files(path):
        found_tensors = _read_bin(weights) if weights.suffix == ".bin" else read_safetensors(weights)[0]
        if twice := tensors.keys() & found_tensors.keys():
            raise ModelLoadError(f"{path} has several tensors named {', '.join(sorted(twice))}")
        tensors |= found_tensors
    return Checkpoint(path, _read_json(config), tensors)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a checkpoint: model.safetensors and config.json, each atomically, the config last.

    :raises OSError: it cannot be written.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as scratch:
        arrays = {name: np.ascontiguousarray(one) for name, one in tensors.items()}
        save_file(arrays, scratch, metadata={"format": "pt"})
    with atomic_path(folder / "config.json") as scratch:
        scratch.write_text(json.dumps(dict(config), indent=2) + "\n")
