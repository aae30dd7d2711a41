"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: the model's own tokenizer, as vLLM gives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Running, running, tiny_options

import llamatap as lt
from llamatap.serve import ServerOptions

TEXT = "<|im_start|>user\nCafé déjà vu — 123 😊<|im_end|>\n"


@pytest.fixture(scope="module")
def server(tiny_path: Path, smollm2_path: Path) -> Iterator[Running]:
    smollm2 = tiny_options(smollm2_path, name="smollm2", n_ctx=512, parallel=2)
    with running([tiny_options(tiny_path), smollm2]) as found:
        yield found


def test_a_text_and_back(server: Running, smollm2: lt.Model) -> None:
    tokens = smollm2.tokenize(TEXT).tolist()
    found = server.post("/tokenize", model="smollm2", prompt=TEXT)
    assert found == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    assert server.post("/detokenize", model="smollm2", tokens=tokens) == {"prompt": TEXT}
    # One token, as it is in the vocabulary, not the characters that it is written with.
    assert found["tokens"][0] == smollm2.bos_token
    texts = server.post("/tokenize", model="smollm2", prompt="Hello<|im_end|>", return_token_strs=True)
    assert texts["token_strs"] == ["Hello", "<|im_end|>"]


def test_special_tokens_are_added_unless_told_not_to(server: Running, tiny_model: lt.Model) -> None:
    bos = tiny_model.bos_token
    assert server.post("/tokenize", model="tiny", prompt="ab")["tokens"] == [bos, 100, 101]
    bare = server.post("/tokenize", model="tiny", prompt="ab", add_special_tokens=False)
    assert (bare["tokens"], bare["count"]) == ([100, 101], 2)
    assert server.post("/tokenize", model="tiny", prompt="", add_special_tokens=False)["tokens"] == []
    assert server.post("/detokenize", model="tiny", tokens=[bos, 100, 101])["prompt"] == "<s>ab"
    assert server.post("/detokenize", model="tiny", tokens=[])["prompt"] == ""


def test_what_a_tokenizer_is(server: Running, smollm2: lt.Model) -> None:
    found = server.client.get("/tokenizer_info", params={"model": "smollm2"}).json()
    assert found == {
        "tokenizer_class": "gpt2",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": smollm2.chat_template,
    }


def test_a_model_must_be_named_where_there_are_several(server: Running) -> None:
    assert "tiny, smollm2" in server.error("/tokenize", 400, "invalid_request_error", prompt="a")
    assert server.client.get("/tokenizer_info").status_code == 400
    server.error("/detokenize", 404, "model_not_found", model="other", tokens=[5])


def test_the_only_model_need_not_be_named(tiny_path: Path) -> None:
    with running([tiny_options(tiny_path)], ServerOptions(max_length=8)) as server:
        assert server.post("/tokenize", prompt="ab")["count"] == 3
        assert server.post("/detokenize", tokens=[100])["prompt"] == "a"
        assert server.client.get("/tokenizer_info").json()["eos_token"] == "</s>"
        # A text that could never be used is refused at once.
        message = server.error("/tokenize", 400, "invalid_request_error", prompt="x" * (2**16 + 1))
        assert "65537 characters" in message


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [259]}, "259"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_wrong_requests(server: Running, path: str, body: dict[str, Any], words: str) -> None:
    assert words in server.error(path, 400, "invalid_request_error", model="tiny", **body)


def test_a_file_without_a_tokenizer(tiny: Any, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "none.gguf", tokenizer=False)
    with running([tiny_options(path)]) as server:
        server.error("/tokenize", 422, "model_error", prompt="a")
        server.error("/detokenize", 422, "model_error", tokens=[5])
        found = server.client.get("/tokenizer_info")
        assert found.status_code == 200
        assert found.json()["bos_token"] is None
