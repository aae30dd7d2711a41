"""DLPack export of arrays to other libraries, including bfloat16, which NumPy does not export."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.states import DTYPES

__all__ = ["DLPackArray"]

# https://dmlc.github.io/dlpack/latest/c_api.html: kDLCPU, kDLBfloat, and the offset of DLDataType.code in a
# DLManagedTensor, after a pointer, DLDevice (two int32) and ndim (int32).
_CPU = (1, 0)
_BFLOAT = 4
_CODE_OFFSET = ctypes.sizeof(ctypes.c_void_p) + 12

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


class DLPackArray:
    """An array for the ``from_dlpack`` of any library, without a copy:
    ``torch.from_dlpack(DLPackArray(stored["hidden_states"]))``.

    The result is writable, and writing changes all arrays that share the memory. Arrays that a connector read
    share it with no other process and no other call.

    :param array: an array, e.g. one that a connector read: bfloat16, or a dtype that NumPy exports. A
        read-only array must have memory that may be written to. The result keeps the memory alive.
    :raises InvalidInputError: it is not an array, or its memory may not be written to.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise InvalidInputError(f"expected a NumPy array, found {type(array).__name__}")
        bits = array.view(np.uint16) if array.dtype == DTYPES["bfloat16"] else array.view()
        try:
            # DLPack before 1.0 has no read-only arrays.
            bits.flags.writeable = True
        except ValueError as error:
            raise InvalidInputError("the array's memory may not be written to; give a copy of it") from error
        self._bits = bits
        self._is_bfloat = array.dtype == DTYPES["bfloat16"]

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device: the CPU."""
        return _CPU

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The capsule, a ``DLManagedTensor``, which consumers of all versions take. The arguments are those
        of the array API standard.

        :raises BufferError: another device than the CPU is requested, or DLPack does not have the dtype.
        """
        if dl_device is not None and tuple(dl_device) != _CPU:
            raise BufferError(f"the memory is the CPU's, {_CPU}, not {dl_device}")
        capsule = (self._bits.copy() if copy else self._bits).__dlpack__()
        if self._is_bfloat:
            ctypes.c_uint8.from_address(_pointer_of(capsule, b"dltensor") + _CODE_OFFSET).value = _BFLOAT
        return capsule
