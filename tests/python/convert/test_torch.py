"""Weights of PyTorch: `nox -s train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import Eagle3Checkpoint
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.convert import to_gguf

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_file_of_pytorch_is_read_as_safetensors_are(dtype: str, tmp_path: Path) -> None:
    target = TinyLlama().write(tmp_path / "target.gguf")
    source = Eagle3Checkpoint("eagle3", dtype=dtype)
    folder = source.write(tmp_path / "checkpoint")
    first = to_gguf(folder, target, tmp_path / "first.gguf", type="f32").path
    (folder / "model.safetensors").unlink()

    def tensor(values: NDArray[Any]) -> object:
        if values.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    file = folder / "pytorch_model.bin"
    torch.save({name: tensor(values) for name, values in source.tensors.items()}, file)
    second = to_gguf(folder, target, tmp_path / "second.gguf", type="f32").path
    assert second.read_bytes() == first.read_bytes()

    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(lt.ModelLoadError, match="not a readable file of PyTorch"):
        to_gguf(folder, target, tmp_path / "third.gguf")
    torch.save([1, 2], file)
    with pytest.raises(lt.ModelLoadError, match="holds no state dict"):
        to_gguf(folder, target, tmp_path / "third.gguf")
