"""``/v1/completions`` as OpenAI's own client uses it: the texts are those of lt.generate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.generation import EXACT, nearly, scripted
from support.numerics import relative
from support.openai_clients import Client, alone, async_client, client_of, logprobs_by_hand, spelling
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama
from support.tiny_models import drafters

import llamatap as lt

PROMPT = "Once upon a time"

#: A request's fields beyond OpenAI's own, and the same for lt.generate.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}),
    ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    ({"seed": 2**32 - 2, "top_p": 0.6}, {"temperature": 1.0, "seed": 2**32 - 2, "top_p": 0.6}),
    ({"seed": 1, "extra_body": {"top_k": 5}}, {"temperature": 1.0, "seed": 1, "top_k": 5}),
    ({"seed": 1, "extra_body": {"min_p": 0.3}}, {"temperature": 1.0, "seed": 1, "min_p": 0.3}),
    ({"seed": 1, "extra_body": {"top_k": -1}}, {"temperature": 1.0, "seed": 1}),
    (
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    ),
    ({"temperature": 0, "extra_body": {"repetition_penalty": 1.4}}, {"repeat_penalty": 1.4}),
]


#: Bytes that are all different, as a script needs them.
SCRIPT = "aé€😀z|end"


@pytest.fixture(scope="module")
def script_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = [byte + 3 for byte in SCRIPT.encode()]
    return scripted([*tokens, 2]).write(tmp_path_factory.mktemp("script") / "script.gguf")


@pytest.fixture(scope="module")
def script(script_path: Path) -> Iterator[Client]:
    """A client of a server whose model goes on after "a" with the rest of the script, and ends."""
    with running([tiny_options(script_path, context=EXACT)]) as server, client_of(server) as found:
        yield found


def create(client: Client, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **options)


def joined(chunks: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize(("request_", "options"), SAMPLING)
def test_the_text_is_that_of_generate(
    client: Client, tiny_model: lt.Model, request_: dict[str, Any], options: dict[str, Any]
) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=24, **options)
    for _ in range(2):
        answer = create(client, max_tokens=24, **request_)
        (choice,) = answer.choices
        assert choice.text == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert choice.logprobs is None
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == len(expected.prompt) + len(expected.tokens)

    chunks = list(create(client, max_tokens=24, stream=True, **request_))
    assert joined(chunks) == {0: expected.text}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, expected.finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


def test_each_of_these_options_matters(tiny_model: lt.Model) -> None:
    texts = {alone(tiny_model, PROMPT, max_tokens=24, **options)[0].text for _, options in SAMPLING}
    assert len(texts) == len(SAMPLING)


def test_the_async_client(server: Running, tiny_model: lt.Model) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=16)

    async def both() -> tuple[Any, list[Any]]:
        async with async_client(server) as client:
            whole = await create(client, temperature=0)
            stream = await create(client, temperature=0, stream=True)
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(both())
    # Without max_tokens, OpenAI's default.
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].text == expected.text
    assert joined(chunks) == {0: expected.text}


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_of_several_prompts(client: Client, tiny_model: lt.Model, stream: bool) -> None:
    prompts = ["first", "the second one", "3"]
    expected = alone(
        tiny_model, [one for one in prompts for _ in range(3)], max_tokens=12, temperature=1.0, seed=11
    )
    assert len({one.text for one in expected}) == 9
    options: dict[str, Any] = {"n": 3, "max_tokens": 12, "seed": 11, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    found = create(client, prompts, **options)
    if stream:
        chunks = list(found)
        assert joined(chunks) == {i: one.text for i, one in enumerate(expected)}
        usage = chunks[-1].usage
    else:
        assert [(one.index, one.text) for one in found.choices] == [
            (i, one.text) for i, one in enumerate(expected)
        ]
        usage = found.usage
    # A prompt counts once.
    assert usage.prompt_tokens == sum(len(tiny_model.tokenize(one)) for one in prompts)
    assert usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_prompts_are_text_or_ids_or_lists(client: Client, tiny_model: lt.Model) -> None:
    texts = [PROMPT, "another"]
    ids = [tiny_model.tokenize(one).tolist() for one in texts]
    expected = [one.text for one in alone(tiny_model, texts, max_tokens=8)]
    for prompts in (texts, ids):
        both = create(client, prompts, max_tokens=8, temperature=0).choices
        assert [one.text for one in both] == expected
        (one,) = create(client, prompts[1], max_tokens=8, temperature=0).choices
        assert one.text == expected[1]
        (one,) = create(client, [prompts[0]], max_tokens=8, temperature=0).choices
        assert one.text == expected[0]


def test_seeds(client: Client) -> None:
    def text(**options: Any) -> str:
        return str(create(client, max_tokens=24, **options).choices[0].text)

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()
    # OpenAI's are any of 64 bits.
    assert text(seed=-5) == text(seed=-5) != text(seed=2**63 - 1)


def test_usage_of_a_stream(client: Client) -> None:
    *chunks, last = create(
        client, max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == create(client, max_tokens=5, temperature=0).usage
    without = list(create(client, max_tokens=5, stream=True, stream_options={"include_usage": False}))
    assert without[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        create(client, stream_options={"include_usage": True})


def test_characters_of_several_tokens_come_whole(script: Client) -> None:
    (choice,) = create(script, "a", temperature=0, max_tokens=100).choices
    assert (choice.text, choice.finish_reason) == (SCRIPT[1:], "stop")
    chunks = list(create(script, "a", temperature=0, max_tokens=100, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == [*SCRIPT[1:], ""]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 9, 10])
def test_a_character_that_is_cut(script: Client, script_path: Path, tmp_path: Path, max_tokens: int) -> None:
    expected = SCRIPT.encode()[1 : 1 + max_tokens].decode(errors="replace")
    (choice,) = create(script, "a", temperature=0, max_tokens=max_tokens).choices
    assert (choice.text, choice.finish_reason) == (expected, "length")
    assert joined(create(script, "a", temperature=0, max_tokens=max_tokens, stream=True)) == {0: expected}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "n_tokens"),
    [
        ("|", "é€😀z", 11),
        (["nothing", "😀z"], "é€", 10),
        (["z|x", "z|en"], "é€😀", 13),
        (["€", "é"], "", 2),
        (["d!"], "é€😀z|end", 15),
        ([], "é€😀z|end", 15),
    ],
)
def test_stop_strings(script: Client, stop: Any, text: str, n_tokens: int, stream: bool) -> None:
    options = {"temperature": 0, "max_tokens": 100, "stop": stop}
    if not stream:
        answer = create(script, "a", **options)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "stop")
        assert answer.usage.completion_tokens == n_tokens
        return
    chunks = list(create(script, "a", stream=True, stream_options={"include_usage": True}, **options))
    assert joined(chunks) == {0: text}
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == n_tokens


def test_stop_tokens_and_going_on_after_the_end(script: Client) -> None:
    ids = [ord("z") + 3, ord("e") + 3]
    (choice,) = create(script, "a", temperature=0, extra_body={"stop_token_ids": ids}).choices
    assert (choice.text, choice.finish_reason) == ("é€😀", "stop")
    answer = create(script, "a", temperature=0, max_tokens=20, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (SCRIPT[1:], "length")
    assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(client: Client, tiny_model: lt.Model, count: int) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=12, temperature=1.0, seed=2)
    options: dict[str, Any] = {"max_tokens": 12, "seed": 2, "logprobs": count}
    found = create(client, **options).choices[0].logprobs
    tokens = expected.tokens.tolist()
    spelled = [spelling(tiny_model, token) for token in tokens]
    assert found.tokens == spelled
    by_hand = logprobs_by_hand(tiny_model, expected.prompt.tolist(), tokens)
    rare = 0
    for token, logprob, top, values in zip(
        tokens, found.token_logprobs, found.top_logprobs, by_hand, strict=True
    ):
        assert logprob == pytest.approx(values[token], abs=1e-4)
        best = np.argsort(-values)[:count].tolist()
        rare += token not in best
        # The chosen one is there, whether it was likely or not.
        assert list(top) == [spelling(tiny_model, one) for one in (best if token in best else [*best, token])]
        for one in best:
            assert top[spelling(tiny_model, one)] == pytest.approx(values[one], abs=1e-4)
    assert rare

    streamed = [chunk.choices[0].logprobs for chunk in create(client, stream=True, **options)]
    pieces = [one for one in streamed if one is not None]
    assert all(len(one.tokens) == 1 for one in pieces)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [getattr(one, name)[0] for one in pieces] == getattr(found, name)


def test_of_tokens_with_the_same_text_the_most_likely_is_reported(
    client: Client, tiny_model: lt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=12, temperature=1.0, seed=2)
    monkeypatch.setattr(lt.Model, "token_bytes", lambda _, token: b"%d" % (token // 32))
    found = create(client, max_tokens=12, seed=2, logprobs=20).choices[0].logprobs
    by_hand = logprobs_by_hand(tiny_model, expected.prompt.tolist(), expected.tokens.tolist())
    for top, values in zip(found.top_logprobs, by_hand, strict=True):
        for text, logprob in top.items():
            assert logprob == pytest.approx(values[32 * int(text) :][:32].max(), abs=1e-4)


@pytest.mark.parametrize("stop", [None, "|!", "|end"])
def test_offsets_are_places_in_the_text(script: Client, stop: str | None) -> None:
    # Where each byte's character begins; the end-of-text token is after all of them.
    text = SCRIPT[1:]
    expected = [i for i, character in enumerate(text) for _ in character.encode()]
    if stop != "|end":
        expected.append(len(text))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "logprobs": 0, "stop": stop}
    (choice,) = create(script, "a", **options).choices
    assert choice.text == (text if stop != "|end" else "é€😀z")
    assert choice.logprobs.text_offset == expected
    chunks = list(create(script, "a", stream=True, **options))
    offsets = [one.choices[0].logprobs.text_offset for one in chunks if one.choices[0].logprobs]
    assert [offset for (offset,) in offsets] == expected
    # Bytes that are no text by themselves.
    assert choice.logprobs.tokens[:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2"]


def test_token_ids(client: Client, tiny_model: lt.Model) -> None:
    prompts = ["one", "and two"]
    expected = alone(
        tiny_model, [one for one in prompts for _ in range(2)], max_tokens=9, temperature=1.0, seed=5
    )
    options: dict[str, Any] = {
        "n": 2,
        "max_tokens": 9,
        "seed": 5,
        "extra_body": {"return_token_ids": True},
    }
    for choice, one in zip(create(client, prompts, **options).choices, expected, strict=True):
        assert choice.prompt_token_ids == one.prompt.tolist()
        assert choice.token_ids == one.tokens.tolist()
    ids: list[list[int]] = [[] for _ in expected]
    prompt_ids: list[list[int]] = [[] for _ in expected]
    for chunk in create(client, prompts, stream=True, **options):
        (choice,) = chunk.choices
        # Once, with the first chunk of a choice.
        if not ids[choice.index]:
            prompt_ids[choice.index] = choice.prompt_token_ids
        else:
            assert not hasattr(choice, "prompt_token_ids")
        ids[choice.index] += choice.token_ids
    assert ids == [one.tokens.tolist() for one in expected]
    assert prompt_ids == [one.prompt.tolist() for one in expected]
    assert not hasattr(create(client).choices[0], "token_ids")


def extracted(model: lt.Model, tokens: list[int], layer: lt.LayerId) -> Any:
    with lt.Extractor(model, **EXACT) as extractor:
        return extractor(tokens, layers=[layer])[layer]


@pytest.mark.parametrize(
    ("layer", "own"), [(None, "norm"), (-1, "norm"), (4, "norm"), (-2, 3), (0, 0), (2, 2)]
)
def test_hidden_states(client: Client, tiny_model: lt.Model, layer: int | None, own: lt.LayerId) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=7)
    prompt, tokens = expected.prompt.tolist(), expected.tokens.tolist()
    rows = extracted(tiny_model, [*prompt, *tokens], own)
    more = {} if layer is None else {"layer": layer}
    (choice,) = create(
        client, temperature=0, max_tokens=7, extra_body={"return_hidden_states": True, **more}
    ).choices
    assert choice.text == expected.text
    of_prompt, *of_tokens = choice.hidden_states
    assert np.shape(of_prompt) == (len(prompt), tiny_model.n_embd)
    assert np.shape(of_tokens) == (7, tiny_model.n_embd)
    assert relative(np.array([*of_prompt, *of_tokens]), rows) < 1e-5
    (choice,) = create(
        client, temperature=0, max_tokens=7, extra_body={"return_hidden_states": "last", **more}
    ).choices
    assert np.shape(choice.hidden_states) == (tiny_model.n_embd,)
    assert relative(np.array(choice.hidden_states), rows[-1]) < 1e-5


def test_a_temperature_near_zero_is_zero(client: Client, tiny_model: lt.Model) -> None:
    (expected,) = alone(tiny_model, PROMPT, max_tokens=8)
    for temperature in (1e-45, 9e-6):
        assert create(client, temperature=temperature, max_tokens=8).choices[0].text == expected.text


@pytest.mark.parametrize("states", [True, "last"])
def test_hidden_states_say_what_they_are(server: Running, tiny_model: lt.Model, states: bool | str) -> None:
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        expected = extractor([5, 6], layers=[3]).provenance
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 2,
        "return_hidden_states": states,
    }
    answer = server.post("/v1/completions", layer=-2, **ask)
    assert (answer["layer"], answer["dtype"]) == (-2, "float32")
    for key in ("model_sha256", "layers", "norm", "engine_commit", "file_type", "kv_type"):
        assert answer["provenance"].get(key) == expected.get(key)
    assert answer["provenance"]["layers"] == [3]
    normed = server.post("/v1/completions", **ask)
    assert (normed["layer"], normed["provenance"]["norm"]) == (-1, ["post"])
    assert "provenance" not in server.post("/v1/completions", model="tiny", prompt=[5], max_tokens=2)


def test_hidden_states_of_several_prompts(client: Client, tiny_model: lt.Model) -> None:
    prompts = ["short", "and a longer one"]
    answer = create(client, prompts, temperature=0, max_tokens=4, extra_body={"return_hidden_states": True})
    for choice, one in zip(answer.choices, alone(tiny_model, prompts, max_tokens=4), strict=True):
        of_prompt, *of_tokens = choice.hidden_states
        rows = extracted(tiny_model, [*one.prompt.tolist(), *one.tokens.tolist()], "norm")
        assert relative(np.array([*of_prompt, *of_tokens]), rows) < 1e-5


@pytest.mark.parametrize("states", [True, "last"])
def test_states_with_a_stream_or_several_texts_are_refused(client: Client, states: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="POST /v1/hidden_states") as raised:
        create(client, stream=True, extra_body={"return_hidden_states": states})
    assert raised.value.code == "unsupported_combination"
    with pytest.raises(openai.BadRequestError, match="a request for each text, with its own seed"):
        create(client, n=2, extra_body={"return_hidden_states": states})
    with pytest.raises(openai.BadRequestError, match="layer"):
        create(client, extra_body={"layer": 1})
    with pytest.raises(openai.BadRequestError, match=r"-5\.\.4"):
        create(client, extra_body={"layer": 5, "return_hidden_states": states})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "suffix", "model", "eagle3"])
def test_drafters_change_nothing(kind: str, tiny: TinyLlama, tiny_path: Path, tmp_path: Path) -> None:
    drafter = {
        "ngram": "ngram",
        "suffix": "suffix",
        "model": str(nearly(tiny, tmp_path / "other.gguf", noise=0.02)),
        "eagle3": str(drafters.write_eagle3(tmp_path / "eagle3.gguf")),
    }[kind]
    # Patterns, for the n-grams.
    prompts = ["abcabcabcabc", "xyzzyxyzzyxyzzy"]
    with lt.Model(tiny_path) as model:
        greedy = alone(model, prompts, max_tokens=30, ignore_eos=True)
        drawn = alone(model, prompts, max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
        options = tiny_options(tiny_path, context=EXACT, drafter=drafter, n_max=3)
        with running([options]) as server, client_of(server) as client:
            body: dict[str, Any] = {
                "return_hidden_states": True,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            for more, expected in (({"temperature": 0}, greedy), ({"temperature": 0.8, "seed": 3}, drawn)):
                answer = create(client, prompts, max_tokens=30, extra_body=body, **more)
                for choice, one in zip(answer.choices, expected, strict=True):
                    assert choice.token_ids == one.tokens.tolist()
                    of_prompt, *of_tokens = choice.hidden_states
                    assert len(of_tokens) == len(choice.token_ids)
                    rows = extracted(model, [*one.prompt.tolist(), *one.tokens.tolist()], "norm")
                    found = np.array([*of_prompt, *of_tokens])
                    assert max(relative(a, b) for a, b in zip(found, rows, strict=True)) < 1e-4
            assert joined(create(client, prompts, max_tokens=30, temperature=0, stream=True)) == {
                i: one.text for i, one in enumerate(alone(model, prompts, max_tokens=30))
            }
            drafted = server.state.metrics.tokens.labels("tiny", "drafted")._value.get()
            assert drafted > 0
