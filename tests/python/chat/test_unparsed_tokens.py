"""Control tokens that a converter marked as normal (case 47, unsloth#5070)."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.paths import ENGINE_MODELS

import llamatap as lt
from llamatap.__main__ import main
from llamatap.chat.unparsed_tokens import _pieces, find_unparsed
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.rows_to_samples import Preparer, prepare

VOCABULARIES = ENGINE_MODELS
TEMPLATES = sorted((VOCABULARIES / "templates").glob("*.jinja"))

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT = [*HI, {"role": "assistant", "content": "Yo"}]
SAYS = (
    "the template writes <|im_start|>, token 1, which this file does not mark as a control token, so it is "
    "not parsed; "
)


def write(path: Path, source: Path, normal: Sequence[int]) -> Path:
    """A copy of a model file with some of its tokens marked as normal. (Readers in Python take a minute for
    the vocabularies here.)"""
    data = bytearray(source.read_bytes())
    key = b"tokenizer.ggml.token_type"
    start = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    kind, item, count = struct.unpack_from("<IIQ", data, start)
    assert (kind, item) == (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    types = np.frombuffer(data, np.int32, count, start + 16)
    assert set(types[list(normal)]) <= {gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED}
    types[list(normal)] = gguf.TokenType.NORMAL
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def broken_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's vocabulary; <|im_start|> (1) and <|im_end|> (2) are NORMAL. The engine mends the latter."""
    return write(tmp_path_factory.mktemp("normal") / "normal.gguf", smollm2_path, (1, 2))


@pytest.fixture
def broken(broken_path: Path) -> Iterator[lt.Model]:
    with lt.Model(broken_path, vocab_only=True) as model:
        yield model


def test_a_chat_that_is_split_warns_once_a_model(
    broken: lt.Model, smollm2: lt.Model, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "llamatap")
    text = broken.apply_chat_template(HI)
    assert text == smollm2.apply_chat_template(HI)
    assert (len(smollm2.tokenize(text)), len(broken.tokenize(text))) == (31, 49)
    broken.apply_chat_template(CHAT)
    broken.apply_chat_template(HI, template="<|im_start|>")
    told = [record.getMessage() for record in caplog.records if "the template writes" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"normal.gguf: {SAYS}")
    assert broken.unparsed_tokens() == {"<|im_start|>": 1}
    assert smollm2.unparsed_tokens() == {}


def test_only_what_the_template_writes_itself(broken: lt.Model) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    assert broken.unparsed_tokens(plain) == {}
    quoting = [{"role": "user", "content": "<|im_start|>"}, *CHAT[1:]]
    preparer = Preparer(broken, DatasetOptions(max_length=4096, template=plain))
    assert len(preparer({"messages": quoting})[0])
    # The token stands in one branch of several.
    tools = "{{ messages[0].content }}{% if tools %}<|im_start|>tools{% endif %}"
    assert broken.unparsed_tokens(tools) == {"<|im_start|>": 1}
    assert broken.unparsed_tokens("{{ 1 / 0 }}") == {}
    assert broken.unparsed_tokens("{% if %}") == {}


class Vocabulary:
    """A vocabulary that has no such token, and counts what is looked up."""

    def __init__(self) -> None:
        self.asked = 0

    def find_tokens(self, texts: Sequence[str]) -> list[None]:
        self.asked += len(texts)
        return [None] * len(texts)


def test_rulers_and_long_texts_cost_little() -> None:
    """The cost grows with the text, not with all pairs of marks in a word."""
    assert list(_pieces("-" * 100_000)) == []
    assert list(_pieces("-" * 100_000 + "x")) == []
    # One letter far behind, within reach of the last marks alone: 63 pairs at most from each of them.
    assert len(list(_pieces("-" * 100_000 + "x" + "-" * 100_000))) == 62 * 63 // 2
    assert max(map(len, _pieces("-" * 100 + "x" + "-" * 100))) == 64
    word = "-a" * 20_000
    assert len(list(_pieces(word))) < 32 * 20_000
    vocabulary: Any = Vocabulary()
    words = " ".join(f"<{number}|{number}>" * 9 for number in range(20_000))
    assert find_unparsed(vocabulary, [word, words, words]) == {}
    assert vocabulary.asked <= 1 << 16


