"""Conversations that a model writes itself, and the frames that chat templates put around questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, is_empty
from support.paths import ENGINE_MODELS
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.train.conversations import (
    Conversation,
    TurnFrame,
    sample_conversations,
    turn_frame,
    without_loop,
)

#: Other ones than turn_frame tries.
QUESTIONS = (
    "Name three rivers of Peru.",
    "x = [1, 2]\nfor i in x:\n    print(i)",
    "<b>bold</b> or not!",
    "Wie geht es dir?\n\nUnd sonst",
    "你好吗",
    "7",
)
#: A vocabulary of the engine and a template whose special tokens it has.
SPLIT = (
    ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
    ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
    ("qwen2", "HuggingFaceTB-SmolLM3-3B"),
    ("qwen35", "Qwen3.5-4B"),
    ("gemma-4", "google-gemma-4-31B-it"),
    ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
    ("command-r", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
)
#: The question stands between words that are no special tokens of the vocabulary.
JOINED = (
    ("llama-spm", "mistralai-Mistral-Nemo-Instruct-2407"),
    ("llama-bpe", "Qwen-Qwen2.5-7B-Instruct"),
    ("gemma-4", "microsoft-Phi-3.5-mini-instruct"),
)


def vocabulary(name: str) -> lt.Model:
    path = ENGINE_MODELS / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip("the vocabularies are not there; `make test` fetches them")
    return lt.Model(path, vocab_only=True)


def template(name: str) -> str:
    return (ENGINE_MODELS / "templates" / f"{name}.jinja").read_text("utf-8")


def assert_frames(model: lt.Model, frame: TurnFrame, chat_template: str) -> None:
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        text = model.apply_chat_template(message, template=chat_template)
        tokens = model.tokenize(question, add_special=False, parse_special=False)
        found = [*frame.before.tolist(), *tokens.tolist(), *frame.after.tolist()]
        assert found == model.tokenize(text, add_special=True, parse_special=True).tolist()


@pytest.mark.parametrize(("name", "chat"), SPLIT)
def test_a_frame_and_a_question_are_the_chat(name: str, chat: str) -> None:
    with vocabulary(name) as model:
        frame = turn_frame(model, chat_template=template(chat))
        assert frame.before.dtype == frame.after.dtype == np.int32
        assert_frames(model, frame, template(chat))


@pytest.mark.parametrize(("name", "chat"), JOINED)
def test_templates_that_cannot_be_split(name: str, chat: str) -> None:
    with vocabulary(name) as model, pytest.raises(lt.InvalidInputError, match="the tokenizer joins them in"):
        turn_frame(model, chat_template=template(chat))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama-bpe", "qwen2", "qwen35", "gemma-4", "phi-3", "command-r", "deepseek-llm", "llama-spm"]
)
def test_every_template_is_right_or_refused(name: str) -> None:
    with vocabulary(name) as model:
        found = 0
        for path in sorted((ENGINE_MODELS / "templates").glob("*.jinja")):
            chat = path.read_text("utf-8")
            try:
                frame = turn_frame(model, chat_template=chat)
            except lt.InvalidInputError:
                continue
            assert_frames(model, frame, chat)
            found += 1
        assert found or name == "llama-spm"


def tiny(seed: int = 0, *, favoured: Sequence[int] = ()) -> TinyLlama:
    """A model whose next token depends on the last one a little, and is mostly one of the favoured."""
    model = TinyLlama(n_layer=2, seed=seed)
    for name, values in model.weights.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            values[:] = 0
    embedding, output = model.weights["token_embd.weight"], model.weights["output.weight"]
    embedding[:, 0] = 8  # the same for all tokens: with a column of the head, a bias
    model.weights["output_norm.weight"][:] = 1
    output[:, 0] = 0
    output[list(favoured), 0] = 8
    return model


#: </s>, which ends a question and an answer.
END = 2
#: </s>, <s>, and the letters a to d.
FAVOURED = (END, 1, *(3 + ord(letter) for letter in "abcd"))
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(favoured=FAVOURED).write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", chat_template=CHAT)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[lt.Model]:
    with lt.Model(path) as model:
        yield model


@pytest.fixture
def context(model: lt.Model) -> Iterator[lt.Context]:
    with model.context(n_ctx=1024, n_seq_max=4, **EXACT) as context:
        yield context


def key(one: Conversation) -> tuple[Any, ...]:
    return (
        one.input_ids.tolist(),
        one.loss_mask.tolist(),
        one.question.tolist(),
        one.temperature,
        one.finish_reason,
    )


OPTIONS: dict[str, Any] = {"max_question_tokens": 9, "max_answer_tokens": 12}


def test_conversations(context: lt.Context) -> None:
    model = context.model
    frame = turn_frame(model)
    n_tokens = 6000
    found = list(sample_conversations(context, n_tokens, seed=1, **OPTIONS))
    sizes = [len(one.input_ids) for one in found]
    assert sum(sizes[:-1]) < n_tokens <= sum(sizes)
    for one in found:
        prompt = [*frame.before, *one.question, *frame.after]
        answer = one.input_ids[len(prompt) :].tolist()
        assert one.input_ids[: len(prompt)].tolist() == prompt
        assert one.loss_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        assert one.input_ids.dtype == one.question.dtype == np.int32
        assert one.loss_mask.dtype == np.uint8
        # Without its end token, and without control tokens: the model writes <s>, too.
        assert 0 < len(one.question) < OPTIONS["max_question_tokens"]
        assert not {0, 1, 2} & set(one.question.tolist())
        ended = one.finish_reason == "stop"
        assert ended == (answer[-1] == END)
        assert END not in answer[:-1]
        assert ended or (one.finish_reason == "length" and len(answer) == 12)
        assert one.row() == {"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.tolist()}
    assert {one.finish_reason for one in found} == {"stop", "length"}
    # Of one letter there are but four.
    questions = [tuple(one.question.tolist()) for one in found]
    assert len(set(questions)) == len(questions) > 100
    assert sorted(one for one in questions if len(one) == 1)[:4] == [(3 + ord(one),) for one in "abcd"]
    warm = sum(one.temperature == 0.8 for one in found)
    assert {one.temperature for one in found} == {0.0, 0.8}
    assert abs(2 * warm - len(found)) < 12
    assert is_empty(context)
    # Answers at temperature 0 are the model's own greedy ones.
    greedy = [one for one in found if one.temperature == 0][:20]
    prompts = [one.input_ids[: int(one.loss_mask.argmax())].tolist() for one in greedy]
    for one, generation in zip(greedy, lt.generate(context, prompts, max_tokens=12), strict=True):
        assert generation.tokens.tolist() == one.input_ids[int(one.loss_mask.argmax()) :].tolist()


def test_a_seed_gives_the_same_conversations(context: lt.Context) -> None:
    first, again, other = (
        [key(one) for one in sample_conversations(context, 1500, seed=seed, **OPTIONS)] for seed in (3, 3, 4)
    )
    assert first == again
    assert not {tuple(one[0]) for one in first} <= {tuple(one[0]) for one in other}


def test_answers_to_questions_that_are_given(context: lt.Context) -> None:
    model = context.model
    texts = ["cab", "dab", "cab", "abadcab", "dab", "ada"]
    questions = [model.tokenize(text, add_special=False) for text in texts]
    found = list(sample_conversations(context, 10**9, questions=questions, temperatures=(0,), **OPTIONS))
    expected = ["cab", "dab", "abadcab", "ada"]
    assert sorted(model.detokenize(one.question) for one in found) == sorted(expected)
    for one in found:
        message = [{"role": "user", "content": model.detokenize(one.question)}]
        prompt = model.tokenize(model.apply_chat_template(message)).tolist()
        assert one.input_ids[: len(prompt)].tolist() == prompt
        assert one.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(one.input_ids) - len(prompt))


def test_given_questions_are_taken_as_they_are_needed(context: lt.Context) -> None:
    taken = itertools.count()

    def questions() -> Iterator[Any]:
        for _ in range(10000):
            yield np.array([3 + int(digit) for digit in str(next(taken))], np.int32)

    found = sample_conversations(context, 300, questions=questions(), **OPTIONS)
    assert sum(len(one.input_ids) for one in found) >= 300
    assert next(taken) < 60
    # Whoever stops early leaves an empty memory.
    started = sample_conversations(context, 10**9, seed=1, **OPTIONS)
    next(started)
    assert isinstance(started, Iterator)
    started.close()  # type: ignore[attr-defined]
    assert is_empty(context)


def test_a_frame_of_ones_own(context: lt.Context) -> None:
    frame = TurnFrame(np.array([1, 70], np.int32), np.array([END, 72], np.int32))
    (one,) = sample_conversations(context, 1, frame=frame, **OPTIONS)
    n = len(one.question)
    assert one.input_ids[: n + 4].tolist() == [1, 70, *one.question, END, 72]
    assert not one.loss_mask[: n + 4].any()
    assert one.loss_mask[n + 4 :].all()


def test_a_question_must_end_in_a_token_that_ends_a_text(context: lt.Context) -> None:
    frame = TurnFrame(np.array([1, 70], np.int32), np.array([71, 72], np.int32))
    with pytest.raises(lt.UnsupportedError, match="the model goes on and answers itself"):
        sample_conversations(context, 1, frame=frame, **OPTIONS)
    given = [np.array([80, 81], np.int32)]
    (one,) = sample_conversations(context, 1, frame=frame, questions=given, **OPTIONS)
    assert one.question.tolist() == [80, 81]


def test_a_model_that_writes_no_questions(context: lt.Context, tmp_path: Path) -> None:
    """All the same, or without an end."""
    with pytest.raises(lt.UnsupportedError, match=r"of 256 questions in a row that tiny\.gguf wrote"):
        list(sample_conversations(context, 10**9, question_temperature=0, **OPTIONS))
    endless = tiny(favoured=FAVOURED[2:]).write(tmp_path / "endless.gguf", chat_template=CHAT)
    with lt.Model(endless) as model, model.context(n_ctx=512, n_seq_max=8, **EXACT) as other:
        options: dict[str, Any] = {"max_question_tokens": 4, "max_answer_tokens": 4}
        with pytest.raises(lt.UnsupportedError, match=r"endless\.gguf wrote, none was finished"):
            list(sample_conversations(other, 10**9, **options))
        assert is_empty(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tokens": 0}, "n_tokens"),
        ({"max_question_tokens": 0}, "max_question_tokens"),
        ({"max_answer_tokens": 0}, "max_answer_tokens"),
        ({"seed": -1}, "seed"),
        ({"temperatures": ()}, "temperatures must have at least one"),
        ({"temperatures": ("warm",)}, "temperatures"),
        ({"question_temperature": "warm"}, "question_temperature"),
        ({"context": 5}, "context"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, context: lt.Context) -> None:
    given: dict[str, Any] = {"context": context, "n_tokens": 10, **arguments}
    # At once, not when the first conversation is asked for.
    with pytest.raises(lt.InvalidInputError, match=message):
        sample_conversations(**given)


TEMPLATES = {
    "twice": "{{ messages[0].content }} and {{ messages[0].content }}",
    "never": "hello",
    "changed": "{{ messages[0].content | upper }}[assistant]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_do_not_write_a_question_once(name: str, model: lt.Model) -> None:
    with pytest.raises(lt.InvalidInputError, match="must write the question once and unchanged"):
        turn_frame(model, chat_template=TEMPLATES[name])


def test_variables_of_a_template(model: lt.Model) -> None:
    chat = "{{ tone }}:{{ messages[0].content }}|{% if add_generation_prompt %}>{% endif %}"
    frame = turn_frame(model, chat_template=chat, tone="dry")
    assert model.detokenize(frame.before[1:]) == "dry:"
    assert model.detokenize(frame.after) == "|>"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with lt.Model(TinyLlama().write(tmp_path / "plain.gguf")) as plain, plain.context(n_ctx=64) as context:
        with pytest.raises(lt.UnsupportedError, match="no chat template"):
            turn_frame(plain)
        with pytest.raises(lt.UnsupportedError, match="no chat template"):
            sample_conversations(context, 10)


@pytest.mark.slow
def test_a_real_model(smollm2: lt.Model) -> None:
    frame = turn_frame(smollm2)
    with smollm2.context(n_ctx=2048, n_seq_max=4) as context:
        found = list(sample_conversations(context, 250, seed=2, max_question_tokens=60, max_answer_tokens=40))
    assert found
    for one in found:
        question = smollm2.detokenize(one.question)
        assert question.strip()
        text = smollm2.apply_chat_template([{"role": "user", "content": question}])
        n_prompt = len(frame.before) + len(one.question) + len(frame.after)
        assert smollm2.detokenize(one.input_ids[:n_prompt]) == text
        assert one.loss_mask.tolist() == [0] * n_prompt + [1] * (len(one.input_ids) - n_prompt)
    assert_frames(smollm2, frame, str(smollm2.chat_template))


@pytest.mark.parametrize("period", [1, 3, 40, 64])
def test_a_loop_is_cut_after_its_second_round(period: int) -> None:
    rng = np.random.default_rng(period)
    text, loop = rng.permutation(200)[:50], 200 + rng.permutation(100)[:period]
    rounds = 4 if period > 6 else 25 // period + 1
    # The last round may be cut anywhere.
    for cut in range(period):
        looped = np.concatenate([text, np.tile(loop, rounds), loop[:cut]]).astype(np.int32)
        assert without_loop(looped).tolist() == [*text, *loop, *loop]


def test_what_is_no_loop_is_kept() -> None:
    rng = np.random.default_rng(0)
    text, loop = rng.permutation(200).astype(np.int32), np.arange(200, 220, dtype=np.int32)
    for kept in (
        text,
        text[:1],
        text[:0],
        # Three rounds; four that are short; four, and then something else; a period of 65.
        np.concatenate([text, *[loop] * 3]),
        np.concatenate([text, *[loop[:5]] * 4]),
        np.concatenate([text, *[loop] * 4, text[:1]]),
        np.tile(np.arange(65, dtype=np.int32), 5),
    ):
        assert without_loop(kept) is kept


def test_answers_end_before_their_loop(tmp_path: Path) -> None:
    # The next token depends on the last one alone: at temperature 0 each text becomes a loop.
    path = tiny(favoured=FAVOURED[2:]).write(tmp_path / "loops.gguf", chat_template=CHAT)
    found: list[list[Conversation]] = []
    with lt.Model(path) as model:
        questions = [model.tokenize(one, add_special=False) for one in "ab"]
        for keep in (True, False):
            with model.context(n_ctx=1024) as context:
                sampled = sample_conversations(
                    context,
                    2**40,
                    temperatures=[0.0],
                    max_answer_tokens=200,
                    questions=questions,
                    keep_loops=keep,
                )
                found.append(list(sampled))
    for whole, cut in zip(*found, strict=True):
        answer = int(whole.loss_mask.argmax())
        expected = without_loop(whole.input_ids[answer:])
        assert len(expected) < 100
        assert cut.input_ids.tolist() == [*whole.input_ids[:answer], *expected]
        assert cut.loss_mask.tolist() == [0] * answer + [1] * len(expected)
