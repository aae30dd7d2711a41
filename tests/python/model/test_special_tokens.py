"""BOS and EOS of a text: each exactly once where the file adds it, whoever writes it (case 54)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.numerics import EXACT, relative
from support.servers import running, tiny_options
from support.tiny import TinyLlama

import llamatap as lt
from reference import decoder

BOS, EOS = 1, 2
#: Writes both by itself, as templates of embedding models do.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"

#: Whether the file adds BOS, and whether EOS.
Adds = tuple[bool, bool]


def ids(text: str) -> list[int]:
    """Token ids of a text of plain bytes."""
    return [byte + 3 for byte in text.encode()]


@pytest.fixture(params=[(True, False), (False, True), (True, True), (False, False)], scope="module")
def adds(request: pytest.FixtureRequest) -> Adds:
    found: Adds = request.param
    return found


@pytest.fixture(scope="module")
def path(adds: Adds, tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("adds") / "tiny.gguf"
    return tiny.write(target, add_bos=adds[0], add_eos=adds[1], chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[lt.Model]:
    with lt.Model(path) as model:
        yield model


def framed(text: str, adds: Adds) -> list[int]:
    return [*[BOS] * adds[0], *ids(text), *[EOS] * adds[1]]


def test_each_once_in_texts(model: lt.Model, adds: Adds) -> None:
    bos, eos = adds
    assert model.tokenize("abc").tolist() == framed("abc", adds)
    assert model.tokenize("<s>abc").tolist() == [BOS, *ids("abc"), *[EOS] * eos]
    assert model.tokenize("abc</s>").tolist() == [*[BOS] * bos, *ids("abc"), EOS]
    assert model.tokenize("<s>abc</s>").tolist() == [BOS, *ids("abc"), EOS]
    assert model.tokenize("</s>").tolist() == [*[BOS] * bos, EOS]
    assert model.tokenize("<s>").tolist() == [BOS, *[EOS] * eos]
    # A special token written twice in the text stays twice.
    assert model.tokenize("<s><s>a</s></s>").tolist() == [BOS, BOS, *ids("a"), EOS, EOS]
    assert model.tokenize("abc</s>", add_special=False).tolist() == [*ids("abc"), EOS]
    assert model.tokenize("").tolist() == [*[BOS] * bos, *[EOS] * eos]
    assert model.tokenize("</s>", parse_special=False).tolist() == framed("</s>", adds)
    assert model.added_tokens == (BOS if bos else None, EOS if eos else None)


def test_each_once_in_chats(model: lt.Model, adds: Adds) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(chat) == "<s>Hi</s>"
    assert model.tokenize(model.apply_chat_template(chat)).tolist() == [BOS, *ids("Hi"), EOS]
    bare = model.apply_chat_template(chat, template="{{ messages[0].content }}")
    assert model.tokenize(bare).tolist() == framed("Hi", adds)


@pytest.mark.parametrize("text", ["abc", "<s>abc", "abc</s>", "<s>abc</s>"])
def test_each_once_in_embeddings(model: lt.Model, tiny: TinyLlama, adds: Adds, text: str) -> None:
    """``pool="last"`` is the row of EOS, as NumPy computes it for one of each."""
    bos, eos = adds[0] or "<s>" in text, adds[1] or "</s>" in text
    expected = np.array([*[BOS] * bos, *ids("abc"), *[EOS] * eos], np.int32)
    states, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(expected))
    with lt.Extractor(model, **EXACT) as extractor:
        rows = extractor(text, ["norm", -1])
        last = extractor([text, text * 2], ["norm", -1], pool="last")[0]
    assert rows.tokens.tolist() == expected.tolist()
    assert relative(last.array[0], normed[-1]) < 1e-5
    assert relative(last.array[1], states[-1][-1]) < 1e-5
    assert relative(rows["norm"][-1], last.array[0]) < 1e-5


def test_each_once_at_the_server(path: Path, adds: Adds) -> None:
    with running([tiny_options(path)]) as server:
        for text in ("abc", "<s>abc</s>"):
            answer = server.states(input=text, return_tokens=True)
            expected = framed("abc", adds) if text == "abc" else [BOS, *ids("abc"), EOS]
            assert answer["token_ids"] == expected
            pooled = server.states(input=text, pooling="last")
            assert relative(np.array(pooled["hidden_states"]), np.array(answer["hidden_states"])[-1]) < 1e-5


def test_a_text_that_is_cut_keeps_the_eos_that_is_added(model: lt.Model, path: Path, adds: Adds) -> None:
    """transformers' tokenizers do so; without it an embedding would be read from another token."""
    bos, eos = adds
    with lt.Extractor(model, **EXACT) as extractor:

        def cut(prompt: str | list[int], most: int) -> list[int]:
            tokens: list[int] = extractor(prompt, [-1], max_length=most).tokens.tolist()
            return tokens

        whole = framed("abcdefgh", adds)
        for most in range(1, len(whole) + 2):
            kept = eos and most > 1 + bos
            expected = [*whole[: most - 1], EOS] if kept and most < len(whole) else whole[:most]
            assert cut("abcdefgh", most) == expected, most
        # Token ids are not changed, and a text may end in an EOS of its own.
        assert cut(whole, 5) == whole[:5]
        assert cut("abcdefgh</s>", 5) == ([*framed("abcdefgh", adds)[:4], EOS] if eos else whole[:5])
    with running([tiny_options(path)]) as server:
        answer = server.states(input="abcdefgh", max_length=5, return_tokens=True)
        assert answer["token_ids"] == ([*whole[:4], EOS] if eos else whole[:5])
        assert answer["truncated"]


def test_a_token_that_both_begins_and_ends(tmp_path: Path, tiny: TinyLlama) -> None:
    """GPT-2's: what is added in front is not taken for the text's end."""

    class OneForBoth(TinyLlama):
        def add_keys(self, writer: gguf.GGUFWriter) -> None:
            writer.add_eot_token_id(BOS)

    path = OneForBoth().write(tmp_path / "both.gguf", add_eos=True)
    data = path.read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + BOS.to_bytes(4, "little") + data[at + 4 :])
    with lt.Model(path) as model:
        assert model.eos_token == model.bos_token == BOS
        assert model.tokenize("ab").tolist() == [BOS, *ids("ab"), BOS]
        assert model.tokenize("<s>ab<s>").tolist() == [BOS, *ids("ab"), BOS]
        assert model.tokenize("<s>").tolist() == [BOS, BOS]
        assert model.tokenize("").tolist() == [BOS, BOS]


def test_cls_and_sep_of_bert(tmp_path: Path) -> None:
    """Its tokenizer adds both always, and calls the second neither EOS nor added."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "▁b"]
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 2, 3, 3, 1, 1])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with lt.Model(tmp_path / "bert.gguf", vocab_only=True) as model:
        assert model.added_tokens == (2, 3)
        for text in ("a b", "[CLS]a b", "a b[SEP]", "[CLS]a b[SEP]"):
            assert model.tokenize(text).tolist() == [2, 4, 5, 3], text
        assert model.tokenize("a[SEP]b").tolist() == [2, 4, 3, 5, 3]
