"""Files of states that completions leave for a trainer: whole, locked until then, no more than allowed."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors reads bfloat16 with it
import numpy as np
import pytest
from conftest import relative
from numpy.typing import NDArray
from safetensors import safe_open
from serving import Running, running, tiny_options
from tinies.drafters import write_eagle3
from tiny import TinyLlama

import llamatap as lt
from llamatap.serve import ServerOptions, VerifierOptions, create_app
from llamatap.serve.verifier import VerifierFiles
from reference import decoder

LAYERS = (1, 2, 3)
TOKENS = [5, 77, 200, 9, 31]


def serving(folder: Path, **more: Any) -> ServerOptions:
    return ServerOptions(
        verifier=VerifierOptions(folder=folder, layers=LAYERS, **{"dtype": "float32", **more})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def server(tiny_path: Path, folder: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_path)], serving(folder)) as found:
        yield found


def ask(server: Running, prompt: Any = TOKENS, **more: Any) -> Any:
    """What speculators asks."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    return server.post("/v1/completions", **{**body, **more})


def read(answer: Any) -> tuple[NDArray[Any], NDArray[Any], dict[str, str]]:
    """As its reader does: wait for the lock, remove it, read."""
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    lock = Path(f"{path}.lock")
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
    lock.unlink()
    with safe_open(path, framework="np") as file:
        return file.get_tensor("token_ids"), file.get_tensor("hidden_states"), file.metadata()


def oracle(tiny: TinyLlama, tokens: list[int]) -> NDArray[np.float64]:
    """vLLM's layers, and H_n as the last: none of them normed."""
    streams, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))
    return np.stack([streams[k] for k in (*LAYERS, tiny.n_layer)], 1)


def test_a_file_holds_the_prompts_states(server: Running, folder: Path, tiny: TinyLlama) -> None:
    answer = ask(server)
    assert answer["choices"][0]["prompt_token_ids"] == TOKENS
    assert len(answer["choices"][0]["token_ids"]) == 1
    ids, states, metadata = read(answer)
    assert ids.dtype == np.int64
    assert ids.tolist() == TOKENS
    assert states.shape == (5, 4, tiny.n_embd)
    assert relative(states, oracle(tiny, TOKENS)) < 1e-5
    assert metadata["layers"] == "[1, 2, 3, 4]"
    assert metadata["norm"] == '["pre", "pre", "pre", "pre"]'
    (path,) = folder.iterdir()
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_prompt_longer_than_a_batch(tiny_path: Path, folder: Path, tiny: TinyLlama) -> None:
    options = tiny_options(tiny_path)
    options.context["n_batch"] = options.context["n_ubatch"] = 32
    tokens = np.random.default_rng(0).integers(3, 259, 150).tolist()
    try:
        with running([options], serving(folder)) as server:
            _, states, _ = read(ask(server, tokens))
    finally:
        del options.context["n_batch"], options.context["n_ubatch"]
    assert relative(states, oracle(tiny, tokens)) < 1e-5


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_with_a_drafter_they_are_the_same(
    kind: str, tiny_path: Path, tmp_path: Path, tiny: TinyLlama
) -> None:
    drafter = kind
    if kind == "eagle3":
        drafter = str(tmp_path / "eagle3.gguf")
        write_eagle3(Path(drafter), n_embd_target=tiny.n_embd)
    options = tiny_options(tiny_path, drafter=drafter)
    with running([options], serving(tmp_path / "states")) as server:
        _, states, _ = read(ask(server, TOKENS * 3, max_tokens=9))
    assert relative(states, oracle(tiny, TOKENS * 3)) < 1e-5


def test_a_chat_names_its_tokens_at_the_top(tiny: TinyLlama, tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    path = tiny.write(tmp_path / "chat.gguf", chat_template=template)
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        "max_tokens": 1,
        "return_token_ids": True,
        "add_generation_prompt": False,
        "continue_final_message": False,
    }
    with running([tiny_options(path)], serving(tmp_path / "states")) as server, lt.Model(path) as model:
        answer = server.post("/v1/chat/completions", **body)
        tokens = model.tokenize("<user>hi<assistant>yo").tolist()
        assert answer["prompt_token_ids"] == tokens
        ids, states, _ = read(answer)
        assert ids.tolist() == tokens
        assert relative(states, oracle(tiny, tokens)) < 1e-5