def test_all_pieces_of_a_word_are_there() -> None:
    rng = np.random.default_rng(47)
    for _ in range(200):
        word = "".join(rng.choice(list("<|_>-xy\u00e97"), rng.integers(0, 90)))
        marks = [index for index, letter in enumerate(word) if letter in "<|_>-"]
        pairs = [word[a : b + 1] for a in marks for b in marks if a < b < a + 64]
        assert list(_pieces(word)) == [piece for piece in pairs if any(map(str.isalnum, piece))]


def test_a_ruler_and_lone_surrogates_in_a_template(broken: lt.Model) -> None:
    assert broken.unparsed_tokens("{{ '-' * 60000 }}<|im_start|>") == {"<|im_start|>": 1}
    assert broken.unparsed_tokens("{{ '.\\ud83d.a.' }}<|im_start|>") == {"<|im_start|>": 1}
    assert broken.unparsed_tokens(".\ud83da.<|im_start|>") == {"<|im_start|>": 1}


@pytest.mark.parametrize("rows", [[{"messages": CHAT}], [{"input_ids": [5, 6]}, {"messages": CHAT}]])
@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_a_data_set_is_refused(broken: lt.Model, rows: list[Any], on_error: str) -> None:
    """The whole data set is refused, since none of its chats can be used."""
    skipped: list[int] = []
    with pytest.raises(lt.UnsupportedError, match=rf"{SAYS}.*input_ids".replace("|", r"\|")):
        prepare(broken, rows, DatasetOptions(max_length=4096), lambda row, error: skipped.append(row))
    assert skipped == []
    found = prepare(
        broken, [*rows[:-1], {"text": "hi"}], DatasetOptions(max_length=4096, min_tokens=1), lambda *_: None
    )
    assert len(found.samples) == len(rows)


def test_the_commands_tell(broken_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(broken_path)
    assert main(["info", model]) == 0
    told = capsys.readouterr().out
    assert f"WARNING  {SAYS}" in told
    assert main(["info", "--json", model]) == 0
    assert json.loads(capsys.readouterr().out)["unparsed_tokens"] == {"<|im_start|>": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert main(["dataset", model, str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"llamatap: {SAYS}")
    assert not (tmp_path / "out" / "hidden_states").exists()


@pytest.mark.slow
def test_a_file_that_is_fine_says_nothing(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_path)]) == 0
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.sampled(19)
@pytest.mark.skipif(not TEMPLATES, reason="the vocabularies are not there; `make test` fetches them")
@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("*.gguf")), ids=lambda path: str(path.stem))
def test_no_false_alarms(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No vocabulary of a real model has such tokens, with its own template or with another model's."""
    caplog.set_level(logging.WARNING, "llamatap")
    try:
        model = lt.Model(path, vocab_only=True)
    except lt.ModelLoadError as error:
        pytest.skip(str(error))
    with model:
        assert model.unparsed_tokens() == {}
        # Every sixth template: as many as stay compiled.
        for template in TEMPLATES[::6]:
            assert model.unparsed_tokens(template.read_text("utf-8")) == {}, template.stem
    assert not [record for record in caplog.records if "the template writes" in record.getMessage()]


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATES, reason="the vocabularies are not there; `make test` fetches them")
@pytest.mark.parametrize(
    ("vocabulary", "template", "spelled"),
    [
        ("qwen2", "Qwen-Qwen3-0.6B", ["<|im_start|>"]),
        ("phi-3", "microsoft-Phi-3.5-mini-instruct", ["<|user|>", "<|assistant|>"]),
        ("gemma-4", "google-gemma-4-31B-it", ["<|turn>"]),
        ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", ["<|start_header_id|>", "<|end_header_id|>"]),
        ("command-r", "CohereForAI-c4ai-command-r-plus-tool_use", ["<|START_OF_TURN_TOKEN|>"]),
    ],
)
def test_tokens_of_other_tokenizers(
    vocabulary: str, template: str, spelled: list[str], tmp_path: Path
) -> None:
    source = VOCABULARIES / f"ggml-vocab-{vocabulary}.gguf"
    with lt.Model(source, vocab_only=True) as model:
        ids = [model.tokenize(text, add_special=False).tolist() for text in spelled]
    path = write(tmp_path / "normal.gguf", source, [token for (token,) in ids])
    text = (VOCABULARIES / "templates" / f"{template}.jinja").read_text("utf-8")
    with lt.Model(path, vocab_only=True) as model:
        found = model.unparsed_tokens(text)
    assert found == {name: token for name, (token,) in zip(spelled, ids, strict=True)}
