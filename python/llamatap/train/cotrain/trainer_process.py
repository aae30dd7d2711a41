"""The trainer as a child process: started, and started again when it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Sequence

from llamatap.train.cotrain.event_log import EventLog
from llamatap.train.cotrain.folder import CoTrainFolder

__all__ = ["TrainerProcess"]

_logger = logging.getLogger("llamatap")

#: Seconds before it is started again: after each end twice as many, up to the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
#: One that ran as long is started again as if it were the first.
_LONG_RUN = 60.0


class TrainerProcess:
    """Keeps a trainer running in the folder. One that another process started there is left alone.

    :param command: its command line.
    """

    def __init__(self, command: Sequence[str], folder: CoTrainFolder, log: EventLog) -> None:
        self._command = list(command)
        self._folder = folder
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pause = _FIRST_PAUSE
        self._started = 0.0
        self._next_start = 0.0

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def look(self) -> None:
        """Start it if none runs."""
        now = time.monotonic()
        if self._process is not None:
            if (status := self._process.poll()) is None:
                return
            if now - self._started > _LONG_RUN:
                self._pause = _FIRST_PAUSE
            said = self._last_lines()
            self._log.add("trainer ended", status=status, said=said, started_again_in=self._pause)
            last = (said.splitlines() or ["nothing"])[-1]
            _logger.warning("the trainer of co-training ended with status %d and said: %s", status, last)
            self._process = None
            self._next_start = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if now < self._next_start or self._folder.is_locked("trainer"):
            return
        with self._folder.trainer_log.open("wb") as file:
            try:
                # A group of its own: Ctrl-C in the server's terminal is the server's.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                )
            except OSError as error:
                self._log.add("trainer not started", error=str(error))
                _logger.warning("the trainer of co-training cannot be started: %s", error)
                self._next_start = now + _LONGEST_PAUSE
                return
        self._started = now
        self._log.add("trainer started", pid=self._process.pid)

    def close(self, seconds: float = 15.0) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _last_lines(self) -> str:
        with contextlib.suppress(OSError), self._folder.trainer_log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 500))
            return file.read().decode(errors="replace")
        return ""
