"""Files of hidden states that completions leave for a trainer of drafters on the same machine.

The protocol is that of vLLM's ExampleHiddenStatesConnector, as the library ``hs-connectors`` reads it: a
safetensors file with ``token_ids`` [n] int64 and ``hidden_states`` [n, n_layers, hidden], and beside it,
until it is complete, FILE.lock, held with ``flock``; the reader waits for the lock and removes it. The lock
is there before the response that names the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from llamatap.layers import LayerId, default_eagle3_layers, normalize
from llamatap.model import Model
from llamatap.serve.errors import ApiError
from llamatap.serve.options import VerifierOptions
from llamatap.states import DTYPES, States, write_tensors

__all__ = ["VerifierFiles"]

_logger = logging.getLogger("llamatap.serve")

_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

#: Names of our own alone are ever removed.
_NAME = re.compile(r"\.?hs-[0-9a-f]{32}\.safetensors(\.\w+)?")


class VerifierFiles:
    """The folder, and what is in it.

    :raises OSError: the folder cannot be made or written to.
    """

    def __init__(self, options: VerifierOptions) -> None:
        self.options = options
        # What is handed to clients must not depend on the working folder.
        self.folder = options.folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write to {self.folder}, the folder of hidden states")
        self._writer = ThreadPoolExecutor(2, "llamatap-verifier")
        self._lock = threading.Lock()
        #: Bytes of files that were promised and are not there yet.
        self._promised = 0

    def layers(self, model: Model) -> tuple[LayerId, ...]:
        """The layers of a model's files, H_n at the end.

        :raises InvalidInputError: the model has no such layers.
        """
        chosen = self.options.layers
        if chosen is None:
            chosen = tuple(default_eagle3_layers(model.n_layer))
        return (*normalize(chosen, model.n_layer), model.n_layer)

    def used(self) -> int:
        """Bytes in the folder and promised, after what is too old was removed."""
        oldest = time.time() - self.options.max_age
        total = self._promised
        for path, status in self._ours():
            if status.st_mtime < oldest:
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                total += status.st_size
        return total

    def _ours(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                # A trainer may take a file away in between.
                with contextlib.suppress(OSError):
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)

    def leave(self, states: States) -> Path:
        """Write a file in the background; its lock is there, and held, when this returns.

        :raises ApiError: 503, there is no room for it.
        :raises OSError: the lock cannot be made.
        """
        n_bytes = states.array.size * _BYTES[self.options.dtype] + 8 * len(states)
        path = self.folder / f"hs-{uuid.uuid4().hex}.safetensors"
        with self._lock:
            used = self.used()
            if used + n_bytes > self.options.quota_bytes:
                raise ApiError(
                    503,
                    "unavailable_error",
                    "verifier_folder_full",
                    f"the files of hidden states take {used} bytes of {self.options.quota_bytes}; this one "
                    f"needs {n_bytes}: remove those that were read",
                    retry_after=5,
                )
            self._promised += n_bytes
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except BaseException:
            self._keep_no_more(n_bytes)
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._writer.submit(self._write, path, lock, states, n_bytes)
        return path

    def _keep_no_more(self, n_bytes: int) -> None:
        """A promised file is there, or will never be."""
        with self._lock:
            self._promised -= n_bytes

    def _write(self, path: Path, lock: int, states: States, n_bytes: int) -> None:
        try:
            array = states.array.astype(DTYPES[self.options.dtype])
            tensors = {"token_ids": states.tokens.astype(np.int64), "hidden_states": array}
            provenance = {**states.provenance, "dtype": self.options.dtype}
            write_tensors(path, tensors, provenance)
        except Exception:
            # The reader finds the lock free and no file, and says so.
            _logger.exception("could not write %s", path)
        finally:
            self._keep_no_more(n_bytes)
            os.close(lock)

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown()
