"""Files of states that completions leave for a trainer: content, lock, and requests that leave none."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  safetensors reads bfloat16 with it
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import computes_with_nan, relative
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama
from support.tiny_models.drafters import write_eagle3
from support.verifier_files import LAYERS, TOKENS, ask, is_held, named, paused_writing, read, serving

import llamatap as lt
from llamatap.serve import ServerOptions, VerifierOptions, create_app
from reference import decoder


def oracle(tiny: TinyLlama, tokens: list[int]) -> NDArray[np.float64]:
    """vLLM's layers, and H_n as the last: none of them normed."""
    streams, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))
    return np.stack([streams[k] for k in (*LAYERS, tiny.n_layer)], 1)


def test_a_file_holds_the_prompts_states(
    server: Running, folder: Path, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set for a moment, it would hold for files that other threads make.
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was set"))
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
    (folder / "another").touch()
    assert path.stat().st_mode == (folder / "another").stat().st_mode


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


def test_the_lock_is_held_until_the_file_is_whole_and_there_with_it(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, proceed = paused_writing(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server)
        assert begun.wait(20)
        (path,) = folder.iterdir()
        assert path.suffix == ".lock"
        assert is_held(path)
        proceed.set()
        assert Path(f"{named(answer.result())}.lock") == path
    assert path.exists()
    assert not is_held(path)
    assert read(answer.result())[0].tolist() == TOKENS


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


@computes_with_nan
def test_states_that_are_no_numbers_are_not_written(tmp_path: Path, folder: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][10] = np.nan
    path = tiny.write(tmp_path / "nan.gguf")
    with running([tiny_options(path)], serving(folder)) as server:
        body = {"model": "tiny", "prompt": [9, 10, 11], "return_token_ids": True, "max_tokens": 1}
        assert "NaN" in server.error("/v1/completions", 422, "model_error", **body)
        assert list(folder.iterdir()) == []
        read(ask(server, [9, 11]))


@computes_with_nan
def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["output.weight"][10] = np.nan
    path = tiny.write(tmp_path / "nan.gguf")
    with running([tiny_options(path)]) as server:
        body = {"model": "tiny", "prompt": TOKENS, "max_tokens": 1}
        assert "NaN" in server.error("/v1/completions", 422, "model_error", **body)
    with lt.Model(path) as model, pytest.raises(lt.NotFiniteError):
        next(lt.generate(model, [TOKENS], max_tokens=1))


def test_states_beyond_the_files_dtype(tmp_path: Path, folder: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["blk.2.ffn_down.weight"] *= 1e6
    path = tiny.write(tmp_path / "large.gguf")
    body = {"model": "tiny", "prompt": TOKENS, "return_token_ids": True, "max_tokens": 1}
    with running([tiny_options(path)], serving(folder, dtype="float16")) as server:
        message = server.error("/v1/completions", 422, "model_error", **body)
        assert "[3, 4]" in message
        assert "float16" in message
        assert "65504" in message
        assert list(folder.iterdir()) == []
    with running([tiny_options(path)], serving(folder, dtype="bfloat16")) as server:
        states = read(ask(server))[1].astype(np.float32)
        assert np.isfinite(states).all()
        assert np.abs(states).max() > 65504


@pytest.mark.parametrize("layers", [(1, 9), ("norm",), (-1,)])
def test_layers_that_vllm_would_not_know(tiny_path: Path, folder: Path, layers: tuple[Any, ...]) -> None:
    options = ServerOptions(verifier=VerifierOptions(folder=folder, layers=layers))
    with pytest.raises(
        lt.InvalidInputError,
        match=r"the verifier's layers must be ids as vLLM counts them: .*(0\.\.4|range\(5\))",
    ):
        create_app([tiny_options(tiny_path)], options)


def test_a_model_without_the_usual_layers(tiny_path: Path, folder: Path) -> None:
    # Four blocks have no three layers of EAGLE-3's.
    with pytest.raises(lt.InvalidInputError, match="4 blocks"):
        create_app([tiny_options(tiny_path)], ServerOptions(verifier=VerifierOptions(folder=folder)))


def test_several_texts_leave_no_file(server: Running, folder: Path) -> None:
    body = {"model": "tiny", "prompt": [[5], [6]], "return_token_ids": True, "max_tokens": 1}
    assert "one prompt" in server.error("/v1/completions", 400, "invalid_request_error", **body)
    assert "kv_transfer_params" not in ask(server, n=2)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("remembered", [True, False])
def test_the_model_is_hashed_before_the_first_answer(
    remembered: bool, tiny: TinyLlama, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing can be written below a device.
    monkeypatch.setenv("LLAMATAP_CACHE", str(tmp_path / "cache") if remembered else "/dev/null/cache")
    path = tiny.write(tmp_path / "fresh.gguf")
    with running([tiny_options(path)], serving(folder)) as server:
        monkeypatch.setattr(
            "llamatap.storage.file_hashes.compute_sha256", lambda _: pytest.fail("hashed too late")
        )
        assert read(ask(server))[2]["model_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
