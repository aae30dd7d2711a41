"""States in the memory of this machine, for a trainer in another process."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import mmap
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamatap._validate import integer, shown
from llamatap.connectors.base import Stored
from llamatap.connectors.files import FileConnector, header_of
from llamatap.errors import InvalidInputError
from llamatap.states import States, write_tensors
from llamatap.storage import locks

__all__ = ["SharedMemoryConnector"]

#: Prefix of the name of a writer's own folder.
_PREFIX = "writer-"


class SharedMemoryConnector(FileConnector):
    """Files in memory (tmpfs) that a reader maps: its arrays are the pages that were written, read-only and
    without a copy. A sample's memory is free when it was deleted and the last array of it is gone.

    A sample lives no longer than the process that put it, which removes what is left of its own as it exits.
    What those have left that were killed, or end by ``os._exit`` (multiprocessing's forked ones do), is
    removed by the next connector of the same name, one that only reads, too.

    :param name: the same for those who write and those who read.
    :param max_bytes: the most that all samples of that name which are there to be read take together; one
        that does not fit is refused with an ``OSError`` (``ENOSPC``), for the writer to wait until others are
        deleted, or to stop (:class:`~llamatap.connectors.Collector` does either). What was deleted or
        replaced, and is held as an array by a reader still, takes memory beyond it. Writers that put at the
        same moment may exceed it by a sample each. None for half of the file system's size (of ``/dev/shm``:
        usually a quarter of the machine's memory).
    :raises InvalidInputError: it is no name, or no number of bytes.
    :raises PermissionError: the folder of that name is another user's.
    :raises OSError: the folder cannot be made.
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
                raise PermissionError(f"{folder} is not this user's")
        super().__init__(base / name)
        self.max_bytes = shutil.disk_usage(self.folder).total // 2 if max_bytes is None else max_bytes
        self._lock = threading.Lock()
        self._writer: Path | None = None
        self._process = os.getpid()
        self.setup()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, such as a loader's worker, it is a writer of its own."""
        return functools.partial(type(self), max_bytes=self.max_bytes), (self.folder.name,)

    def setup(self) -> None:
        """Remove what processes left that are dead."""
        _remove_leftovers(self.folder)

    def _write(self, path: Path, tensors: Stored, states: States) -> None:
        writer = self._as_writer()
        self._check_room(path, sum(array.nbytes for array in tensors.values()))
        scratch = writer / path.name
        write_tensors(scratch, tensors, {**states.provenance, "writer": writer.name})
        # Whoever puts samples into the folder, or removes another's, waits.
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
                "taken; delete what was read, or give more",
                str(self.folder),
            )

    def _taken(self, path: Path) -> int:
        """Bytes of all samples but the one that is replaced."""
        taken = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name != path.name and entry.name.endswith(".safetensors"):
                    with contextlib.suppress(FileNotFoundError):
                        taken += entry.stat().st_size
        return taken

    def _as_writer(self) -> Path:
        """The folder of this process, whose lock lasts as long as it lives."""
        with self._lock:
            if self._writer is None or self._process != os.getpid():
                self._process = os.getpid()
                self._writer = _locked_folder(self.folder)
                atexit.register(_at_exit, self._writer, self._process)
            return self._writer


def _at_exit(writer: Path, process: int) -> None:
    # Children that were forked have this from their parent, whose samples they leave alone.
    if os.getpid() == process:
        with contextlib.suppress(FileNotFoundError):
            _remove_writer(writer)


def _locked_folder(parent: Path) -> Path:
    while True:
        folder = parent / f"{_PREFIX}{uuid.uuid4().hex}"
        folder.mkdir(mode=0o700)
        handle = locks.acquire(folder)
        # Another one may have taken it for a leftover before it was locked. The handle is never closed: the
        # system does that when the process ends, however it ends.
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
        # Nobody puts another sample in its place between the look and the removal.
        with locks.locked(writer.parent):
            if _writer_of(path) == writer.name:
                path.unlink(missing_ok=True)
    shutil.rmtree(writer)


@contextlib.contextmanager
def _if_dead(folder: Path) -> Iterator[bool]:
    try:
        handle = locks.acquire(folder, wait=False)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        locks.release(handle)


def _writer_of(path: Path) -> object:
    with (
        contextlib.suppress(FileNotFoundError, ValueError, AttributeError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        return header_of(pages)[0].get("__metadata__", {}).get("writer")
    return None
