"""Training a head from texts to a draft file: order, resumption, held-out samples, files, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from llamatap.train.drafters.api import train_head  # noqa: E402
from llamatap.train.drafters.card import card_path, drafter_card  # noqa: E402
from llamatap.train.drafters.options import HeadTrainingOptions  # noqa: E402
from llamatap.train.drafters.sample_split import draft_vocabulary, prompt_of, split_by_prompt  # noqa: E402
from llamatap.train.drafters.sample_tensors import SampleTensors  # noqa: E402

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {
    "draft_vocab": 0,
    "batch_tokens": 256,
    "learning_rate": 3e-3,
    "warmup": 4,
    "device": "cpu",
    "held_out": 4,
    "engine_prompts": 2,
    "engine_tokens": 12,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(n_layer=7, seed=3).write(tmp_path_factory.mktemp("target") / "tiny.gguf")


@pytest.fixture(scope="module")
def texts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy texts of the target itself."""
    rng = np.random.default_rng(7)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    prompts = [rng.integers(0, 256, int(rng.integers(3, 9))).tolist() for _ in range(96)]
    with lt.Model(target) as model, path.open("w") as file:
        for found in lt.generate(model, prompts, max_tokens=24, ignore_eos=True):
            n_prompt, n = len(found.prompt), len(found.tokens)
            ids = [*found.prompt.tolist(), *found.tokens.tolist()]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * n_prompt + [1] * n}) + "\n")
    return path


def options(**changes: Any) -> HeadTrainingOptions:
    return HeadTrainingOptions(**{**QUICK, **changes})


def output(folder: Path, kind: str) -> Path:
    return folder / ("draft.gguf" if kind == "eagle3" else "draft.safetensors")


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_learns_and_its_file_drafts(kind: Any, target: Path, texts: Path, tmp_path: Path) -> None:
    made = train_head(
        kind,
        target,
        texts,
        output(tmp_path, kind),
        options(epochs=24, measure_minutes=0.02),
        type="f32",
        command=["llamatap", "train"],
    )
    first, last = log_of(made.folder)[0], made.figures
    assert first["step"] < last["step"]
    assert first["training"]["loss"][0] > last["training"]["loss"][0]
    # 259 tokens: what is drawn at random would be right in 0.4 % of the cases.
    assert last["held_out"]["by_position"][0] > 0.1
    with lt.Model(target) as model, model.context(n_ctx=512) as context:
        drafter = lt.load_drafter(context, made.path, n_max=3)
        prompts = [json.loads(line)["input_ids"][:6] for line in texts.read_text().splitlines()[:6]]
        found = list(lt.generate(context, prompts, drafter, max_tokens=24, ignore_eos=True))
        drafter.spec.close()
    accepted = sum(one.stats.accepted for one in found)
    assert accepted / sum(one.stats.rounds for one in found) > 0.2
    card = made.card.read_text()
    assert "Made with:\n\n    llamatap train\n" in card
    assert f"| {last['engine']['tokens_per_round']:.2f} |" in card
    assert made.card.name == "draft.md"


def test_a_card_replaces_only_its_own(tmp_path: Path) -> None:
    draft, block = tmp_path / "draft.gguf", tmp_path / "draft.safetensors"
    assert card_path(draft) == tmp_path / "draft.md"
    (tmp_path / "draft.md").write_text(drafter_card(draft.name, {}, [], []))
    assert card_path(draft) == tmp_path / "draft.md"
    assert card_path(block) == tmp_path / "draft.safetensors.md"


def weights(folder: Path) -> dict[str, NDArray[Any]]:
    state = torch.load(folder / "state.pt", weights_only=True)["head"]
    return {name: values.numpy() for name, values in state.items()}


