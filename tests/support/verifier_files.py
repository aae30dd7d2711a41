"""Helpers for a server that leaves files of states for a trainer: its options, requests and reader."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors reads bfloat16 with it
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from support.servers import Running

from llamatap.serve import ServerOptions, VerifierOptions
from llamatap.storage.tensor_files import write_tensors

LAYERS = (1, 2, 3)
TOKENS = [5, 77, 200, 9, 31]


def serving(folder: Path, **more: Any) -> ServerOptions:
    return ServerOptions(
        verifier=VerifierOptions(folder=folder, layers=LAYERS, **{"dtype": "float32", **more})
    )


def ask(server: Running, prompt: Any = TOKENS, **more: Any) -> Any:
    """Send the request that speculators sends."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    return server.post("/v1/completions", **{**body, **more})


def named(answer: Any) -> Path:
    """The file that an answer names."""
    return Path(answer["kv_transfer_params"]["hidden_states_path"])


def is_held(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def paused_writing(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Pause the writing of files: one event is set when writing begins, the other resumes it."""
    begun, proceed = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert proceed.wait(20)
        write_tensors(*arguments)

    monkeypatch.setattr("llamatap.serve.verifier.write_tensors", slow)
    return begun, proceed


def read(answer: Any) -> tuple[NDArray[Any], NDArray[Any], dict[str, str]]:
    """Read a file as speculators does: wait for the lock, remove it, read."""
    path = named(answer)
    lock = Path(f"{path}.lock")
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
    lock.unlink()
    with safe_open(path, framework="np") as file:
        return file.get_tensor("token_ids"), file.get_tensor("hidden_states"), file.metadata()
