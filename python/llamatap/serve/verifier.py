"""The folder of hidden-states files that completions write for a trainer of drafters on the same machine.

The protocol is that of vLLM's ExampleHiddenStatesConnector, as the library ``hs-connectors`` reads it: a
safetensors file with ``token_ids`` [n] int64 and ``hidden_states`` [n, n_layers, hidden], and beside it
FILE.lock, held with ``flock`` until the file is complete. The reader waits for the lock and removes it; it
gives up after 10 seconds and looks every 0.1 seconds. So a response that names a file is sent once the file
is complete and its lock exists and is free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId, default_eagle3_layers, translate
from llamatap.model import Model
from llamatap.serve.errors import ApiError
from llamatap.serve.options import VerifierOptions
from llamatap.states import DTYPES, States
from llamatap.storage.tensor_files import write_tensors

__all__ = ["VerifierFiles"]

#: Names of files, locks, and temporary folders of files being written. Nothing else is ever removed.
_FILE = r"(hs-[0-9a-f]{32}\.safetensors)"
_NAME = re.compile(rf"{_FILE}(?:\.lock)?|\.{_FILE}\.[0-9a-f]{{8}}")

#: Files written at one time. Each takes a thread, and memory if the dtype must be converted.
_MOST_WRITERS = 16


class VerifierFiles:
    """The folder and its files. Several servers may share it.

    :raises OSError: the folder cannot be made or written to.
    """

    def __init__(self, options: VerifierOptions) -> None:
        self.options = options
        # Absolute, because clients get paths in it.
        self.folder = options.folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write to {self.folder}, the folder of hidden states")
        self._lock = threading.Lock()
        #: Bytes of the files being written, by name.
        self._writing: dict[str, int] = {}
        #: Bytes of all other files at the last sweep; readers may have removed some since.
        self._present = 0
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_often, name="llamatap-verifier", daemon=True)
        with self._lock:
            self._sweep()

    def start(self) -> None:
        """Start the thread that removes old files."""
        self._sweeper.start()

    def close(self) -> None:
        """Stop the thread, after a last sweep."""
        self._closing.set()
        if self._sweeper.is_alive():
            self._sweeper.join()

    def layers(self, model: Model) -> tuple[LayerId, ...]:
        """The layers in a model's files, H_n at the end.

        :raises InvalidInputError: the model has no such layers.
        """
        chosen = self.options.layers
        if chosen is None:
            chosen = tuple(default_eagle3_layers(model.n_layer))
        try:
            return (*translate(chosen, source="vllm", n_layer=model.n_layer), model.n_layer)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"the verifier's layers must be ids as vLLM counts them: {error}"
            ) from None

    def check_room(self, n_tokens: int, width: int) -> None:
        """Check that there is room for a file of ``n_tokens`` tokens with ``width`` numbers each.

        :raises ApiError: 503, there is no room now, or the folder cannot be written to.
        """
        with self._lock:
            self._check(self._size(n_tokens, width))

    def leave(self, states: States) -> Path:
        """Write a file. On return it is complete, and its lock exists and is free.

        :param states: float32 ``(n_tokens, n_layers, n_embd)``.
        :raises ApiError: 503, there is no room for it, or the folder cannot be written to; 422, states are
            out of range of the files' dtype.
        """
        name = f"hs-{uuid.uuid4().hex}.safetensors"
        n_bytes = self._size(len(states), math.prod(states.array.shape[1:]))
        with self._lock:
            self._check(n_bytes)
            self._writing[name] = n_bytes
        path, written = self.folder / name, 0
        try:
            tensors = {"token_ids": states.tokens.astype(np.int64), "hidden_states": self._converted(states)}
            provenance = {**states.provenance, "dtype": self.options.dtype}
            with self._held(path):
                write_tensors(path, tensors, provenance)
                written = path.stat().st_size
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(f"{self.folder} is full: {error.strerror}") from error
            raise self._unavailable(str(error)) from error
        finally:
            with self._lock:
                del self._writing[name]
                self._present += written
        return path

    def _size(self, n_tokens: int, width: int) -> int:
        """The size of a file in bytes."""
        return n_tokens * (width * int(DTYPES[self.options.dtype].itemsize) + 8)

    def _converted(self, states: States) -> NDArray[Any]:
        dtype = self.options.dtype
        with np.errstate(over="ignore"):
            array = states.array.astype(DTYPES[dtype], copy=False)
        # Layer by layer, to take less memory.
        if spoilt := [k for i, k in enumerate(states.layers) if not np.isfinite(array[:, i]).all()]:
            raise ApiError(
                422,
                "model_error",
                "not_finite",
                f"states of the layers {spoilt} exceed the range of {dtype}"
                f"{' (65504)' if dtype == 'float16' else ''}: serve with another --verifier-dtype",
            )
        return array

    def _check(self, n_bytes: int) -> None:
        """Check that there is room for a file besides those being written."""
        if len(self._writing) >= _MOST_WRITERS:
            raise ApiError(
                503,
                "unavailable_error",
                "verifier_busy",
                f"{len(self._writing)} files of hidden states are being written; try again in 1 s",
                retry_after=1,
            )
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise self._unavailable("it was removed, or is read-only")
        promised = sum(self._writing.values())
        quota = self.options.quota_bytes
        try:
            if self._present + promised + n_bytes > quota:
                # Readers may have removed some.
                self._sweep()
            disk = os.statvfs(self.folder)
        except OSError as error:
            raise self._unavailable(str(error)) from error
        if (used := self._present + promised) + n_bytes > quota:
            raise _full(
                f"the files of hidden states take {used} bytes of {quota}; this one needs {n_bytes}: remove "
                f"the "
                "files that were read"
            )
        if (free := disk.f_bavail * disk.f_frsize) < promised + n_bytes:
            raise _full(
                f"the disk of {self.folder} has {free} bytes free; {promised} are reserved, and this file "
                f"needs "
                f"{n_bytes}"
            )

    def _unavailable(self, why: str) -> ApiError:
        return ApiError(
            503,
            "unavailable_error",
            "verifier_folder_unavailable",
            f"cannot write to {self.folder}, the folder of hidden states: {why}",
            retry_after=5,
        )

    @contextlib.contextmanager
    def _held(self, path: Path) -> Iterator[None]:
        """Context manager: holds FILE.lock, and removes it on an error."""
        name = f"{path}.lock"
        while True:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                break
            # Another server removed it before it was locked.
            os.close(lock)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        finally:
            os.close(lock)

    def _sweep_often(self) -> None:
        ended = False
        while not ended:
            ended = self._closing.wait(min(self.options.max_age / 4, 60.0))
            # Without the folder there is nothing to remove; requests get an error.
            with contextlib.suppress(OSError), self._lock:
                self._sweep()

    def _sweep(self) -> None:
        """Remove old files and the leftovers of servers that died; count the rest.

        :raises OSError: the folder cannot be read.
        """
        found: dict[str, dict[str, os.stat_result]] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None or (name := match[1] or match[2]) in self._writing:
                    continue
                # A trainer may remove the file meanwhile.
                with contextlib.suppress(OSError):
                    is_ours = entry.is_dir if match[2] else entry.is_file
                    if is_ours(follow_symlinks=False):
                        found.setdefault(name, {})[entry.name] = entry.stat(follow_symlinks=False)
        oldest = time.time() - self.options.max_age
        self._present = 0
        for name, parts in found.items():
            kept = set()
            if name in parts and parts[name].st_mtime >= oldest:
                kept = {name, f"{name}.lock"}
            if self._remove(name, parts.keys() - kept):
                parts = {part: parts[part] for part in parts.keys() & kept}
            self._present += sum(status.st_size for status in parts.values())

    def _remove(self, name: str, parts: set[str]) -> bool:
        """Remove parts of a file.

        :returns: False if another server is writing the file, or a part cannot be removed.
        """
        if not parts:
            return True
        try:
            with contextlib.ExitStack() as ends:
                with contextlib.suppress(FileNotFoundError):
                    lock = os.open(f"{self.folder / name}.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    ends.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for part in parts:
                    if part.startswith("."):
                        # Follows no links.
                        shutil.rmtree(self.folder / part)
                    else:
                        (self.folder / part).unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _full(message: str) -> ApiError:
    return ApiError(503, "unavailable_error", "verifier_folder_full", message, retry_after=5)
