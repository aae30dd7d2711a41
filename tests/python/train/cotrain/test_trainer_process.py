"""The trainer as a child of the serving side: started again when it ends; one of others is left alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cotraining import Files, serving, write_files

from llamatap.storage import locks
from llamatap.train.cotrain import trainer_process


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "_FIRST_PAUSE", 0.02)


def program(path: Path, *lines: str) -> Path:
    """What stands for a Python: a script that gets the trainer's arguments."""
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_started_again_after_a_kill(files: Files, tmp_path: Path) -> None:
    said = tmp_path / "said"
    python = program(tmp_path / "python", f'echo "$@" >> {said}', "exec sleep 1000")
    with serving(
        files,
        tmp_path / "f",
        start_trainer=True,
        python=python,
        trainer_arguments=["--seed", "7"],
        poll_seconds=0.02,
    ) as one:
        wait_for(lambda: one.cotrainer.trainer_pid is not None)
        first = one.cotrainer.trainer_pid
        assert first is not None
        wait_for(said.exists)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: one.cotrainer.trainer_pid not in (None, first))
        second = one.cotrainer.trainer_pid
        assert second is not None
        wait_for(lambda: len(said.read_text().splitlines()) == 2)
        assert [event["status"] for event in one.events("trainer ended")] == [-signal.SIGKILL]
        one.generate(2)
    # It ends with the serving side.
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    draft = files.drafts["fair"]
    expected = f"-m llamatap cotrain {files.target} {tmp_path / 'f'} --draft {draft} --follow --seed 7"
    assert said.read_text().splitlines() == [expected, expected]


def test_one_that_cannot_start_is_tried_less_and_less(files: Files, tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo no PyTorch >&2", "exit 3")
    with serving(files, tmp_path / "f", start_trainer=True, python=python, poll_seconds=0.005) as one:
        wait_for(lambda: len(one.events("trainer ended")) >= 4)
        pauses = [event["started_again_in"] for event in one.events("trainer ended")]
        assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]
        assert {event["said"] for event in one.events("trainer ended")} == {"no PyTorch\n"}
        one.generate(2)


def test_a_missing_python_is_told(files: Files, tmp_path: Path) -> None:
    with serving(
        files, tmp_path / "f", start_trainer=True, python=tmp_path / "none", poll_seconds=0.005
    ) as one:
        wait_for(lambda: bool(one.events("trainer not started")))
        assert "No such file" in one.events("trainer not started")[0]["error"]
        one.generate(2)


def test_another_s_trainer_is_left_alone(files: Files, tmp_path: Path) -> None:
    python = program(tmp_path / "python", "exec sleep 1000")
    with serving(files, tmp_path, start_trainer=True, python=python) as one:
        lock = one.folder.lock("trainer")
        one.cotrainer.look()
        assert one.cotrainer.trainer_pid is None
        # That one dies.
        locks.release(lock)
        one.cotrainer.look()
        assert one.cotrainer.trainer_pid is not None
