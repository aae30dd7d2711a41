"""A file of conversations that is written line by line, and goes on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import BusyError, InvalidInputError
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.locks import acquire, release
from llamatap.train.conversations import Conversation, TurnFrame

__all__ = ["ConversationFile"]


class ConversationFile:
    """A ``.jsonl`` file of conversations, open for more.

    Each conversation is a line, written as soon as it is there. ``FILE.options`` beside it holds what they
    were sampled with, as a JSON object. Without a conversation, both files are removed at the end.

    :param options: what a continued file must be equal in, as JSON values.
    :param frame: the tokens around each question.
    :param resume: continue the file, if it is there. A line that was cut by a kill is removed.
    :ivar questions: int32: the questions of the conversations in the file.
    :ivar n_tokens: tokens of all conversations in the file.
    :raises InvalidInputError: the file is there and ``resume`` is False, or it was sampled with other
        options, or holds something else.
    :raises BusyError: another process writes it.
    :raises OSError: it cannot be written.
    """

    def __init__(self, path: Path, options: Mapping[str, Any], frame: TurnFrame, *, resume: bool) -> None:
        self.path = path
        self.questions: list[NDArray[np.int32]] = []
        self.n_tokens = 0
        self._options_file = path.with_name(path.name + ".options")
        if path.is_dir():
            raise InvalidInputError(f"{path} is a folder; the output is a file")
        try:
            self._lock = acquire(path, make=True, wait=False)
        except BlockingIOError:
            raise BusyError(f"another process writes {path}") from None
        try:
            # Looked at with the lock: another process may have just written it.
            is_there = path.stat().st_size > 0
            if is_there and not resume:
                raise InvalidInputError(f"{path} exists; continue it (--resume), or remove it")
            if is_there:
                self._check_options(options)
                self._read(frame)
            else:
                with atomic_path(self._options_file) as scratch:
                    scratch.write_text(json.dumps(dict(options), indent=2) + "\n")
            self._file = path.open("ab")
        except BaseException:
            release(self._lock)
            raise

    def _check_options(self, options: Mapping[str, Any]) -> None:
        try:
            found = json.loads(self._options_file.read_text())
            differing = {key: (found.get(key), now) for key, now in options.items() if found.get(key) != now}
        except (FileNotFoundError, ValueError, AttributeError):
            raise InvalidInputError(
                f"{self.path} has no {self._options_file.name} beside it that says how it was made; give "
                "another output"
            ) from None
        if differing:
            told = "; ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in differing.items())
            raise InvalidInputError(f"{self.path} was made with other options: {told}")

    def _read(self, frame: TurnFrame) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    tokens, answer = np.array(row["input_ids"], np.int32), row["loss_mask"].index(1)
                except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                    raise InvalidInputError(
                        f"{self.path}, line {number}, is no conversation; remove the line, or give another "
                        "output"
                    ) from None
                self.questions.append(tokens[len(frame.before) : answer - len(frame.after)])
                self.n_tokens += len(tokens)
                end += len(line)
        os.truncate(self.path, end)

    def add(self, conversation: Conversation) -> None:
        """Write a conversation."""
        self._file.write(json.dumps(conversation.row()).encode() + b"\n")
        self._file.flush()
        self.questions.append(conversation.question)
        self.n_tokens += len(conversation.input_ids)

    def __enter__(self) -> ConversationFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if not self.questions:
            self.path.unlink(missing_ok=True)
            self._options_file.unlink(missing_ok=True)
        release(self._lock)
