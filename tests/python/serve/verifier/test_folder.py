"""The folder of a verifier's files: its contents, their removal, and errors when it cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama
from support.verifier_files import LAYERS, TOKENS, ask, is_held, named, paused_writing, read, serving

import llamatap as lt
from llamatap.serve import VerifierOptions, create_app
from llamatap.serve.errors import ApiError
from llamatap.serve.verifier import VerifierFiles
from llamatap.serve.workers.model_worker import ModelWorker
from llamatap.storage.tensor_files import write_tensors

BODY = {"model": "tiny", "prompt": TOKENS, "return_token_ids": True, "max_tokens": 1}
NAME = f"hs-{'0123456789abcdef' * 2}.safetensors"


def files(folder: Path, **more: Any) -> VerifierFiles:
    options: Any = {"layers": LAYERS, "dtype": "float32", **more}
    return VerifierFiles(VerifierOptions(folder=folder, **options))


def some_states(n_tokens: int, width: int) -> lt.States:
    array = np.zeros((n_tokens, 1, width), np.float32)
    return lt.States(array, np.zeros(n_tokens, np.int32), [4], n_layer=4)


def refused(server: Running) -> tuple[str, str]:
    """The code and message of a 503 that says when to come back."""
    response = server.client.post("/v1/completions", json=BODY)
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert error["type"] == "unavailable_error"
    return error["code"], error["message"]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelWorker, "generate", lambda *_, **__: pytest.fail("generated in vain"))


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (1, 1), follow_symlinks=False)


LEAVING = """
import sys
import numpy as np
import llamatap as lt
from pathlib import Path
from llamatap.serve import VerifierOptions
from llamatap.serve.verifier import VerifierFiles

files = VerifierFiles(VerifierOptions(folder=Path(sys.argv[1]), layers=(1,), dtype="float32"))
states = lt.States(np.ones((4096, 1, 4096), np.float32), np.zeros(4096, np.int32), [4], n_layer=4)
while True:
    named = files.leave(states)
    named.unlink()