def test_a_continued_training_ends_as_an_uninterrupted_one(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_head("eagle3", target, texts, tmp_path / "whole.gguf", options(epochs=2))
    from llamatap.train.drafters.trainer import HeadTrainer

    one_step = HeadTrainer._one_step

    def stopping(trainer: HeadTrainer) -> None:
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        one_step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(HeadTrainer, "_one_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_head("eagle3", target, texts, tmp_path / "cut.gguf", options(epochs=2))
    assert not (tmp_path / "cut.gguf").exists()
    with pytest.raises(lt.InvalidInputError, match="holds a training; continue it"):
        train_head("eagle3", target, texts, tmp_path / "cut.gguf", options(epochs=2))
    with pytest.raises(lt.InvalidInputError, match="another training: seed was 0, is 1"):
        train_head("eagle3", target, texts, tmp_path / "cut.gguf", options(epochs=2, seed=1, resume=True))
    cut = train_head("eagle3", target, texts, tmp_path / "cut.gguf", options(epochs=2, resume=True))
    found, expected = weights(cut.folder), weights(whole.folder)
    assert all((found[name] == values).all() for name, values in expected.items())
    assert (tmp_path / "cut.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    other = train_head("eagle3", target, texts, tmp_path / "other.gguf", options(epochs=2, seed=1))
    assert any((weights(other.folder)[name] != values).any() for name, values in expected.items())


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("file", ["draft", "checkpoint"])
def test_a_draft_is_trained_further(kind: Any, file: str, target: Path, texts: Path, tmp_path: Path) -> None:
    shape = {"layers": [0, 1, 3], "draft_vocab": 100} if kind == "eagle3" else {}
    first = train_head(
        kind, target, texts, output(tmp_path, kind), options(epochs=8, n_ff=48, **shape), type="f32"
    )
    start = first.path
    if file == "checkpoint":
        start = first.folder / ("checkpoint" if kind == "eagle3" else "mtp.safetensors")
    again = output(tmp_path / "again", kind)
    again.parent.mkdir()
    # A step of AdamW changes a weight by about the learning rate at most: the result is what it started from.
    second = train_head(
        kind, target, texts, again, options(epochs=1, learning_rate=1e-12, start=start), type="f32"
    )
    expected = weights(first.folder)
    # An MTP block's file has bfloat16.
    rounding = 0 if kind == "eagle3" else 2**-8
    for name, values in weights(second.folder).items():
        bound = rounding * np.abs(expected[name]).max() + 1e-12 * second.figures["step"] * 2
        assert np.abs(values - expected[name]).max() <= bound, name
    assert "| starts from |" in second.card.read_text()
    assert second.figures["held_out"]["by_position"] == pytest.approx(
        first.figures["held_out"]["by_position"], abs=0.05
    )


def test_a_start_that_does_not_fit_is_refused(target: Path, texts: Path, tmp_path: Path) -> None:
    made = train_head("mtp", target, texts, tmp_path / "first.safetensors", options(epochs=1))
    with pytest.raises(lt.InvalidInputError, match="is a drafter of the kind mtp, not eagle3"):
        train_head("eagle3", target, texts, tmp_path / "a.gguf", options(start=made.path))
    with pytest.raises(lt.ModelNotFoundError, match=r"no such file: .*gone\.gguf"):
        train_head("eagle3", target, texts, tmp_path / "a.gguf", options(start=tmp_path / "gone.gguf"))
    with pytest.raises(lt.InvalidInputError, match="layers and n_ff are those of the draft"):
        options(start=made.path, layers=[0, 1, 3])
    assert not (tmp_path / "a.gguf.training").exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_training_continues(end: signal.Signals, target: Path, texts: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    folder = tmp_path / "draft.gguf.training"
    command = [sys.executable, "-m", "llamatap", "train", "eagle3", str(target), str(texts), "-o", str(draft)]
    command += ["--draft-vocab", "0", "--batch-tokens", "256", "--held-out", "4", "--engine-prompts", "0"]
    command += ["--device", "cpu", "--quiet", "--epochs", "1000000", "--save-seconds", "0.2"]
    endless = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "state.pt").exists():
            assert endless.poll() is None, endless.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        endless.send_signal(end)
        told = endless.communicate(timeout=60)[1]
    finally:
        endless.kill()
    assert endless.returncode != 0
    assert "Traceback" not in told
    if end != signal.SIGKILL:
        assert f"continue with --resume; {folder}" in told
    # Its minutes are over, so it ends at once, with the files.
    found = subprocess.run(
        [*command, "--resume", "--minutes", "0.001"], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert draft.exists()
    assert 0 < torch.load(folder / "state.pt", weights_only=True)["step"] < 1_000_000


@pytest.mark.parametrize("layout", ["npy", "speculators"])
def test_a_data_set_of_states_trains_as_the_texts_do(
    layout: str, target: Path, texts: Path, tmp_path: Path
) -> None:
    with lt.Model(target) as model:
        chosen = dataset.Options(layout=layout, layers=[2, 5, 1])
        dataset.write(model, texts, tmp_path / "states", chosen)
    from_states = train_head(
        "eagle3", target, tmp_path / "states", tmp_path / "a.gguf", options(epochs=2, layers=[2, 5, 1])
    )
    from_texts = train_head("eagle3", target, texts, tmp_path / "b.gguf", options(epochs=2, layers=[2, 5, 1]))
    found, expected = weights(from_states.folder), weights(from_texts.folder)
    for name, values in expected.items():
        # The states were computed in other batches, and rounded to bfloat16 in both.
        assert np.abs(found[name] - values).max() < 0.02 * np.abs(values).max() + 1e-6, name
    with pytest.raises(lt.InvalidInputError, match=r"the head needs \[0, 1, 3, 7\]: \[0, 3\] are missing"):
        train_head("eagle3", target, tmp_path / "states", tmp_path / "c.gguf", options(layers=[0, 1, 3]))


def tensors(lengths: list[int], prompts: list[int], seed: int = 0) -> SampleTensors:
    """Samples of random tokens; sample i has ``prompts[i]`` tokens that do not count."""
    rng = np.random.default_rng(seed)
    found = SampleTensors.empty(sum(lengths), 2, 4)
    for length, prompt in zip(lengths, prompts, strict=True):
        mask = np.arange(length) >= prompt
        found.add(rng.integers(0, 3, length, np.int32), mask, rng.standard_normal((length, 2, 4)))
    return found


def test_no_prompt_of_a_held_out_sample_is_trained_on() -> None:
    # Prompts of two tokens out of three: many are the same.
    samples = tensors([8] * 64, [2] * 64)
    training, held_out = split_by_prompt(samples, 3, seed=5)
    assert len(held_out) == 3
    prompts = {prompt_of(samples, i).tobytes() for i in held_out}
    assert len(training) < 61
    assert all(prompt_of(samples, i).tobytes() not in prompts for i in training)
    again = split_by_prompt(samples, 3, seed=5)
    assert again == (training, held_out)
    assert split_by_prompt(samples, 3, seed=6) != again
    assert len(split_by_prompt(samples, 10**6, seed=5)[1]) == 8
    with pytest.raises(lt.InvalidInputError, match="nothing to train on: 8 samples, 1 of them held out"):
        split_by_prompt(alike(8), 1, seed=0)


def test_what_was_trained_on_is_not_held_out_of_more_data() -> None:
    rng = np.random.default_rng(1)
    found = SampleTensors.empty(4 * 512, 1, 4)
    for _ in range(512):
        tokens = rng.integers(0, 1000, 4).astype(np.int32)
        found.add(tokens, np.arange(4) >= 2, np.zeros((4, 1, 4)))
    fewer = SampleTensors(found.tokens, found.loss_mask, found.columns, found.offsets[:257])
    trained = {prompt_of(fewer, i).tobytes() for i in split_by_prompt(fewer, 32, seed=0)[0]}
    held_out = split_by_prompt(found, 32, seed=0)[1]
    assert len(held_out) == 32
    assert not trained & {prompt_of(found, i).tobytes() for i in held_out}


def alike(n: int) -> SampleTensors:
    """The same sample n times."""
    samples = SampleTensors.empty(2 * n, 1, 4)
    for _ in range(n):
        samples.add(np.array([1, 2], np.int32), np.array([0, 1]), np.zeros((2, 1, 4)))
    return samples


def test_batches_have_every_sample_once_and_hold_their_size() -> None:
    lengths = [3, 50, 7, 7, 120, 31, 8, 9, 64, 2]
    samples = tensors(lengths, [1] * 10)
    number = set()
    for seed in range(5):
        found = samples.batches(range(10), 128, np.random.default_rng(seed))
        number.add(len(found))
        assert sorted(i for batch in found for i in batch) == list(range(10))
        for batch in found:
            padded = len(batch) * max(lengths[i] for i in batch)
            assert padded <= 128 or len(batch) == 1
    assert len(number) == 1


def test_padding_does_not_count() -> None:
    samples = tensors([3, 6], [1, 2])
    batch = samples.batch([0, 1])
    assert batch.tokens.shape == (2, 6)
    assert batch.loss_mask.tolist() == [[False, True, True, False, False, False], [False] * 2 + [True] * 4]
    assert (batch.tokens[0, :3] == samples.tokens[:3]).all()
    assert (batch.features[1] == samples.columns[0][3:]).all()
    assert (batch.last[1] == samples.columns[1][3:]).all()


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([5, 0, 9, 5, 1, 5])
    tokens, coverage = draft_vocabulary(counts, 3)
    # Of equally frequent ones the first.
    assert tokens.tolist() == [0, 2, 3]
    assert coverage == 19 / 25


@pytest.mark.parametrize(
    ("kind", "name", "changes", "message"),
    [
        ("eagle3", "a.safetensors", {}, "the output of eagle3 is a .gguf file; found a.safetensors"),
        ("mtp", "a.gguf", {}, "the output of mtp is a .safetensors file; found a.gguf"),
        ("eagle3", "a.gguf", {"layers": [1, 2]}, r'three different layers, 0..7, not "norm"; found \[1, 2\]'),
        ("eagle3", "a.gguf", {"layers": [1, 2, "norm"]}, "three different layers"),
        ("mtp", "a.safetensors", {"layers": [1, 2, 3]}, r"layers \(--layers\) are EAGLE-3's; an MTP block"),
        ("medusa", "a.gguf", {}, "kind must be"),
    ],
)
def test_refused(
    kind: Any, name: str, changes: dict[str, Any], message: str, target: Path, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(lt.InvalidInputError, match=message):
        train_head(kind, target, texts, tmp_path / name, options(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": 0}, "decay must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"steps": 0}, "steps"),
        ({"precision": "int8"}, "precision"),
        ({"minutes": -1}, "minutes must be above 0"),
    ],
)
def test_wrong_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(lt.InvalidInputError, match=message):
        options(**changes)


def test_two_trainings_of_one_output(target: Path, texts: Path, tmp_path: Path) -> None:
    from llamatap.storage.locks import locked

    folder = tmp_path / "draft.gguf.training"
    folder.mkdir()
    with locked(folder), pytest.raises(lt.InvalidInputError, match="another process trains in"):
        train_head("eagle3", target, texts, tmp_path / "draft.gguf", options())


def test_a_target_of_another_file(target: Path, texts: Path, tmp_path: Path) -> None:
    with lt.Model(target) as model:
        dataset.write(model, texts, tmp_path / "states", dataset.Options(layout="npy", layers=[1, 2, 3]))
    other = TinyLlama(n_layer=7, seed=4).write(tmp_path / "other.gguf")
    with pytest.raises(
        lt.InvalidInputError, match=r"holds states of another file, tiny\.gguf; the target is"
    ):
        train_head("eagle3", other, tmp_path / "states", tmp_path / "a.gguf", options(layers=[1, 2, 3]))


def test_a_step_that_does_not_fit_into_memory(target: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(
        lt.OutOfMemoryError, match=r"a training step of 1000000000 tokens takes about .*--batch-tokens"
    ):
        train_head("mtp", target, texts, tmp_path / "a.safetensors", options(batch_tokens=10**9))


def test_a_head_that_does_not_fit_into_memory(target: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(lt.OutOfMemoryError, match=r"a feed-forward network of width 1000000000 .*--n-ff"):
        train_head("eagle3", target, texts, tmp_path / "a.gguf", options(n_ff=10**9))


def test_outputs_that_cannot_be_written(target: Path, texts: Path, tmp_path: Path) -> None:
    """Refused before the training, not after it."""
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(lt.InvalidInputError, match=r"the output .*folder\.gguf is a folder"):
        train_head("eagle3", target, texts, tmp_path / "folder.gguf", options())
    (tmp_path / "link.gguf").symlink_to(target)
    with pytest.raises(lt.InvalidInputError, match=r"the output .*link\.gguf is the target"):
        train_head("eagle3", target, texts, tmp_path / "link.gguf", options())
    assert not list(tmp_path.glob("*.training"))


def test_a_draft_vocabulary_beyond_the_target_s_is_the_target_s(
    target: Path, texts: Path, tmp_path: Path
) -> None:
    made = train_head("eagle3", target, texts, tmp_path / "a.gguf", options(epochs=1, draft_vocab=10**6))
    with safe_open(made.folder / "checkpoint" / "model.safetensors", "np") as file:
        assert "d2t" not in file.keys()  # noqa: SIM118


def test_too_few_samples_to_measure_on(
    target: Path, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[:7]))
    made = train_head("eagle3", target, few, tmp_path / "a.gguf", options(epochs=1))
    assert made.figures["held_out"] is None
    assert "none of 7 samples is held out (one of 8 is): acceptance is not measured" in caplog.text


def test_what_differs_is_told_before_states_are_computed(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_head("eagle3", target, texts, tmp_path / "a.gguf", options(epochs=1))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("llamatap.train.drafters.api.capture_states", never)
    with pytest.raises(lt.InvalidInputError, match="another training: steps was 3, is 2"):
        train_head("eagle3", target, texts, tmp_path / "a.gguf", options(epochs=1, steps=2, resume=True))
    (tmp_path / "a.gguf.training" / "state.pt").write_bytes(b"garbage")
    with pytest.raises(lt.InvalidInputError) as caught:
        train_head("eagle3", target, texts, tmp_path / "a.gguf", options(epochs=1, resume=True))
    assert str(caught.value).endswith("state.pt is damaged, or no training's state; remove it to begin anew")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamatap", "train", *map(str, arguments)]
    quick = ["--quiet", "--epochs", "1", "--batch-tokens", "256", "--device", "cpu", "--engine-prompts", "0"]
    return subprocess.run([*command, *quick], capture_output=True, text=True, timeout=120)


def test_the_command_tells_what_is_left_out(target: Path, texts: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(texts.read_text().splitlines(keepends=True)[:7]) + '{"prompt": "x"}\n')
    done = run("eagle3", target, mixed, "-o", tmp_path / "a.gguf")
    assert done.returncode == 0, done.stderr
    left_out, none_held_out = done.stderr.splitlines()
    assert left_out.startswith(f"llamatap: warning: 1 rows of {mixed} are left out: row 7: a row needs")
    assert none_held_out.startswith("llamatap: warning: none of 7 samples is held out")


WRONG: dict[str, tuple[str, str]] = {
    "no file": ("", "no such file"),
    "empty": ("", "it is empty"),
    "no JSON": ("one\ntwo\n", "holds no sample to train on: row 0: line 1 is not JSON"),
    "other keys": ('{"prompt": "x"}\n', "row 0: a row needs input_ids, messages, conversations or text"),
    "another vocabulary": ('{"input_ids": [1, 99999]}\n', "input_ids must be in 0..258; found 1..99999"),
    "nothing counts": ('{"input_ids": [4, 5], "loss_mask": [0, 0]}\n', "its loss mask has 0 of its first 2"),
    "a token": ('{"input_ids": [4]}\n', "it has 1 tokens, but min_tokens is 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_told_in_a_line(name: str, target: Path, tmp_path: Path) -> None:
    content, told = WRONG[name]
    data = tmp_path / "data.jsonl"
    if name != "no file":
        data.write_text(content)
    done = run("eagle3", target, data, "-o", tmp_path / "a.gguf")
    assert done.returncode == 1
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a.gguf.training").exists()
