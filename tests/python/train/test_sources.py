"""The two sources of samples (draft verification and a forward pass), and which requests get states."""

from __future__ import annotations

import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, Guessing, by_hand, is_empty, ragged
from support.numerics import relative
from support.paths import ROOT
from support.sessions import finals
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset
from llamatap.connectors import connect
from llamatap.train import DataBuffer, Sample, TrainOptions, trainable, training_batch

LENGTHS = (7, 40, 1, 18, 23)
MAX_TOKENS = 20
#: EAGLE-3's input layers and the predicted one, for a model of four blocks.
EAGLE3: tuple[lt.LayerId, ...] = (1, 2, 3, "norm")


@pytest.fixture(scope="module")
def prompts(tiny_model: lt.Model) -> list[list[int]]:
    return ragged(np.random.default_rng(3), tiny_model.n_vocab, LENGTHS)


@pytest.fixture(scope="module")
def expected(tiny_model: lt.Model, prompts: list[list[int]]) -> list[list[int]]:
    return [by_hand(tiny_model, prompt, MAX_TOKENS) for prompt in prompts]


def by_tokens(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda one: one.input_ids.tolist())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layers", [EAGLE3, ("norm",), (-1,), (2, -1)], ids=str)
@pytest.mark.parametrize("drafting", [False, True])
def test_both_sources_give_the_same_samples(
    drafting: bool,
    layers: tuple[lt.LayerId, ...],
    tiny_model: lt.Model,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """SGLang's path and the actor's: https://github.com/sgl-project/sglang/issues/26163, "fewer states than
    tokens when drafting"."""
    drafted, computed = DataBuffer(), DataBuffer()
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    with tiny_model.context(n_ctx=512, n_seq_max=3, n_ubatch=16, n_batch=32, **EXACT) as context:
        drafter = Guessing(tiny_model.n_vocab, texts, wrong=0.3) if drafting else None
        found = list(
            lt.generate(
                context,
                prompts,
                drafter,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                states="full",
                prompt_states=True,
                layers=layers,
                on_states=drafted.add_generation,
            )
        )
        assert is_empty(context)
    assert [one.tokens.tolist() for one in found] == expected
    if drafting:
        assert sum(one.stats.accepted for one in found) > 10
        assert sum(one.stats.drafted - one.stats.accepted for one in found) > 10
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        for prompt, text in zip(prompts, texts, strict=True):
            mask = [0] * len(prompt) + [1] * MAX_TOKENS
            computed.add_states(extractor(text, layers), mask)
    ours, others = by_tokens(drafted.get_all_data()), by_tokens(computed.get_all_data())
    assert [one.input_ids.tolist() for one in ours] == sorted(texts)
    for one, other in zip(ours, others, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert int(one.loss_mask.sum()) == MAX_TOKENS
        assert one.layers == other.layers == tuple(4 if layer == -1 else layer for layer in layers)
        rows, wanted = np.asarray(one.hidden_states), np.asarray(other.hidden_states)
        assert rows.shape == wanted.shape
        assert rows.ndim == (2 if len(layers) == 1 else 3)
        assert max(relative(a, b) for a, b in zip(rows, wanted, strict=True)) < 1e-4
    # Each source trains, and so do both together.
    for buffer in (drafted, computed):
        (batch,) = TrainOptions(max_len=30).batches(buffer)
        assert batch["hidden_states"].shape[2] == tiny_model.n_embd * max(len(layers) - 1, 1)
        assert int(batch["loss_mask"].sum()) > 60
    mine, theirs = training_batch(ours), training_batch(others)
    assert mine["input_ids"].tolist() == theirs["input_ids"].tolist()
    assert mine["loss_mask"].tolist() == theirs["loss_mask"].tolist()
    assert relative(mine["hidden_states"], theirs["hidden_states"]) < 1e-5
    assert relative(mine["target"], theirs["target"]) < 1e-5
    both = training_batch([*ours, *others])
    assert both["input_ids"].shape == (1, 2 * sum(len(text) for text in texts) - 1)


def test_the_target_is_what_the_output_head_reads(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """EAGLE's pairing: h[t+1] after token[t+1] gives the token t+2 of the greedy text."""
    buffer = DataBuffer()
    (found,) = lt.generate(
        tiny_model,
        prompts[1],
        max_tokens=30,
        ignore_eos=True,
        states="full",
        prompt_states=True,
        layers=EAGLE3,
        on_states=buffer.add_generation,
    )
    batch = training_batch(buffer.get_all_data())
    head = TinyLlama().weights["output.weight"]
    chosen = (batch["target"][0] @ head.T).argmax(1)
    responses = batch["loss_mask"][0] == 1
    # In its window from the first token of the response on, that one is not predicted.
    assert batch["input_ids"][0][responses].tolist() == found.tokens.tolist()
    assert chosen[responses][:-1].tolist() == found.tokens[1:].tolist()


def test_on_states_gets_each_text_as_it_ends(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """A short text that waits for its turn in the results is handed over before longer ones end."""
    with tiny_model.context(n_ctx=512, n_seq_max=4, **EXACT) as context, lt.Session(context) as session:
        seen: list[lt.Generation] = []
        lengths = (20, 4, 9)
        for prompt, length in zip(prompts, lengths, strict=False):
            session.add(
                prompt, max_tokens=length, ignore_eos=True, states="full", layers=[-1], on_states=seen.append
            )
        session.add(prompts[3], max_tokens=3, ignore_eos=True)
        found = finals(session)
    assert [one.index for one in seen] == [1, 2, 0]
    assert [len(one.tokens) for one in seen] == [4, 9, 20]
    assert [found[one.index] is one for one in seen] == [True] * 3
    order: list[int] = []
    results = lt.generate(
        tiny_model,
        prompts[:3],
        max_tokens=6,
        stop_tokens=range(tiny_model.n_vocab),
        states="full",
        on_states=lambda one: order.append(one.index),
    )
    assert len(list(results)) == 3
    assert sorted(order) == [0, 1, 2]


def test_only_those_who_ask_get_states(
    tiny_model: lt.Model, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """None, last and full in one batch, as SGLang's capture modes; chosen for each request."""
    modes: list[dict[str, Any]] = [
        {},
        {"states": "last", "layers": ["norm"]},
        {"states": "full", "layers": ["norm"]},
        {"states": "full", "prompt_states": True, "layers": EAGLE3},
        {"prompt_states": True, "layers": ["norm"]},
    ]
    buffer = DataBuffer()
    with tiny_model.context(n_ctx=512, n_seq_max=5, **EXACT) as context, lt.Session(context) as session:
        for prompt, mode in zip(prompts, modes, strict=True):
            on_states = buffer.add_generation if mode.get("states") == "full" else None
            session.add(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, on_states=on_states, **mode)
        found = [one for _, one in sorted(finals(session).items())]
    assert [one.tokens.tolist() for one in found] == expected
    assert [None if one.states is None else len(one.states) for one in found] == [None, 1, 20, 20, None]
    assert [None if one.prompt_states is None else len(one.prompt_states) for one in found] == [
        None,
        None,
        None,
        LENGTHS[3],
        LENGTHS[4],
    ]
    shorter, longer = sorted(buffer.get_all_data(), key=lambda one: len(one.input_ids))
    # First without the prompt's states, then with them.
    assert shorter.input_ids.tolist() == expected[2]
    assert shorter.loss_mask.tolist() == [1] * MAX_TOKENS
    assert longer.input_ids.tolist() == [*prompts[3], *expected[3]]
    assert longer.loss_mask.tolist() == [0] * LENGTHS[3] + [1] * MAX_TOKENS
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        whole = extractor([*prompts[2], *expected[2]], ["norm"]).array[-MAX_TOKENS:, 0]
        assert relative(np.asarray(shorter.hidden_states), whole) < 1e-5
        whole = extractor([*prompts[3], *expected[3]], EAGLE3).array
        assert relative(np.asarray(longer.hidden_states), whole) < 1e-5


def test_what_is_no_sample_is_refused(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """It raises at the first text, not after a night of collecting."""
    buffer = DataBuffer()
    generate = partial(lt.generate, max_tokens=5, ignore_eos=True, on_states=buffer.add_generation)
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        for mode in ({"states": "last"}, {"prompt_states": True}, {"states": "last", "prompt_states": True}):
            with pytest.raises(lt.InvalidInputError, match="generate with states='full'"):
                list(generate(context, prompts[0], layers=["norm"], **mode))
            assert is_empty(context)
        # The default is the last but one layer, which nobody predicts.
        for layers in ((-2,), ("norm", 1), (1, 2, 3)):
            with pytest.raises(lt.InvalidInputError, match=r"the last of layers= is .* found \["):
                list(generate(context, prompts[0], states="full", layers=layers))
        with pytest.raises(lt.InvalidInputError, match="the last of layers="):
            buffer.add_states(lt.extract(context, prompts[0], [1]))
        with pytest.raises(lt.InvalidInputError, match="extract without pool="):
            buffer.add_states(lt.extract(context, prompts[0], [-1], pool="mean"))
        states = lt.extract(context, prompts[0], [-1])
        for mask in ([1] * 6, [2] * 7, [[1] * 7]):
            with pytest.raises(
                lt.InvalidInputError, match="loss_mask must be 0 or 1 for each of the 7 tokens"
            ):
                buffer.add_states(states, mask)
        with pytest.raises(lt.InvalidInputError, match="states must be a States, not ndarray"):
            buffer.add_states(states.array)  # type: ignore[arg-type]
        with pytest.raises(lt.InvalidInputError, match="generation must be a Generation, not States"):
            buffer.add_generation(states)  # type: ignore[arg-type]
        assert buffer.get_data_count() == 0
        buffer.add_states(states)
        assert buffer.get_all_data()[0].loss_mask.tolist() == [1] * 7


def test_the_last_token_of_a_full_context_is_left_out(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """The last token has no position in the context, and therefore no state."""
    prompt = (prompts[1] * 7)[:250]
    buffer = DataBuffer()
    with tiny_model.context(n_ctx=256, **EXACT) as context:
        (found,) = lt.generate(
            context,
            prompt,
            states="full",
            prompt_states=True,
            layers=["norm"],
            ignore_eos=True,
            on_states=buffer.add_generation,
        )
    assert len(found.tokens) == 7
    (one,) = buffer.get_all_data()
    assert one.input_ids.tolist() == [*prompt, *found.tokens[:6].tolist()]
    assert np.asarray(one.hidden_states).shape == (256, tiny_model.n_embd)
    assert one.loss_mask.sum() == 6


def test_cancelled_texts_come_with_what_they_have(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    buffer = DataBuffer()
    with tiny_model.context(n_ctx=512, n_seq_max=1, **EXACT) as context, lt.Session(context) as session:
        options: dict[str, Any] = {"states": "full", "prompt_states": True, "layers": ["norm"]}
        for prompt in prompts[:2]:
            session.add(prompt, ignore_eos=True, on_states=buffer.add_generation, **options)
        events = [event for _ in range(6) for event in session.step()]
        for index in range(2):
            session.cancel(index)
        while session.pending:
            events += session.step()
    waiting, under_way = sorted(buffer.get_all_data(), key=lambda one: len(one.input_ids))
    assert waiting.input_ids.tolist() == []
    tokens = [event.token for event in events if event.index == 0 and event.token >= 0]
    assert under_way.input_ids.tolist() == [*prompts[0], *tokens]
    assert trainable([waiting, under_way]) == ([under_way], {"no states": 1})


def test_what_a_callback_raises_comes_out(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """The session drops its other in-flight texts, as after a drafter's error, and goes on."""

    def fail(generation: lt.Generation) -> None:
        raise RuntimeError("no more room")

    with tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        with pytest.raises(RuntimeError, match="no more room"):
            list(lt.generate(context, prompts, max_tokens=3, states="full", on_states=fail))
        assert is_empty(context)
        with lt.Session(context) as session:
            session.add(prompts[0], max_tokens=2, states="full", on_states=fail)
            session.add(prompts[1], max_tokens=9)
            session.add(prompts[2], max_tokens=9, ignore_eos=True)
            with pytest.raises(RuntimeError, match="no more room"):
                finals(session)
            assert session.dropped == (0, 1)
            assert {index: len(one.tokens) for index, one in finals(session).items()} == {2: 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_states": print}, "on_states= takes states; also give states='last', states='full' or prompt"),
        ({"on_states": 1, "states": "full"}, "on_states must be a function of a Generation, not 1"),
    ],
)
def test_on_states_is_checked(options: dict[str, Any], message: str, tiny_model: lt.Model) -> None:
    with pytest.raises(lt.InvalidInputError, match=message):
        lt.generate(tiny_model, [1, 2], **options)
    with (
        tiny_model.context(n_ctx=64, **EXACT) as context,
        lt.Session(context) as session,
        pytest.raises(lt.InvalidInputError, match=message),
    ):
        session.add([1, 2], **options)


def document(number: int) -> str:
    """A piece of code of docs/training.md."""
    text = (ROOT / "docs" / "training.md").read_text()
    return text.split("```python\n")[number].split("```")[0]


def test_the_document_runs(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """The first lines of docs/training.md, with a model for four blocks of which there are layers to take."""
    code = document(1).replace('[2, model.n_layer // 2, model.n_layer - 3, "norm"]', '[1, 2, 3, "norm"]')
    names: dict[str, Any] = {"path": tiny_model.path, "steps": [prompts[:2], prompts[2:]]}
    exec(compile(code, "training.md", "exec"), names)
    assert len(names["texts"]) == 3
    assert names["buffer"].get_data_count() == 5
    assert names["batch"]["hidden_states"].shape[2] == 3 * tiny_model.n_embd


def test_a_written_data_set_is_trained_on(
    tiny_model: lt.Model, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the document's code for the npy layout, and its statement about the speculators layout."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": one, "loss_mask": [0, 0, *[1] * (len(one) - 2)]} for one in prompts if len(one) > 2]
    dataset.write(tiny_model, rows, "states", dataset.Options(layers=[1, 2], layout="npy"))
    names: dict[str, Any] = {"options": TrainOptions(batch_size=2)}
    exec(compile(document(2), "training.md", "exec"), names)
    found = names["buffer"].get_all_data()
    assert [one.input_ids.tolist() for one in found] == [row["input_ids"] for row in rows]
    assert [one.loss_mask.tolist() for one in found] == [row["loss_mask"] for row in rows]
    assert {one.layers for one in found} == {(1, 2, 4)}
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        for one in found:
            expected = extractor(one.input_ids, [1, 2, -1]).array
            assert relative(np.asarray(one.hidden_states).astype(np.float32), expected) < 8e-3
    assert names["batch"]["hidden_states"].shape[2] == 2 * tiny_model.n_embd
    dataset.write(tiny_model, rows, "others", dataset.Options(layers=[1, 2]))
    connector = connect("files", folder=tmp_path / "others" / "hidden_states")
    for i, one in enumerate(found):
        stored = connector.get_cached(i)
        assert stored is not None
        assert stored["token_ids"].tolist() == one.input_ids.tolist()
        wanted = np.asarray(one.hidden_states).astype(np.float32)
        assert relative(stored["hidden_states"].astype(np.float32), wanted) < 8e-3


def test_what_the_document_puts_is_read(
    tiny_model: lt.Model, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines with connectors, one after the other."""
    monkeypatch.chdir(tmp_path)
    layers: list[lt.LayerId] = [1, 2, -1]
    found: list[lt.Generation] = []
    options: dict[str, Any] = {"states": "full", "prompt_states": True, "layers": layers, "max_tokens": 4}
    list(lt.generate(tiny_model, prompts[:1], on_states=found.append, **options))
    name = f"test-{uuid.uuid4().hex}"
    names: dict[str, Any] = {"lt": lt, "model": tiny_model, "layers": layers, "prompts": prompts[:3]}
    names |= {"text": prompts[0], "generation": found[0]}
    try:
        for number in (3, 4):
            exec(compile(document(number).replace("eagle3", name), "training.md", "exec"), names)
        connector = connect("shared_memory", name=name)
        stored = connector.get_generated(names["params"])
        assert stored is not None
        assert stored["token_ids"].tolist() == [*prompts[0], *found[0].tokens.tolist()]
        texts = [[*one.prompt.tolist(), *one.tokens.tolist()] for one in names["texts"]]
        several = [connector.get_cached(i) for i in range(3)]
        assert sorted(one["token_ids"].tolist() for one in several if one is not None) == sorted(texts)
        assert (tmp_path / "rows" / "state.json").exists()
    finally:
        shutil.rmtree(names["connector"].folder)
