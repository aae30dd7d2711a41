"""``echo``, ``prompt_logprobs`` and ``logit_bias`` of completions, which harnesses score texts with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, nearly
from support.openai_clients import Client, alone, client_of, logprobs_by_hand, spelling
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.serve import ServerOptions
from llamatap.serve.completions.echo import offsets_in, text_of

#: Without blanks, of which the tiny tokenizer makes other characters.
PROMPT = "aé€😀z,upon-a-time"


@pytest.fixture(scope="module")
def served_path(tiny_chat_path: Path) -> Path:
    return tiny_chat_path


def create(client: Client, prompt: Any = PROMPT, **options: Any) -> Any:
    more = options.pop("more", {})
    return client.completions.create(
        model="tiny", prompt=prompt, temperature=0, extra_body={"ignore_eos": True, **more}, **options
    )


def check(model: lt.Model, found: Any, tokens: Sequence[int], n_top: int) -> None:
    """The legacy log-probabilities of a text's first tokens; nothing comes before the first one."""
    rows: list[NDArray[np.float64]] = logprobs_by_hand(model, tokens[:1], tokens[1:])
    assert found.tokens == [spelling(model, token) for token in tokens]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(tokens)
    for token, row, logprob, top in zip(
        tokens[1:], rows, found.token_logprobs[1:], found.top_logprobs[1:], strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row)[:n_top].tolist()
        assert list(top) == [spelling(model, one) for one in (best if token in best else [*best, token])]
        # Harnesses tell the greedy text in this way.
        assert (logprob == max(top.values())) == (token == row.argmax() or n_top == 0)


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("n_top", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(client: Client, tiny_model: lt.Model, max_tokens: int, n_top: int, as_ids: bool) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=max(max_tokens, 1), ignore_eos=True)
    prompt = expected.prompt.tolist()
    tokens = expected.tokens.tolist()[:max_tokens]
    assert prompt[0] == tiny_model.bos_token
    bos = "<s>" if as_ids else ""
    given = prompt if as_ids else PROMPT
    answer = create(client, given, max_tokens=max_tokens, echo=True, logprobs=n_top)
    (choice,) = answer.choices
    text = expected.text if max_tokens else ""
    assert choice.text == bos + PROMPT + text
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), max_tokens)
    check(tiny_model, choice.logprobs, [*prompt, *tokens], n_top)
    # Where each byte's character begins.
    offsets = [0] + [len(bos) + i for i, one in enumerate(PROMPT) for _ in one.encode()]
    assert choice.logprobs.text_offset[: len(prompt)] == offsets
    if tokens:
        assert choice.logprobs.text_offset[len(prompt)] == len(bos + PROMPT)
        without = create(client, given, max_tokens=max_tokens, logprobs=n_top).choices[0].logprobs
        assert choice.logprobs.text_offset[len(prompt) :] == [
            len(bos + PROMPT) + offset for offset in without.text_offset
        ]

    # A stream begins with the prompt.
    first, *chunks = create(client, given, max_tokens=max_tokens, echo=True, logprobs=n_top, stream=True)
    assert first.choices[0].text == bos + PROMPT
    assert len(first.choices[0].logprobs.tokens) == len(prompt)
    assert "".join(one.choices[0].text for one in (first, *chunks)) == choice.text
    pieces = [one.choices[0].logprobs for one in (first, *chunks) if one.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for one in pieces for value in getattr(one, name)] == getattr(choice.logprobs, name)
    assert [one.choices[0].finish_reason for one in (first, *chunks)][-2:] == [None, "length"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_without_log_probabilities(client: Client, tiny_model: lt.Model, max_tokens: int) -> None:
    text = alone(tiny_model, PROMPT, max_tokens=3, ignore_eos=True)[0].text if max_tokens else ""
    (choice,) = create(client, max_tokens=max_tokens, echo=True).choices
    assert (choice.text, choice.logprobs, choice.finish_reason) == (PROMPT + text, None, "length")
    chunks = [one.choices[0] for one in create(client, max_tokens=max_tokens, echo=True, stream=True)]
    assert chunks[0].text == PROMPT
    assert "".join(one.text for one in chunks) == PROMPT + text
    assert {one.logprobs for one in chunks} == {None}
    # Ids that end in the middle of a character, and begin there.
    data = b"\x85z\xe2"
    (choice,) = create(client, [byte + 3 for byte in data], max_tokens=max_tokens, echo=True).choices
    assert choice.text.startswith("\ufffdz\ufffd")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_several_texts_of_several_prompts(client: Client, tiny_model: lt.Model, stream: bool) -> None:
    prompts = ["one", "and a longer one", "3"]
    expected = [one for one in alone(tiny_model, prompts, max_tokens=3, ignore_eos=True) for _ in range(2)]
    options: dict[str, Any] = {"n": 2, "max_tokens": 3, "echo": True, "logprobs": 1, "stream": stream}
    options["more"] = {"return_token_ids": True}
    found = create(client, prompts, **options)
    texts = [""] * 6
    tokens: list[list[str]] = [[] for _ in range(6)]
    ids: list[list[int]] = [[] for _ in range(6)]
    for choice in [chunk.choices[0] for chunk in found] if stream else cast("list[Any]", found.choices):
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens
        if not texts[choice.index]:
            assert choice.prompt_token_ids == expected[choice.index].prompt.tolist()
        texts[choice.index] += choice.text
        ids[choice.index] += choice.token_ids
    for index, one in enumerate(expected):
        assert texts[index] == prompts[index // 2] + one.text
        every = [*one.prompt.tolist(), *one.tokens.tolist()]
        assert tokens[index] == [spelling(tiny_model, token) for token in every]
        # Log-probabilities of the generated tokens.
        assert ids[index] == one.tokens.tolist()


def test_prompt_logprobs_of_completions(server: Running, tiny_model: lt.Model) -> None:
    """``prompt_logprobs`` have vLLM's form."""
    prompts = [tiny_model.tokenize(one).tolist() for one in (PROMPT, "short")]
    answer = server.post(
        "/v1/completions", model="tiny", prompt=prompts, max_tokens=2, prompt_logprobs=3, temperature=0
    )
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        check_vllm(tiny_model, choice["prompt_logprobs"], prompt, 3)
        assert choice["logprobs"] is None
    # More than one of the two, and without a text.
    answer = server.post(
        "/v1/completions",
        model="tiny",
        prompt=prompts[0],
        max_tokens=0,
        prompt_logprobs=4,
        echo=True,
        logprobs=1,
    )
    (choice,) = answer["choices"]
    check_vllm(tiny_model, choice["prompt_logprobs"], prompts[0], 4)
    assert {len(one) for one in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    answer = server.post(
        "/v1/completions",
        model="tiny",
        prompt=prompts[0],
        max_tokens=1,
        prompt_logprobs=1,
        echo=True,
        logprobs=4,
    )
    check_vllm(tiny_model, answer["choices"][0]["prompt_logprobs"], prompts[0], 1)
    assert {len(one) for one in answer["choices"][0]["logprobs"]["top_logprobs"][1:]} <= {4, 5}
    assert choice["text"] == "<s>" + PROMPT
    answer = server.post("/v1/completions", model="tiny", prompt=prompts[0], max_tokens=0, prompt_logprobs=0)
    assert answer["choices"][0]["text"] == ""
    check_vllm(tiny_model, answer["choices"][0]["prompt_logprobs"], prompts[0], 0)


def check_vllm(model: lt.Model, found: Any, prompt: list[int], n_top: int) -> None:
    first, *others = found
    assert first is None
    rows = logprobs_by_hand(model, prompt[:1], prompt[1:])
    for token, row, one in zip(prompt[1:], rows, others, strict=True):
        best = np.argsort(-row)[:n_top].tolist()
        assert list(one) == [str(id_) for id_ in dict.fromkeys([token, *best])]
        for id_, entry in one.items():
            assert entry["logprob"] == pytest.approx(row[int(id_)], abs=1e-4)
            assert entry["rank"] == (best.index(int(id_)) + 1 if int(id_) in best else None)
            assert entry["decoded_token"] == model.token_bytes(int(id_)).decode(errors="replace")


def test_prompt_logprobs_of_chats(server: Running, tiny_model: lt.Model) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": " and two"}]
    answer = server.post(
        "/v1/chat/completions", model="tiny", messages=messages, max_tokens=2, prompt_logprobs=2, n=2
    )
    check_vllm(tiny_model, answer["prompt_logprobs"], tiny_model.tokenize("one and two").tolist(), 2)
    assert len(answer["choices"]) == 2
    without = server.post("/v1/chat/completions", model="tiny", messages=messages, max_tokens=2)
    assert "prompt_logprobs" not in without


def test_with_hidden_states(server: Running, tiny_model: lt.Model) -> None:
    answer = server.post(
        "/v1/completions",
        model="tiny",
        prompt="one",
        max_tokens=0,
        echo=True,
        logprobs=0,
        return_hidden_states=True,
        layer=-2,
    )
    (choice,) = answer["choices"]
    (rows,) = choice["hidden_states"]
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        assert np.allclose(rows, extractor("one", [-2])[-2], atol=1e-4)
    assert len(choice["logprobs"]["tokens"]) == len(rows)
    answer = server.post(
        "/v1/completions", model="tiny", prompt="one", max_tokens=0, echo=True, return_hidden_states="last"
    )
    assert answer["choices"][0]["hidden_states"] is None


@pytest.mark.parametrize("chat", [False, True])
def test_refusals(server: Running, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"model": "tiny"}
    body |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}

    def refused(**more: Any) -> str:
        return server.error(path, 400, "invalid_request_error", **body, **more)

    said = refused(prompt_logprobs=1, stream=True)
    assert "prompt_logprobs cannot be combined with stream" in said
    assert ("echo" in said) is not chat
    assert "max_tokens" in refused(max_tokens=0)
    if not chat:
        assert "echo or prompt_logprobs" in refused(max_tokens=0, logprobs=1)
    found = server.client.post(
        path,
        content=b'{"model": "tiny", "prompt": "a", "messages": [], "logit_bias": {"5": NaN}}',
        headers={"Content-Type": "application/json"},
    )
    assert found.status_code == 400


@pytest.mark.slow
def test_a_prompt_that_fills_the_context(client: Client, tiny_model: lt.Model, server: Running) -> None:
    most = server.worker.limits.text
    (choice,) = create(client, [5] * most, max_tokens=0, echo=True, logprobs=0).choices
    assert len(choice.logprobs.tokens) == most
    # lm-eval's request; the last token needs no position.
    (choice,) = create(client, [5] * most, max_tokens=1, echo=True, logprobs=0).choices
    assert len(choice.logprobs.tokens) == most + 1
    with pytest.raises(openai.BadRequestError, match=str(most)):
        create(client, [5] * (most + 1), max_tokens=0, echo=True)


def test_memory_for_log_probabilities_is_bounded(tiny_chat_path: Path) -> None:
    """They count as states do: what could never fit is refused before anything is computed."""
    limits = ServerOptions(max_pending_bytes=400 * 21 * 100)
    with running([tiny_options(tiny_chat_path)], limits) as server, client_of(server) as client:
        assert len(create(client, [5] * 100, max_tokens=0, echo=True, logprobs=20).choices) == 1
        with pytest.raises(openai.APIStatusError, match="log-probabilities") as raised:
            create(client, [5] * 101, max_tokens=0, echo=True, logprobs=20)
        assert raised.value.status_code == 413
        # The memory was given back.
        assert server.state.budget.free == server.state.budget.total


def test_drafters_change_nothing(
    tiny_chat_path: Path, tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path
) -> None:
    bias = {"100": 2.0, "7": -100.0}
    options: dict[str, Any] = {"max_tokens": 20, "echo": True, "logprobs": 2, "logit_bias": bias}
    expected = alone(
        tiny_model, "abcabcabc", max_tokens=20, ignore_eos=True, logit_bias={100: 2.0, 7: -100.0}
    )[0]
    for drafter in ("ngram", str(nearly(tiny, tmp_path / "near.gguf", noise=0.02))):
        with (
            running([tiny_options(tiny_chat_path, context=EXACT, drafter=drafter, n_max=3)]) as server,
            client_of(server) as client,
        ):
            (choice,) = create(client, "abcabcabc", **options).choices
            assert choice.text == "abcabcabc" + expected.text
            check(tiny_model, choice.logprobs, [*expected.prompt.tolist(), *expected.tokens.tolist()], 2)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logit_bias(server: Running, tiny_model: lt.Model, temperature: float) -> None:
    bias = {5: 100.0, 6: -100.0, 200: 3, 0: 0}
    given = {str(token): value for token, value in bias.items()}
    messages = [{"role": "user", "content": PROMPT}]
    for less in ({}, {5: 0.0}):
        (expected,) = alone(
            tiny_model,
            PROMPT,
            max_tokens=9,
            seed=3,
            temperature=temperature,
            ignore_eos=True,
            logit_bias={**bias, **less},
        )
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 9,
            "seed": 3,
            "temperature": temperature,
            "ignore_eos": True,
            "return_token_ids": True,
            "logit_bias": {**given, **{str(token): value for token, value in less.items()}},
        }
        for path, more in (
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            (choice,) = server.post(path, **body, **more)["choices"]
            assert choice["token_ids"] == expected.tokens.tolist()
        if not less:
            assert expected.tokens.tolist() == [5] * 9


class Odd:
    """A tokenizer whose tokens are these bytes, of which the first may be a BOS."""

    bos_token: int | None = 0

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        # A blank before the text, as SentencePiece adds it.
        ((b"<s>", b" Once", b" upon"), "Once upon", [0, 0, 4]),
        # The text occurs inside the BOS as well.
        ((b"<s>", b" s"), "s", [0, 0]),
        # The text brings its own BOS.
        ((b"<s>", b"a", b"b"), "<s>ab", [0, 3, 4]),
        # The tokenizer also adds an EOS.
        ((b"<s>", b"a", b"b", b"</s>"), "ab", [0, 0, 1, 2]),
        # Tokens that cross characters, and a character of three tokens.
        ((b"<s>", b"a\xc3", b"\xa9b", b"\xe2", b"\x82", b"\xac", b"!"), "aéb€!", [0, 0, 1, 3, 3, 3, 4]),
        # A tokenizer that changes texts: never beyond the text.
        ((b"<s>", b"abc", b"def", b"ghi"), "ABCDE", [0, 0, 3, 5]),
    ],
)
def test_offsets_with_odd_tokenizers(pieces: tuple[bytes, ...], text: str, offsets: list[int]) -> None:
    model = cast("lt.Model", Odd(*pieces))
    assert offsets_in(model, text, range(len(pieces))) == offsets
    assert text_of(model, text) == text


def test_offsets_of_a_real_tokenizer(smollm2: lt.Model) -> None:
    text = "<|im_start|>user\nCafé déjà vu — 123 😊<|im_end|>\n<|im_start|>assistant\n"
    tokens = smollm2.tokenize(text).tolist()
    begins = np.cumsum([0, *(len(smollm2.token_bytes(token)) for token in tokens)])[:-1].tolist()
    # Characters that are whole before it.
    expected = [len(text.encode()[:begin].decode(errors="ignore")) for begin in begins]
    assert offsets_in(smollm2, text, tokens) == expected
    assert offsets_in(smollm2, tokens, tokens) == expected
    assert text_of(smollm2, tokens) == text