def test_the_lock_is_held_until_the_file_is_whole(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()
    original = VerifierFiles._write

    def slow(*arguments: Any) -> None:
        assert proceed.wait(20)
        original(*arguments)

    monkeypatch.setattr(VerifierFiles, "_write", slow)
    answer = ask(server)
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    assert path.parent == folder
    assert not path.exists()
    with Path(f"{path}.lock").open("r+") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        proceed.set()
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert path.exists()
    assert read(answer)[0].tolist() == TOKENS


def test_only_those_who_ask_leave_files(server: Running, folder: Path) -> None:
    assert "kv_transfer_params" not in ask(server, return_token_ids=False)
    stream = {"model": "tiny", "prompt": TOKENS, "max_tokens": 1, "stream": True, "return_token_ids": True}
    assert server.client.post("/v1/completions", json=stream).status_code == 200
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("field", ["hidden_states_path", "kv_transfer_params", "request_id"])
def test_a_request_cannot_say_where(server: Running, folder: Path, field: str) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": TOKENS,
        "return_token_ids": True,
        field: "/tmp/elsewhere",
    }
    assert field in server.error("/v1/completions", 400, "invalid_request_error", **body)
    assert list(folder.iterdir()) == []


def test_a_full_folder_refuses_until_there_is_room(tiny_path: Path, folder: Path, tiny: TinyLlama) -> None:
    size = len(TOKENS) * 4 * tiny.n_embd * 4
    with running([tiny_options(tiny_path)], serving(folder, quota_bytes=2 * size + 3000)) as server:
        first, second = ask(server), ask(server)
        read(second)
        body = {"model": "tiny", "prompt": TOKENS, "return_token_ids": True, "max_tokens": 1}
        refused = server.client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "verifier_folder_full"
        assert int(refused.headers["retry-after"]) >= 1
        read(first)
        Path(first["kv_transfer_params"]["hidden_states_path"]).unlink()
        assert read(ask(server))[0].tolist() == TOKENS


def test_what_is_too_old_goes_and_nothing_else(tiny_path: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "mine.safetensors").write_text("not the server's")
    (folder / "hs_0.safetensors").write_text("a data set's")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    with running([tiny_options(tiny_path)], serving(folder, max_age=60)) as server:
        old = Path(ask(server)["kv_transfer_params"]["hidden_states_path"])
        deadline = time.monotonic() + 10
        while not old.exists():
            assert time.monotonic() < deadline
        for path in (old, Path(f"{old}.lock")):
            os.utime(path, (1, 1))
        answer = ask(server)
        read(answer)
        assert not old.exists()
        new = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["mine.safetensors", "hs_0.safetensors", new]
        )


def test_a_folder_that_is_taken_away(server: Running, folder: Path) -> None:
    shutil.rmtree(folder)
    body = {"model": "tiny", "prompt": TOKENS, "return_token_ids": True, "max_tokens": 1}
    server.error("/v1/completions", 500, "internal_error", **body)
    assert server.states(input=TOKENS)["shape"][0] == 5
    folder.mkdir()
    assert read(ask(server))[0].tolist() == TOKENS


def test_a_folder_that_is_none(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        create_app([tiny_options(tiny_path)], serving(tmp_path / "file"))


def test_states_that_are_no_numbers_are_not_written(tmp_path: Path, folder: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][10] = np.nan
    path = tiny.write(tmp_path / "nan.gguf")
    with running([tiny_options(path)], serving(folder)) as server:
        body = {"model": "tiny", "prompt": [9, 10, 11], "return_token_ids": True, "max_tokens": 1}
        server.error("/v1/completions", 500, "internal_error", **body)
        assert list(folder.iterdir()) == []
        read(ask(server, [9, 11]))


def test_layers_that_the_model_does_not_have(tiny_path: Path, folder: Path) -> None:
    options = ServerOptions(verifier=VerifierOptions(folder=folder, layers=(1, 9)))
    with pytest.raises(lt.InvalidInputError, match=r"-5\.\.4"):
        create_app([tiny_options(tiny_path)], options)
    # Four blocks have no three layers of EAGLE-3's.
    with pytest.raises(lt.InvalidInputError, match="4 blocks"):
        create_app([tiny_options(tiny_path)], ServerOptions(verifier=VerifierOptions(folder=folder)))


def test_several_texts_leave_no_file(server: Running, folder: Path) -> None:
    body = {"model": "tiny", "prompt": [[5], [6]], "return_token_ids": True, "max_tokens": 1}
    assert "one prompt" in server.error("/v1/completions", 400, "invalid_request_error", **body)
    assert "kv_transfer_params" not in ask(server, n=2)
    assert list(folder.iterdir()) == []
