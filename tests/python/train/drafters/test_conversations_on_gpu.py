"""tools/conversations_on_gpu.py, on a CPU: the engine's logits, and the engine's greedy answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.numerics import EXACT, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.train.conversations import turn_frame

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

import conversations_on_gpu  # noqa: E402

# The end of the question is a token that ends a text.
TEMPLATE = (
    "{% for m in messages %}{{ 'Q' + m['content'] + eos_token + '!' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyLlama(n_layer=3, n_head=4, n_head_kv=2, seed=5)
    return shape.write(tmp_path_factory.mktemp("gpu") / "tiny.gguf", chat_template=TEMPLATE)


def test_logits_are_the_engine_s(path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 256, (3, 9))
    with torch.no_grad():
        ours = conversations_on_gpu.LlamaOnGpu(path, 3, 16, torch.device("cpu"), torch.float32)
        found = [ours(torch.tensor(texts[:, i]), torch.full((3,), i)).numpy() for i in range(9)]
    with lt.Model(path) as model, model.context(**EXACT, n_ctx=64) as context:
        for seq, text in enumerate(texts):
            context.memory.clear()
            for i, token in enumerate(text):
                context.decode(lt.Batch.of([token], pos0=i))
                assert relative(found[i][seq], context.logits()) < 1e-5


def test_greedy_answers_are_the_engine_s(path: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        rows = list(conversations_on_gpu.sample(path, 1500, 6, seed=1, temperatures=[0.0]))
    assert len(rows) > 1
    texts: list[str] = []
    with lt.Model(path) as model:
        frame = turn_frame(model)
        for row in rows:
            ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
            answer = int(mask.argmax())
            assert mask.tolist() == [0] * answer + [1] * (len(ids) - answer)
            assert ids[: len(frame.before)].tolist() == frame.before.tolist()
            assert ids[answer - len(frame.after) : answer].tolist() == frame.after.tolist()
            n = min(len(ids) - answer, 40)
            found = next(lt.generate(model, ids[:answer], max_tokens=n))
            assert found.tokens.tolist() == ids[answer : answer + n].tolist()
            texts.append(model.detokenize(ids[len(frame.before) : answer - len(frame.after)]))
    questions = [tuple(row["input_ids"][len(frame.before) :]) for row in rows]
    assert len(set(questions)) == len(questions)
    # The same ones without the first question.
    torch.manual_seed(0)
    with torch.no_grad():
        others = list(
            conversations_on_gpu.sample(path, 1500, 6, seed=1, temperatures=[0.0], without=texts[:1])
        )
    assert rows[0] not in others
    assert [row for row in others if row in rows[1:]] == rows[1:]


def test_conversations_in_flight_are_finished(path: Path) -> None:
    with torch.no_grad():
        rows = list(conversations_on_gpu.sample(path, 1, 12, seed=1, temperatures=[0.0, 2.0]))
    # One would have been enough. Those without an end are dropped.
    assert len(rows) > 3
