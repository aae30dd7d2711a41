"""lm-eval scores a model through `llamatap serve`: its log-likelihoods are those of the model itself.

The harness has an environment of its own: `nox -t peers` makes it, and runs these tests. The tasks and
their data are written here; nothing is fetched but the model.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import log_softmax
from support.paths import peer_python
from support.servers import FLAGS, served

import llamatap as lt
from llamatap.fetch import fetch

HARNESS = peer_python("lm-eval")

QUESTIONS: list[tuple[str, list[str], int]] = [
    ("The capital of France is", ["London", "Paris", "Rome", "a kind of cheese"], 1),
    ("Water freezes at zero degrees", ["Celsius", "Fahrenheit", "north"], 0),
    ("A week has seven", ["days", "months", "legs", "moons"], 0),
    ("The opposite of hot is", ["warm", "cold", "hot"], 1),
    ("Two plus two equals", ["four", "five", "a fish", "22"], 0),
    ("Café, naïve and déjà vu are words that English took from", ["French", "Mandarin"], 0),
    ("The sun rises in the", ["west", "east", "kitchen"], 1),
    ("To be, or not to", ["be", "go", "run away from it"], 0),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Tides are the rise and fall of sea levels, caused by the Moon and the Sun. " * 8,
]

CHOICE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


@pytest.fixture(scope="module")
def model() -> Iterator[lt.Model]:
    with lt.Model(fetch("smollm2"), weights="f32") as model:
        yield model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows: dict[str, list[dict[str, Any]]] = {
        "choices": [{"question": one, "choices": all_, "answer": right} for one, all_, right in QUESTIONS],
        "texts": [{"text": text} for text in TEXTS],
    }
    for name, task in (("choices", CHOICE), ("texts", ROLLING)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(task.format(data=data))
    return folder


def evaluated(
    url: str, tasks: Path, folder: Path, batch_size: int = 1, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The harness's results, and its samples by task and number."""
    arguments = {"model": "smollm2", "base_url": f"{url}/v1/completions", "max_length": 512, **options}
    model_args = ",".join(f"{key}={value}" for key, value in arguments.items())
    command: list[str | Path] = [HARNESS, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", model_args, "--batch_size", str(batch_size)]
    command += ["--include_path", tasks, "--tasks", "choices,texts", "--log_samples", "--output_path", folder]
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=os.environ | offline
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = folder.glob("**/results_*.json")
    samples: dict[str, Any] = {}
    for name in ("choices", "texts"):
        (path,) = folder.glob(f"**/samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[name] = {row["doc_id"]: row for row in rows}
    return json.loads(results.read_text())["results"], samples


def likelihood(model: lt.Model, before: list[int], tokens: list[int]) -> tuple[float, bool]:
    """The summed log-probability of a continuation, and whether it is the greedy one.

    Both come from a plain decode whose rows are all outputs.
    """
    batch = lt.Batch()
    for position, token in enumerate([*before, *tokens]):
        batch.add(token, position, 0, True)
    with model.context(n_ctx=512, type_k="f32", type_v="f32", flash_attn=False) as context:
        context.decode(batch)
        rows = [log_softmax(context.logits(len(before) - 1 + i)) for i in range(len(tokens))]
    total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
    return total, all(row.argmax() == token for row, token in zip(rows, tokens, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        # The server's own tokenizer, found by the harness itself; ids are sent.
        {},
        {"num_concurrent": 6},
        {"tokenizer_backend": "remote", "tokenized_requests": False, "batch_size": 3},
    ],
    ids=["plain", "at once", "texts"],
)
def test_scores_are_those_of_the_model(
    options: dict[str, Any], model: lt.Model, tasks: Path, tmp_path: Path
) -> None:
    command = ["--model", f"smollm2={model.path}", "--weights", "f32", *FLAGS]
    with served(*command) as (_, url):
        results, samples = evaluated(url, tasks, tmp_path, **options)

    def ids(text: str) -> list[int]:
        found: list[int] = model.tokenize(text, add_special=False).tolist()
        return found

    correct = normed = 0
    for number, (question, choices, right) in enumerate(QUESTIONS):
        found = samples["choices"][number]["filtered_resps"]
        expected = [likelihood(model, ids(question), ids(f" {one}")) for one in choices]
        for (value, greedy), (wanted, wanted_greedy) in zip(found, expected, strict=True):
            assert float(value) == pytest.approx(wanted, abs=2e-3)
            assert str(greedy) == str(wanted_greedy)
        values = np.array([value for value, _ in expected])
        correct += int(values.argmax()) == right
        normed += int((values / [len(one) for one in choices]).argmax()) == right
    assert results["choices"]["acc,none"] == pytest.approx(correct / len(QUESTIONS))
    assert results["choices"]["acc_norm,none"] == pytest.approx(normed / len(QUESTIONS))
    # A model that knows something, and a test that sees when it does not.
    assert correct / len(QUESTIONS) > 0.5

    assert model.bos_token is not None
    total = 0.0
    for number, text in enumerate(TEXTS):
        (value,) = samples["texts"][number]["filtered_resps"]
        wanted, _ = likelihood(model, [model.bos_token], ids(text))
        assert float(value) == pytest.approx(wanted, rel=1e-4)
        total += wanted
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert results["texts"]["byte_perplexity,none"] == pytest.approx(np.exp(-total / n_bytes), rel=1e-4)
