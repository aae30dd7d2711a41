"""The folder that couples the two sides of co-training.

=============================  ===========  =============================================================
``samples/hs_N.safetensors``   serving      a finished text: tokens, loss mask, states, as connectors write
``serving.json``               serving      :class:`ServingSide`; its time of change is a sign of life
``drafters/N.refused.json``    serving      why draft N was not taken, or given up
``drafters/N.gguf``            trainer      a draft file
``drafters/N.json``            trainer      :class:`Published`, written after the draft file
``checkpoints/N``              trainer      the weights of draft N in float32
``log.jsonl``                  both         :mod:`llamatap.train.cotrain.event_log`
``acceptance.png``             trainer      the log's plot
``trainer.log``                trainer      its stderr, if the serving side started it
=============================  ===========  =============================================================

Files appear whole or not at all; each has one writer, and the log is only appended to. ``serving.lock`` and
``trainer.lock`` keep out a second process of each side, until the first has ended in any way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamatap._validate import path as checked_path
from llamatap.errors import InvalidInputError
from llamatap.storage import locks
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.file_hashes import file_sha256

__all__ = ["CoTrainFolder", "Published", "ServingSide"]

_Record = TypeVar("_Record", "ServingSide", "Published")
# What JSON gives for the annotations of records.
_TYPES: dict[str, Any] = {
    "bool": bool,
    "float": (int, float),
    "int": int,
    "str": str,
    "str | None": (str, type(None)),
    "tuple[float, ...] | None": (list, type(None)),
    "tuple[int, ...]": list,
}


@dataclass(frozen=True)
class ServingSide:
    """The serving side, as it tells the trainer.

    :ivar model: the target's file.
    :ivar model_sha256: its hash.
    :ivar kind: kind of the drafter, "eagle3" or "mtp".
    :ivar layers: the layers of the samples' states; H_n is the last.
    :ivar n_threads: threads of the engine.
    :ivar in_use: number of the draft in use; 0 for the one that it began with.
    :ivar before: number of the one that it would go back to; ``in_use`` when it was kept.
    :ivar before_rates: tokens per round of that one on the traffic, for each stage of a text
        (:mod:`llamatap.train.cotrain.trial`); None without a trial.
    :ivar closed: whether it ended in order.
    """

    model: str
    model_sha256: str | None
    kind: str
    layers: tuple[int, ...]
    n_threads: int
    in_use: int
    before: int
    before_rates: tuple[float, ...] | None
    closed: bool


@dataclass(frozen=True)
class Published:
    """A published draft.

    :ivar number: its number, from 1.
    :ivar base: number of the draft that its training began with.
    :ivar n_bytes: size of the draft file.
    :ivar sha256: hash of the draft file.
    :ivar tokens_per_round: acceptance length on held-out samples.
    :ivar base_tokens_per_round: that of the draft that was in use, on the same samples.
    """

    number: int
    base: int
    n_bytes: int
    sha256: str
    tokens_per_round: float
    base_tokens_per_round: float


class CoTrainFolder:
    """The folder and its files; created if missing.

    :raises OSError: it cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = checked_path("folder", folder).absolute()
        self.samples = self.path / "samples"
        self.drafters = self.path / "drafters"
        self.checkpoints = self.path / "checkpoints"
        self.log = self.path / "log.jsonl"
        self.plot = self.path / "acceptance.png"
        self.trainer_log = self.path / "trainer.log"
        self._serving = self.path / "serving.json"
        # Reasons that could not be written.
        self._unwritten: dict[int, dict[str, Any]] = {}
        for one in (self.samples, self.drafters, self.checkpoints):
            one.mkdir(parents=True, exist_ok=True)

    def lock(self, side: str, *, seconds: float = 0.0) -> int:
        """Lock the folder for a side, "serving" or "trainer".

        :param seconds: how long to wait for a process that is ending.
        :returns: the handle for :func:`llamatap.storage.locks.release`.
        :raises InvalidInputError: another process has that lock.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return locks.acquire(self.path / f"{side}.lock", make=True, wait=False)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    what = "serves with" if side == "serving" else "trains in"
                    raise InvalidInputError(f"another process {what} {self.path}") from None
            time.sleep(0.05)

    def is_locked(self, side: str) -> bool:
        """Whether a process of that side runs."""
        try:
            locks.release(self.lock(side))
        except InvalidInputError:
            return True
        return False

    # What the serving side says.

    def serving_side(self) -> ServingSide | None:
        """What the serving side said last; None if it never did.

        :raises InvalidInputError: the file is another program's.
        """
        found = _read(self._serving, ServingSide)
        return None if found is None else dataclasses.replace(found, layers=tuple(found.layers))

    def tell(self, serving: ServingSide) -> None:
        """Write what the serving side says."""
        _write(self._serving, dataclasses.asdict(serving))

    def give_sign(self) -> None:
        """Show the trainer that the serving side lives."""
        with contextlib.suppress(OSError):
            os.utime(self._serving)

    def silent_seconds(self) -> float:
        """Seconds since the serving side's last sign of life; infinite without any."""
        try:
            return max(0.0, time.time() - self._serving.stat().st_mtime)
        except FileNotFoundError:
            return float("inf")

    def refuse(self, number: int, reason: str, figures: dict[str, Any]) -> None:
        """Record that a draft was not taken, or given up. If that cannot be written, :meth:`refused` tries
        again."""
        self._unwritten[number] = {"reason": reason, **figures}
        self.refused()

    def refused(self) -> set[int]:
        """The numbers of refused drafts."""
        for number, record in [*self._unwritten.items()]:
            with contextlib.suppress(OSError):
                _write(self.drafters / f"{number}.refused.json", record)
                del self._unwritten[number]
        return _numbers(self.drafters, ".refused.json") | self._unwritten.keys()

    # What the trainer publishes.

    def draft(self, number: int) -> Path:
        """The file of a published draft."""
        return self.drafters / f"{number}.gguf"

    def publish(self, number: int, base: int, tokens_per_round: float, base_tokens_per_round: float) -> None:
        """Publish a draft whose file has been written."""
        path = self.draft(number)
        sizes = (path.stat().st_size, file_sha256(path))
        found = Published(number, base, *sizes, tokens_per_round, base_tokens_per_round)
        _write(self.drafters / f"{number}.json", dataclasses.asdict(found))

    def published(self, number: int) -> Published | None:
        """What the trainer said about a draft; None if it is gone.

        :raises InvalidInputError: the file is not one of a trainer.
        """
        return _read(self.drafters / f"{number}.json", Published)

    def candidates(self) -> list[int]:
        """Numbers of the published drafts, oldest first, without refused ones and those that were trained
        from such a one."""
        refused = self.refused()
        found: list[int] = []
        for number in sorted(_numbers(self.drafters, ".json")):
            try:
                said = self.published(number)
            except InvalidInputError:
                # Whoever takes it says what is wrong.
                said = None
            if number in refused or (said is not None and said.base in refused):
                refused.add(number)
            else:
                found.append(number)
        return found

    def next_number(self) -> int:
        """A number that no draft ever had, refused ones included."""
        used = _numbers(self.drafters, ".json") | self.refused() | _numbers(self.drafters, ".gguf")
        return max(used, default=0) + 1

    def remove_old(self, keep: int) -> None:
        """Remove drafts and checkpoints beside the newest ``keep`` candidates and those that the serving side
        needs. Why drafts were refused stays: a few lines each."""
        serving = self.serving_side()
        kept = {*self.candidates()[-keep:]} | ({serving.in_use, serving.before} if serving else set())
        for number in _numbers(self.drafters, ".gguf") - kept:
            # The description first: without it nobody takes the file.
            (self.drafters / f"{number}.json").unlink(missing_ok=True)
            self.draft(number).unlink(missing_ok=True)
        for one in self.checkpoints.iterdir():
            if one.name.partition(".")[0] not in {str(number) for number in kept}:
                shutil.rmtree(one) if one.is_dir() else one.unlink(missing_ok=True)

    def remove_leftovers(self, side: str) -> None:
        """Remove the half-written files that a killed process of a side left; call with its lock."""
        patterns = {
            "serving": [
                (self.path, ".serving.json.*"),
                (self.drafters, ".*.refused.json.*"),
                (self.samples, ".hs_*"),
            ],
            "trainer": [
                (self.path, ".draft-*"),
                (self.path, ".acceptance.png.*"),
                (self.drafters, ".[0-9]*.gguf.*"),
                (self.drafters, ".[0-9].json.*"),
                (self.drafters, ".[0-9]*[0-9].json.*"),
                (self.checkpoints, ".*"),
            ],
        }
        for folder, pattern in patterns[side]:
            for leftover in folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)


def _numbers(folder: Path, suffix: str) -> set[int]:
    found = {one.name.removesuffix(suffix) for one in folder.iterdir() if one.name.endswith(suffix)}
    return {int(one) for one in found if one.isdecimal()}


def _write(path: Path, record: dict[str, Any]) -> None:
    with atomic_path(path) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n")


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        found = kind(**json.loads(path.read_text()))
        for one in dataclasses.fields(found):
            value = getattr(found, one.name)
            is_list = isinstance(value, list)
            if not isinstance(value, _TYPES[str(one.type)]) or (
                is_list and not all(isinstance(item, (int, float)) for item in value)
            ):
                raise ValueError(f"{one.name} is {value!r}")
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a file of co-training: {error}") from error
    return found
