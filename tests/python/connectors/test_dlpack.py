"""Arrays by DLPack: what the capsule holds, by the layout of dlpack.h, and what others make of it."""

from __future__ import annotations

import ctypes
import gc
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.stored_samples import states, values

import llamatap as lt
from llamatap.connectors import DLPackArray, FileConnector
from llamatap.states import DTYPES


class Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, the first member of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def read(folder: Path, dtype: str) -> NDArray[Any]:
    connector = FileConnector(folder)
    connector.put(states(1, DTYPES[dtype]), index=0)
    found = connector.get_cached(0)
    assert found is not None
    return found["hidden_states"]


KINDS = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int64": (0, 64)}


@pytest.mark.parametrize("dtype", KINDS)
def test_the_capsule(dtype: str, tmp_path: Path) -> None:
    """The capsule points at the memory itself, for every dtype, and at a part of it with its strides."""
    array = np.arange(60).reshape(5, 3, 4) if dtype == "int64" else read(tmp_path, dtype)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    hows: list[dict[str, Any]] = [{}, {"max_version": (1, 0), "dl_device": (1, 0), "copy": False}]
    for one, strides in ((array, [12, 4, 1]), (array[1:, 1:, ::2], [12, 4, 2])):
        exported = DLPackArray(one)
        assert exported.__dlpack_device__() == (1, 0)
        for how in hows:
            capsule = exported.__dlpack__(**how)
            found = Tensor.from_address(pointer_of(capsule, b"dltensor"))
            assert (found.data or 0) + found.byte_offset == one.ctypes.data
            assert (found.device_type, found.device_id) == (1, 0)
            assert (found.code, found.bits, found.lanes) == (*KINDS[dtype], 1)
            assert found.shape[: found.ndim] == list(one.shape)
            assert found.strides[: found.ndim] == strides
    copied = Tensor.from_address(pointer_of(exported.__dlpack__(copy=True), b"dltensor"))
    assert copied.code == KINDS[dtype][0]
    with pytest.raises(BufferError, match=r"the memory is the CPU's, \(1, 0\), not \(2, 0\)"):
        exported.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_takes_it(dtype: str, tmp_path: Path) -> None:
    """NumPy has no bfloat16; arrays go without a copy to consumers that know read-only memory."""
    array = read(tmp_path, dtype)
    found = np.from_dlpack(DLPackArray(array))
    assert found.dtype == dtype
    assert np.shares_memory(found, array)
    del array
    gc.collect()
    assert found.tolist() == values(1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pytorch_takes_it(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")
    torch = importlib.import_module("torch")
    array = read(tmp_path, dtype)
    for given in (DLPackArray(array), DLPackArray(array).__dlpack__()):
        found = torch.from_dlpack(given)
        assert found.dtype == getattr(torch, dtype)
        assert found.data_ptr() == array.ctypes.data
        assert found.float().tolist() == values(1).tolist()
    del array, given
    gc.collect()
    assert found.float().tolist() == values(1).tolist()
    # Writes reach no other reader.
    found.zero_()
    again = FileConnector(tmp_path).get_cached(0)
    assert again is not None
    assert again["hidden_states"].astype(np.float32).tolist() == values(1).tolist()


def test_what_cannot_go_out_is_refused() -> None:
    with pytest.raises(lt.InvalidInputError, match="expected a NumPy array, found list"):
        DLPackArray([1.0])  # type: ignore[arg-type]
    with pytest.raises(lt.InvalidInputError, match="may not be written to; give a copy"):
        DLPackArray(np.frombuffer(b"12345678", np.float32))
