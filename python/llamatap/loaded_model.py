"""LoadedModel: a GGUF file loaded as a model, without the contexts that are made of it."""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap import _system_limits
from llamatap._closeable import Closeable
from llamatap._native import _core, ensure_backends, flush_log, native_of
from llamatap._validate import choice, flag, integer
from llamatap._validate import path as checked_path
from llamatap.errors import ClosedError, InvalidInputError, ModelLoadError, ModelNotFoundError
from llamatap.storage.model_files import ModelFiles
from llamatap.tokenizer import Tokenizer, token_array

__all__ = ["LoadedModel", "files_of", "kept_with"]

_logger = logging.getLogger("llamatap")

_T = TypeVar("_T", bound=Closeable)


class LoadedModel(Tokenizer, Closeable):
    """Base of :class:`llamatap.Model`, which describes the parameters and errors: a loaded model that
    makes no contexts itself."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        load_mtp: bool = False,
        vocab_only: bool = False,
        weights: Literal["f32", "f16", "bf16"] | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        # Set first: __repr__ and close() work on a model that failed to load.
        self._native: _core.Model | None = None
        self._kept: dict[type[Closeable], Closeable] = {}
        self._kept_lock = threading.Lock()
        super().__init__()
        self.path = checked_path("path", path)
        if progress is not None and not callable(progress):
            raise InvalidInputError(f"progress must be callable, not {type(progress).__name__}")
        if weights is not None:
            choice("weights", weights, ("f32", "f16", "bf16"), optional=True)
        if weights is not None and flag("vocab_only", vocab_only):
            raise InvalidInputError("weights are not loaded with vocab_only=True; leave out weights=")
        #: The type that weights were converted to; None: they are as in the file.
        self.weights = weights
        _require_regular_file(self.path)
        # A relative path may come to mean another file.
        self.path = self.path.absolute()
        try:
            self._files = ModelFiles(self.path)
        except OSError as error:
            raise ModelLoadError(f"cannot read {self.path}: {error}") from error
        ensure_backends()
        n_gpu_layers = integer("n_gpu_layers", n_gpu_layers)
        _warn_without_gpu(n_gpu_layers)
        available = _system_limits.available_memory()
        try:
            self._native = _core.Model.load(
                os.fsencode(self.path),
                n_gpu_layers=n_gpu_layers,
                use_mmap=flag("use_mmap", use_mmap),
                load_mtp=flag("load_mtp", load_mtp),
                vocab_only=flag("vocab_only", vocab_only),
                weights=weights,
                memory_available=available,
                progress=progress,
            )
        finally:
            flush_log()
        if weights is None and not vocab_only and not self.devices and self.size_bytes > available:
            _warn_of_paging(self.path, self.size_bytes, available)
        if self._native.metadata.get("split.count", 1) == 1:
            self._files.only_first()

    def _get_native(self) -> _core.Model:
        if self._native is None:
            raise ClosedError(f"the model {self.path.name} was closed")
        return self._native

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._native is None

    def close(self) -> None:
        """Release the model; its memory is freed once its contexts are closed too.

        :raises BusyError: called while this thread is extracting with it (in a signal or log handler).
        """
        for kept in list(self._kept.values()):
            kept.close()
        self._kept.clear()
        self.__dict__.pop("layer_map", None)
        self._native = None

    def __repr__(self) -> str:
        if self._native is None:
            return f"Model({self.path.name!r}, closed)"
        return (
            f"Model({self.path.name!r}, arch={self.arch!r}, file_type={self.file_type!r}, "
            f"n_layer={self.n_layer}, n_embd={self.n_embd}, n_vocab={self.n_vocab})"
        )

    @property
    def arch(self) -> str:
        """The architecture, as ``general.architecture`` of the file names it."""
        return native_of(self).arch

    @property
    def description(self) -> str:
        """Architecture, number of parameters and file type: "llama 135M Q4_1". Of a file without
        weights, "llama vocabulary"."""
        return native_of(self).description

    @property
    def file_type(self) -> str:
        """The quantisation of the file, e.g. "F16", "Q4_1", "Q4_K - Medium"."""
        return native_of(self).file_type

    @property
    def n_layer(self) -> int:
        """The number of blocks n; layer ids are 0..n."""
        return native_of(self).n_layer

    @property
    def n_embd(self) -> int:
        """The width of the residual stream."""
        return native_of(self).n_embd

    @property
    def n_embd_input(self) -> int:
        """The width of embeddings that a batch may carry instead of tokens."""
        return native_of(self).n_embd_input

    @property
    def n_vocab(self) -> int:
        return native_of(self).n_vocab

    @property
    def n_ctx_train(self) -> int:
        """The longest context that the model was trained for, in tokens."""
        return native_of(self).n_ctx_train

    @property
    def n_params(self) -> int:
        """Number of elements of all tensors."""
        return native_of(self).n_params

    @property
    def size_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return native_of(self).size_bytes

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata, without arrays of more than 1,024 elements (the vocabulary)."""
        return dict(native_of(self).metadata)

    @property
    def devices(self) -> list[str]:
        """The GPUs that may hold layers; empty if all layers are on the CPU."""
        return native_of(self).device_names

    @functools.cached_property
    def layer_map(self) -> _core.LayerMap:
        """Map from each layer to the engine's graph node that gives it: found on first use, then cached.

        :raises UnsupportedError: the model carries no single residual stream.
        """
        try:
            return _core.LayerMap.resolve(native_of(self))
        finally:
            flush_log()

    def token_embeddings(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Rows of the token embedding matrix, dequantised: float32 ``(n, n_embd)``.

        Before any scaling, norm or position that the architecture applies to them, so not always H_0.
        """
        return native_of(self).token_embeddings(token_array(tokens))


def _require_regular_file(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelNotFoundError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelLoadError(f"{path} is a folder; give the GGUF file in it")
    # Loading must not wait for the writer of a pipe.
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path} is not a regular file")


def _warn_without_gpu(n_gpu_layers: int) -> None:
    if n_gpu_layers != 0 and all(d["kind"] not in ("gpu", "igpu") for d in _core.devices()):
        warnings.warn(
            f"n_gpu_layers={n_gpu_layers} has no effect: this build of llamatap has no GPU back end, or "
            "there is no GPU. Build it from source with: pip install . -C cmake.define.GGML_CUDA=ON",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_paging(path: Path, size: int, available: int) -> None:
    _logger.warning(
        "the weights of %s are %s, and %s of memory are available: they are read from the file again at each "
        "pass, which is slow",
        path.name,
        _system_limits.gibibytes(size),
        _system_limits.gibibytes(available),
    )


def files_of(model: LoadedModel) -> ModelFiles:
    """The file of a model, or all shards of a split one."""
    return model._files  # noqa: SLF001  same module


def kept_with(model: LoadedModel, kind: type[_T], make: Callable[[], _T]) -> _T:
    """The object of a kind that is kept with a model, made at the first call. :meth:`LoadedModel.close`
    closes it first; if that raises, the model stays open.

    :raises ClosedError: the model was closed.
    """
    native_of(model)
    with model._kept_lock:  # noqa: SLF001  same module
        return cast("_T", model._kept.get(kind) or model._kept.setdefault(kind, make()))  # noqa: SLF001