"""


def test_what_a_killed_server_left_goes(folder: Path) -> None:
    folder.mkdir()
    left: list[str] = []
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", LEAVING, folder]) as process:
            # Until half of a file is there, whatever it is called.
            while process.poll() is None and not any(
                path.suffix != ".lock" and path.name.startswith(".") for path in folder.iterdir()
            ):
                time.sleep(0.001)
            assert process.returncode is None
            process.send_signal(signal.SIGKILL)
        left = [path.name for path in folder.iterdir()]
        if any(name.startswith(".") for name in left):
            break
    assert any(name.startswith(".") for name in left)
    assert any(name.endswith(".lock") for name in left)
    files(folder)
    assert list(folder.iterdir()) == []


def test_what_another_server_is_writing_stays(folder: Path) -> None:
    folder.mkdir()
    lock, scratch = folder / f"{NAME}.lock", folder / f".{NAME}.0123abcd"
    scratch.mkdir()
    (scratch / ".tmpA1b2C3").touch()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        make_old(lock, scratch)
        found = files(folder)
        assert {path.name for path in folder.iterdir()} == {lock.name, scratch.name}
    found._sweep()
    assert list(folder.iterdir()) == []


def test_a_lock_that_another_server_took_away_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fcntl.flock
    taken: list[Path] = []

    def taking(lock: int, how: int) -> None:
        if not taken:
            # Between the making of the lock and this.
            taken.extend(folder.iterdir())
            taken[0].unlink()
        original(lock, how)

    found = files(folder)
    monkeypatch.setattr(fcntl, "flock", taking)
    path = found.leave(some_states(2, 8))
    monkeypatch.undo()
    assert taken == [Path(f"{path}.lock")]
    assert sorted(folder.iterdir()) == [path, taken[0]]


def test_names_of_others_and_links_stay(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    strangers = [
        "mine.safetensors",
        "hs_0.safetensors",
        ".tmpA1b2C3",
        f"{NAME}.bak",
        f".{NAME}.swp",
        "hs-1.lock",
    ]
    for name in strangers:
        (folder / name).write_text("not the server's")
    links = [NAME, f"{NAME}.lock", f".{NAME}.00000000", NAME.replace("0", "e")]
    for name in links:
        (folder / name).symlink_to(precious)
    (folder / NAME.replace("0", "f")).mkdir()
    (folder / f".{NAME}.11111111").write_text("no folder")
    everything = sorted(folder.iterdir())
    make_old(*everything, precious)
    files(folder, max_age=60).close()
    assert sorted(folder.iterdir()) == everything
    assert precious.read_text() == "precious"


def test_what_is_too_old_goes_by_itself(tiny_path: Path, folder: Path) -> None:
    with running([tiny_options(tiny_path)], serving(folder, max_age=0.5)) as server:
        ask(server)
        eventually(lambda: list(folder.iterdir()) == [])
        # The accounting of bytes includes it.
        verifier = server.state.verifier
        assert verifier is not None
        eventually(lambda: verifier._present == 0)
        threads = [one for one in threading.enumerate() if one.name == "llamatap-verifier"]
        assert len(threads) == 1
    assert not threads[0].is_alive()


def test_what_is_too_old_goes_at_the_start_and_at_the_end(tiny_path: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).touch()
    make_old(folder / NAME)
    young = NAME.replace("0", "f")
    (folder / young).touch()
    with running([tiny_options(tiny_path)], serving(folder, max_age=3600)) as server:
        assert [path.name for path in folder.iterdir()] == [young]
        path = named(ask(server))
        make_old(path, Path(f"{path}.lock"))
    assert [path.name for path in folder.iterdir()] == [young]


def test_locks_without_a_file_go(folder: Path) -> None:
    found = files(folder)
    path = found.leave(some_states(2, 8))
    lock = Path(f"{path}.lock")
    found._sweep()
    assert sorted(folder.iterdir()) == [path, lock]
    path.unlink()
    found._sweep()
    assert list(folder.iterdir()) == []


def test_a_full_folder_refuses_until_there_is_room(
    tiny_path: Path, folder: Path, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(TOKENS) * 4 * tiny.n_embd * 4
    with running([tiny_options(tiny_path)], serving(folder, quota_bytes=2 * size + 4000)) as server:
        first, second = ask(server), ask(server)
        read(second)
        with monkeypatch.context() as patched:
            nothing_is_generated(patched)
            assert refused(server)[0] == "verifier_folder_full"
        read(first)
        named(first).unlink()
        assert read(ask(server))[0].tolist() == TOKENS


def test_a_file_that_is_being_written_counts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, proceed = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        write_tensors(*arguments)
        written.set()
        assert proceed.wait(20)

    monkeypatch.setattr("llamatap.serve.verifier.write_tensors", slow)
    size = 100 * (64 * 4 + 8)
    found = files(folder, quota_bytes=2 * size + 2000)
    with ThreadPoolExecutor(1) as pool:
        path = pool.submit(found.leave, some_states(100, 64))
        assert written.wait(20)
        # The file exists and has been announced.
        found.check_room(100, 64)
        with pytest.raises(ApiError):
            found.check_room(200, 64)
        found._sweep()
        found.check_room(100, 64)
        proceed.set()
    assert found._present == path.result().stat().st_size


def test_few_files_are_written_at_one_time(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamatap.serve.verifier._MOST_WRITERS", 2)
    _, proceed = paused_writing(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, server) for _ in range(2)]
        eventually(lambda: len(list(folder.iterdir())) == 2)
        with monkeypatch.context() as patched:
            nothing_is_generated(patched)
            assert refused(server)[0] == "verifier_busy"
        # Waiting requests hold no lock.
        assert len([path for path in folder.iterdir() if is_held(path)]) == 2
        proceed.set()
        for answer in answers:
            assert read(answer.result())[0].tolist() == TOKENS
    assert read(ask(server))[0].tolist() == TOKENS


def test_a_full_disk(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        nothing_is_generated(patched)
        patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2, f_frsize=1024))
        code, message = refused(server)
        assert code == "verifier_folder_full"
        assert "2048 bytes" in message
        assert str(folder) in message
    assert read(ask(server))[0].tolist() == TOKENS


def test_promised_bytes_count_on_a_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100 * (64 * 4 + 8)
    found = files(folder)
    begun, proceed = paused_writing(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(found.leave, some_states(100, 64))
        assert begun.wait(20)
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2 * size - 1, f_frsize=1))
            with pytest.raises(ApiError, match=f"{size} are reserved"):
                found.check_room(100, 64)
            patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2 * size, f_frsize=1))
            found.check_room(100, 64)
        proceed.set()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "verifier_folder_full"),
        (errno.EDQUOT, "verifier_folder_full"),
        (errno.EROFS, "verifier_folder_unavailable"),
        (errno.EIO, "verifier_folder_unavailable"),
    ],
)
def test_a_file_that_cannot_be_written(
    number: int, code: str, server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: object, path: Path, **__: object) -> None:
        path.write_text("half")
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.numpy.save_file", failing)
        found, message = refused(server)
        assert found == code
        assert str(folder) in message
        assert os.strerror(number) in message
    assert list(folder.iterdir()) == []
    assert read(ask(server))[0].tolist() == TOKENS


def test_what_the_library_of_the_format_says(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.numpy.save_file", failing)
        assert "No space left" in refused(server)[1]
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_taken_away(server: Running, folder: Path) -> None:
    shutil.rmtree(folder)
    code, message = refused(server)
    assert code == "verifier_folder_unavailable"
    assert str(folder) in message
    assert server.states(input=TOKENS)["shape"][0] == 5
    folder.mkdir()
    assert read(ask(server))[0].tolist() == TOKENS


def test_a_folder_that_is_none(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        create_app([tiny_options(tiny_path)], serving(tmp_path / "file"))
