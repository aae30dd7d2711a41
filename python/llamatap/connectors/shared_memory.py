"""Connector to shared memory, for a trainer in another process on this machine."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamatap._validate import integer, shown
from llamatap.connectors.connector import Stored
from llamatap.connectors.files import FileConnector
from llamatap.errors import InvalidInputError
from llamatap.states import States
from llamatap.storage import locks
from llamatap.storage.tensor_files import write_tensors

__all__ = ["SharedMemoryConnector"]

#: Prefix of the names of writers' folders.
_PREFIX = "writer-"


class SharedMemoryConnector(FileConnector):
    """Connector to files in memory (tmpfs), which readers map: their arrays are the pages that were written,
    read-only and without a copy. The memory of a sample is freed once it was deleted and its last array is
    gone.

    A sample lives no longer than the process that put it: a process removes its samples at exit. Samples of
    processes that were killed, or ended with ``os._exit`` (as multiprocessing's forked children do), are
    removed by the next connector of the same name, also by one that only reads.

    :param name: the name, the same for writers and readers.
    :param max_bytes: size limit of all readable samples of the name together. A sample that does not fit
        raises ``OSError`` (``ENOSPC``): the writer can wait until others are deleted, or stop
        (:class:`~llamatap.connectors.Collector` does either). Deleted or replaced samples that a reader still
        holds as arrays do not count. Writers that put at the same moment may exceed the limit by one sample
        each. None for half of the file system's size (for ``/dev/shm``, usually a quarter of the machine's
        memory).
    :raises InvalidInputError: the name or the number of bytes is wrong.
    :raises PermissionError: the folder of the name belongs to another user.
    :raises OSError: the folder cannot be created.
    """

    def __init__(self, name: str = "default", *, max_bytes: int | None = None) -> None:
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise InvalidInputError(f"name must be letters, digits, - and _, not {shown(name)}")
        if max_bytes is not None:
            integer("max_bytes", max_bytes, 1, 2**63 - 1)
        shared = Path("/dev/shm")
        base = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"llamatap-{os.getuid()}"
        for folder in (base, base / name):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                raise PermissionError(
                    f"{folder} belongs to another user; have it removed, or give another name"
                )
        super().__init__(base / name)
        self.max_bytes = shutil.disk_usage(self.folder).total // 2 if max_bytes is None else max_bytes
        self._lock = threading.Lock()
        self._writer: Path | None = None
        self._process = os.getpid()
        self.setup()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a new connector: in another process, such as a loader's worker, it is another writer."""
        return functools.partial(type(self), max_bytes=self.max_bytes), (self.folder.name,)

    def setup(self) -> None:
        """Remove the samples of dead processes."""
        _remove_leftovers(self.folder)

    def _write(self, path: Path, tensors: Stored, states: States) -> None:
        writer = self._as_writer()
        self._check_room(path, sum(array.nbytes for array in tensors.values()))
        scratch = writer / path.name
        write_tensors(scratch, tensors, {**states.provenance, "writer": writer.name})
        # Other processes that put samples, or remove a dead writer's, wait.
        with locks.locked(self.folder):
            scratch.replace(path)

    def _check_room(self, path: Path, needed: int) -> None:
        if self._taken(path) + needed <= self.max_bytes:
            return
        _remove_leftovers(self.folder)
        if (taken := self._taken(path)) + needed > self.max_bytes:
            raise OSError(
                errno.ENOSPC,
                f"a sample of {needed:,} bytes does not fit: {taken:,} of max_bytes={self.max_bytes:,} are "
                "taken; delete samples that were read, or give more",
                str(self.folder),
            )

    def _taken(self, path: Path) -> int:
        """Bytes of all samples except the one that is replaced."""
        taken = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name != path.name and entry.name.endswith(".safetensors"):
                    with contextlib.suppress(FileNotFoundError):
                        taken += entry.stat().st_size
        return taken

    def _as_writer(self) -> Path:
        """The folder of this process, locked as long as the process lives."""
        with self._lock:
            if self._writer is None or self._process != os.getpid():
                self._process = os.getpid()
                self._writer = _locked_folder(self.folder)
                atexit.register(_at_exit, self._writer, self._process)
            return self._writer


def _at_exit(writer: Path, process: int) -> None:
    # A forked child inherits this call, and leaves its parent's samples alone.
    if os.getpid() == process:
        with contextlib.suppress(FileNotFoundError):
            _remove_writer(writer)


def _locked_folder(parent: Path) -> Path:
    while True:
        folder = parent / f"{_PREFIX}{uuid.uuid4().hex}"
        folder.mkdir(mode=0o700)
        handle = locks.acquire(folder)
        # Another process may have removed it as a leftover before it was locked. The lock is never released:
        # the system does that when the process ends, however it ends.
        if folder.is_dir():
            return folder
        locks.release(handle)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError), _if_dead(folder) as dead:
            if dead:
                _remove_writer(folder)


def _remove_writer(writer: Path) -> None:
    for path in writer.parent.glob("*.safetensors"):
        # Nobody replaces the sample between the check and the removal.
        with locks.locked(writer.parent):
            if _writer_of(path) == writer.name:
                path.unlink(missing_ok=True)
    shutil.rmtree(writer)


@contextlib.contextmanager
def _if_dead(folder: Path) -> Iterator[bool]:
    """Whether the process of a writer's folder is dead; locks the folder of a dead one."""
    try:
        handle = locks.acquire(folder, wait=False)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        locks.release(handle)


def _writer_of(path: Path) -> str | None:
    """The name of the folder of the process that wrote a sample."""
    from safetensors import SafetensorError, safe_open

    with (
        contextlib.suppress(FileNotFoundError, SafetensorError),
        safe_open(path, framework="np") as file,
    ):
        return (file.metadata() or {}).get("writer")
    return None
