"""`llamatap conversations` line by line: kills, --resume, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.__main__ import main
from llamatap.storage.locks import acquire, locked
from llamatap.train.conversation_file import ConversationFile
from llamatap.train.conversations import TurnFrame

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
FRAME = TurnFrame(np.array([1, 7], np.int32), np.array([2, 8], np.int32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyLlama(n_layer=1, seed=3)
    # Texts end soon.
    tiny.weights["output.weight"][2] *= 3
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny.gguf", chat_template=CHAT)


def command(model: Path, output: Path, *more: str) -> list[str]:
    return [
        "conversations",
        str(model),
        "-o",
        str(output),
        "--max-answer",
        "8",
        "--parallel",
        "2",
        "--quiet",
        *more,
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def n_tokens(path: Path) -> int:
    return sum(len(row["input_ids"]) for row in rows(path))


def questions(path: Path) -> list[tuple[int, ...]]:
    """With the template around them."""
    return [tuple(row["input_ids"][: row["loss_mask"].index(1)]) for row in rows(path)]


def test_a_killed_one_continues(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "chats.jsonl"
    endless = subprocess.Popen(
        [sys.executable, "-m", "llamatap", *command(model, output, "--tokens", "2000000000")],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (output.exists() and output.read_bytes().count(b"\n") >= 20):
            assert endless.poll() is None, endless.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        endless.send_signal(signal.SIGKILL)
        endless.wait(timeout=60)
    finally:
        endless.kill()
        endless.communicate()
    before = output.read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    # As if the kill had cut a line.
    output.write_bytes(before + b'{"input_ids": [1, 2')
    there = sum(len(json.loads(line)["input_ids"]) for line in before.splitlines())
    assert main(command(model, output, "--tokens", str(there + 1500), "--resume")) == 0
    after = output.read_bytes()
    assert after.startswith(before)
    assert there + 1500 <= n_tokens(output) < there + 1500 + 250
    found = questions(output)
    assert len(set(found)) == len(found)


def test_the_temperatures_go_on_in_turn_and_the_seeds_too(model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert main(command(model, whole, "--tokens", "1500")) == 0
    for tokens in ("500", "1000", "1500"):
        assert main(command(model, parts, "--tokens", tokens, "--resume")) == 0
    assert rows(parts)[:3] == rows(whole)[:3]
    # Seeds that began anew would give the first questions again, all of which would be dropped.
    assert len(set(questions(parts))) == len(rows(parts)) > 6
    again = parts.read_bytes()
    assert main(command(model, parts, "--tokens", "1500", "--resume")) == 0
    assert parts.read_bytes() == again


def test_given_questions_are_answered_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, asked = tmp_path / "chats.jsonl", tmp_path / "questions.txt"
    asked.write_text("one\n\ntwo\nthree\none\nfour\n")
    given = ("--questions", str(asked))
    assert main(command(model, output, *given)) == 0
    whole = output.read_text().splitlines(keepends=True)
    assert len(whole) == 4
    output.write_text("".join(whole[:2]) + whole[2][:9])
    assert main(command(model, output, *given, "--resume")) == 0
    assert len(set(questions(output))) == len(rows(output)) == 4
    assert "4 conversations" in capsys.readouterr().err
    asked.write_text("five\n")
    assert main(command(model, output, *given, "--resume")) == 1
    assert "made with other options: questions was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), r"chats.jsonl exists; continue it (--resume), or remove it"),
        (("--resume", "--seed", "5"), "made with other options: seed was 0, is 5"),
        (("--resume", "--temperatures", "0"), "temperatures was [0.0, 0.8], is [0.0]"),
        (("--resume", "--max-answer", "9"), "max_answer was 8, is 9"),
        (("--resume", "--keep-loops"), "keep_loops was False, is True"),
    ],
)
def test_other_options_are_refused_by_name(
    changes: tuple[str, ...], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "chats.jsonl"
    assert main(command(model, output, "--tokens", "100")) == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert main(command(model, output, "--tokens", "200", *changes)) == 1
    found = capsys.readouterr().err
    assert told in found
    assert found.count("\n") == 1
    assert output.read_bytes() == before


def test_another_model_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "chats.jsonl"
    assert main(command(model, output, "--tokens", "100")) == 0
    other = TinyLlama(n_layer=1, seed=4).write(tmp_path / "other.gguf", chat_template=CHAT)
    assert main(command(other, output, "--tokens", "200", "--resume")) == 1
    assert "made with other options: model was" in capsys.readouterr().err


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "mine"}\n')
    with pytest.raises(lt.InvalidInputError, match=r"has no chats\.jsonl\.options beside it"):
        ConversationFile(path, {}, FRAME, resume=True)
    (tmp_path / "chats.jsonl.options").write_text("{}")
    with pytest.raises(lt.InvalidInputError, match=r"chats\.jsonl, line 1, is no conversation"):
        ConversationFile(path, {}, FRAME, resume=True)
    assert path.read_text() == '{"text": "mine"}\n'
    with pytest.raises(lt.InvalidInputError, match="is a folder"):
        ConversationFile(tmp_path, {}, FRAME, resume=True)


def test_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.touch()
    with locked(path), pytest.raises(lt.BusyError, match="another process writes"):
        ConversationFile(path, {}, FRAME, resume=True)


def test_a_writer_that_has_just_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is not continued with other options."""
    path = tmp_path / "out.jsonl"

    def later(*arguments: Any, **options: Any) -> int:
        path.write_text("{}\n")
        return acquire(*arguments, **options)

    monkeypatch.setattr("llamatap.train.conversation_file.acquire", later)
    with pytest.raises(lt.InvalidInputError, match="exists; continue it"):
        ConversationFile(path, {}, FRAME, resume=False)
    assert path.read_text() == "{}\n"


def test_without_a_conversation_nothing_is_left(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for wrong in (("--temperatures=-1",), ("--questions", str(tmp_path / "missing.txt"))):
        assert main(command(model, folder / "a.jsonl", *wrong)) == 1
        assert capsys.readouterr().err.count("\n") == 1
        assert not list(folder.iterdir())


def test_questions_that_cannot_be_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "questions.txt"
    for content, told in ((b"", "holds no questions"), (b"\xff\xfe", "is not UTF-8")):
        asked.write_bytes(content)
        assert main(command(model, tmp_path / "a.jsonl", "--questions", str(asked))) == 1
        assert told in capsys.readouterr().err
