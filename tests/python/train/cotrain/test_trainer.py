"""The trainer of co-training: what it trains on, what it publishes, kills, and where it begins again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.connectors.files import FileConnector
from llamatap.storage.tensor_files import read_tensors, write_tensors
from llamatap.train import CoTrainer, CoTrainOptions, TrainerOptions
from llamatap.train.cotrain.event_log import read_events
from llamatap.train.cotrain.folder import CoTrainFolder

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from support.heads import HEADS, LAYERS, head_of  # noqa: E402

from llamatap.convert import to_gguf  # noqa: E402
from llamatap.train.cotrain import trainer as trainer_module  # noqa: E402
from llamatap.train.cotrain.replay import Replay  # noqa: E402
from llamatap.train.cotrain.trainer import DrafterTrainer, train_in_folder  # noqa: E402
from llamatap.train.drafters.head_checkpoints import read_head, write_head  # noqa: E402
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead  # noqa: E402
from llamatap.train.drafters.target_weights import TargetWeights  # noqa: E402

QUICK: dict[str, Any] = {
    "min_tokens": 200,
    "new_tokens": 100,
    "batch_tokens": 256,
    "learning_rate": 3e-3,
    "device": "cpu",
    "n_threads": 1,
    "poll_seconds": 0.1,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(seed=3).write(tmp_path_factory.mktemp("target") / "tiny.gguf")


@pytest.fixture(scope="module")
def weights(path: Path) -> TargetWeights:
    return TargetWeights.read(path)


def untrained(kind: str, weights: TargetWeights) -> DraftHead:
    torch.manual_seed(0)
    return MtpHead(weights) if kind == "mtp" else Eagle3Head(weights, LAYERS)


def draft_of(kind: str, path: Path, weights: TargetWeights, folder: Path) -> Path:
    """A draft file of an untrained head."""
    head = write_head(
        folder / ("head.safetensors" if kind == "mtp" else "head"), untrained(kind, weights), weights
    )
    return head if kind == "mtp" else to_gguf(head, path, folder / "draft.gguf", type="f32").path


def traffic(path: Path, folder: Path, draft: Path, n: int = 48, seed: int = 0) -> float:
    """Texts of 30 tokens after prompts of a few tokens. Returns tokens per round."""
    rng = np.random.default_rng(seed)
    options = CoTrainOptions(poll_seconds=3600, trial_rounds=50)
    with (
        lt.Model(path) as model,
        model.context(n_ctx=1024, n_seq_max=8, **EXACT) as context,
        CoTrainer(model, folder, draft, options, start_trainer=False) as cotrainer,
    ):
        drafter = cotrainer.drafter(context, n_max=3)
        prompts = [rng.integers(3, 13, int(rng.integers(2, 4))).tolist() for _ in range(n)]
        found = list(lt.generate(context, prompts, drafter, max_tokens=30, ignore_eos=True))
        cotrainer.look()
        found = list(lt.generate(context, prompts, drafter, max_tokens=30, ignore_eos=True))
        drafter.close()
    return sum(len(one.tokens) - 1 for one in found) / sum(one.stats.rounds for one in found)


@pytest.mark.parametrize("name", HEADS)
def test_checkpoints_are_read_back(name: str, path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    head = head_of(name, weights)
    written = write_head(tmp_path / "head.safetensors", head, weights, dtype="float32")
    found = read_head(written, weights)
    assert type(found) is type(head)
    assert all(torch.equal(found.state_dict()[name], one) for name, one in head.state_dict().items())
    if head.draft_tokens is None:
        assert found.draft_tokens is None
    else:
        assert torch.equal(found.draft_tokens, head.draft_tokens)
    if isinstance(head, Eagle3Head):
        assert isinstance(found, Eagle3Head)
        assert found.target_layers == head.target_layers


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_before_fc", True, "has norm_before_fc True"),
        ("speculators_model_type", "dflash", "is no EAGLE-3 checkpoint"),
        ("eagle_aux_hidden_state_layer_ids", None, "is no EAGLE-3 checkpoint"),
    ],
)
def test_other_checkpoints_are_refused(
    key: str, value: Any, message: str, weights: TargetWeights, tmp_path: Path
) -> None:
    written = write_head(tmp_path / "head", head_of("eagle3", weights), weights)
    config = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises((lt.InvalidInputError, lt.UnsupportedError), match=message):
        read_head(written, weights)


def test_a_head_for_another_target_is_refused(weights: TargetWeights, tmp_path: Path) -> None:
    other = TargetWeights.read(TinyLlama(n_embd=32, n_head=2).write(tmp_path / "other.gguf"))
    for name in ("eagle3", "mtp"):
        written = write_head(tmp_path / f"{name}.safetensors", head_of(name, weights), weights)
        with pytest.raises(lt.UnsupportedError, match="has hidden_size 64; heads are trained"):
            read_head(written, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_it_learns_from_the_traffic(
    kind: str,
    path: Path,
    weights: TargetWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an untrained head to one that drafts for the same texts; the server takes it."""
    monkeypatch.setenv("LLAMATAP_CACHE", str(tmp_path / "cache"))
    draft = draft_of(kind, path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    before = traffic(path, folder.path, draft)
    trainer = DrafterTrainer(path, folder, draft, TrainerOptions(**QUICK, epochs=40, type="f32"))
    assert trainer.reference == 0
    assert trainer.look()
    # Nothing new came.
    assert not trainer.look()
    assert trainer.reference == 1
    said = folder.published(1)
    assert said is not None
    assert said.tokens_per_round > said.base_tokens_per_round + 0.1
    after = traffic(path, folder.path, draft)
    assert after > before + 0.3
    (trained,) = [one for one in read_events(folder.log) if one["event"] == "trained"]
    assert trained["held_out"] == said.tokens_per_round
    assert trained["held_out_samples"] >= 4
    serving = folder.serving_side()
    assert serving is not None
    assert serving.in_use == 1


def test_a_text_stays_on_its_side(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """Held out in one cycle, never trained on in a later one; nor is another text of its prompt."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")

    def prompts_of(numbers: list[int]) -> set[bytes]:
        reader = FileConnector(folder.samples)
        found = set()
        for number in numbers:
            sample = reader.get_cached(number)
            assert sample is not None
            found.add(sample["token_ids"][: int(sample["loss_mask"].argmax())].tobytes())
        return found

    replay = Replay(folder, None, [*LAYERS, 4], 64, weights.n_vocab)
    trained: set[bytes] = set()
    held_out: set[bytes] = set()
    for seed in range(3):
        traffic(path, folder.path, draft, n=40, seed=seed)
        # Of the target whose hash is in the samples.
        replay._sha256 = json.loads((folder.path / "serving.json").read_text())["model_sha256"]
        replay.look()
        training, held = replay.choose(-1, 10**6, 1000, np.random.default_rng(0))
        assert len(training) + len(held) == 80 * (seed + 1)
        assert 0 < len(held) < len(training) / 3
        trained |= prompts_of(training)
        held_out |= prompts_of(held)
    assert not trained & held_out
    # New ones first, then older ones, within the bound.
    newest = max(training)
    some, _ = replay.choose(newest - 5, 400, 8, np.random.default_rng(0))
    fresh = [number for number in sorted(training, reverse=True) if number > newest - 5]
    assert some[: len(fresh)] == fresh
    assert len(some) > len(fresh)
    assert replay.n_tokens(some) <= 400
    loaded = replay.load(some, held[-8:])
    assert loaded.samples.n_tokens == replay.n_tokens([*some, *held[-8:]])
    # A file that is gone meanwhile is left out.
    (folder.samples / f"hs_{some[0]}.safetensors").unlink()
    assert len(replay.load(some, held).training) == len(some) - 1


def test_samples_of_others_are_not_trained_on(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft, n=3)
    (folder.samples / "hs_50.safetensors").write_bytes(b"broken")
    replay = Replay(folder, "another hash", [*LAYERS, 4], 64, weights.n_vocab)
    replay.look()
    assert replay.unusable == 7
    assert replay.sides() == ([], [])
    sha256 = json.loads((folder.path / "serving.json").read_text())["model_sha256"]
    for columns, unusable in (([*LAYERS, 4], 1), ([0, 1, 2, 4], 7)):
        replay = Replay(folder, sha256, columns, 64, weights.n_vocab)
        replay.look()
        assert replay.unusable == unusable


def test_damaged_samples_are_left_out(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """Of any kind: the trainer goes on with the others."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    names = ("token_ids", "loss_mask", "hidden_states")
    one, made, _ = read_tensors(folder.samples / "hs_0.safetensors", names)
    states = one["hidden_states"]
    # Found when samples are looked at, and when they are loaded.
    early: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"token_ids": one["token_ids"] + weights.n_vocab}, {}),
        ({"token_ids": one["token_ids"] - weights.n_vocab}, {}),
        ({"token_ids": one["token_ids"][:, None]}, {}),
        ({"loss_mask": one["loss_mask"][1:]}, {}),
        ({}, {"layers": 5}),
        ({}, {"layers": [[1], 2, 3, 4]}),
    ]
    late: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"hidden_states": states[:, :, 1:]}, {}),
        ({"hidden_states": states[1:]}, {}),
        ({"hidden_states": states[:, :2]}, {}),
        ({"hidden_states": states.astype(np.float32) + np.inf}, {}),
        ({"hidden_states": states[0, 0, 0]}, {}),
        ({"other": states}, {}),
    ]
    for number, (tensors, about) in enumerate([*early, *late], 100):
        # Of texts of their own, so that they fall on both sides.
        found = {**one, "token_ids": one["token_ids"].copy(), **tensors}
        if found["token_ids"].ndim == 1 and number >= 100 + len(early):
            found["token_ids"][-1] = 3 + number % 10
        if "other" in found:
            del found["hidden_states"]
        write_tensors(folder.samples / f"hs_{number}.safetensors", found, {**made, **about})
    trainer = DrafterTrainer(path, folder, draft, TrainerOptions(**QUICK))
    trainer._replay.look()
    assert trainer._replay.unusable == len(early)
    assert trainer.look()
    (trained,) = [event for event in read_events(folder.log) if event["event"] == "trained"]
    assert trained["samples"] + trained["held_out_samples"] == 96
    assert trained["unusable"] == len(early) + len(late)


@pytest.mark.slow
def test_samples_that_count_from_0_again_are_new(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """All of them were removed, and the server started again."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    trainer = DrafterTrainer(path, folder, draft, TrainerOptions(**QUICK))
    assert trainer.look()
    chosen = trainer._replay.choose(-1, 10**6, 64, np.random.default_rng(0))
    for sample in folder.samples.iterdir():
        sample.unlink()
    traffic(path, folder.path, draft, seed=1, n=24)
    # Files of the same names that hold other texts.
    loaded = trainer._replay.load(*chosen)
    assert (loaded.training, loaded.held_out) == ([], [])
    traffic(path, folder.path, draft, seed=2)
    assert trainer.look()


@pytest.mark.slow
def test_it_begins_again_from_the_one_before(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    options = TrainerOptions(**QUICK, epochs=8, better_by=0, keep=1)
    trainer = DrafterTrainer(path, folder, draft, options)
    first = {name: one.clone() for name, one in trainer._head.state_dict().items()}
    assert trainer.look()
    assert trainer.reference == 1
    second = {name: one.clone() for name, one in trainer._head.state_dict().items()}
    traffic(path, folder.path, draft, seed=1)
    assert trainer.look()
    assert trainer.reference == 2
    # The serving side uses 1, so it stays.
    assert sorted(one.name for one in folder.checkpoints.iterdir()) == ["1", "2"]
    for given_up, left, expected in ((2, 1, second), (1, 0, first)):
        folder.refuse(given_up, "tokens per round fell", {})
        assert not trainer.look()
        assert trainer.reference == left
        for name, one in trainer._head.state_dict().items():
            assert torch.equal(one, expected[name])
        assert DrafterTrainer(path, folder, draft, options).reference == left
    again = [one for one in read_events(folder.log) if one["event"] == "began again"]
    assert [(one["given_up"], one["draft"]) for one in again] == [(2, 1), (1, 0)]
    assert folder.next_number() == 3


@pytest.mark.slow
@pytest.mark.parametrize("when", ["to_gguf", "publish"])
def test_a_full_disk_ends_no_training(
    when: str, path: Path, weights: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be published is trained on, and leaves nothing."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    trainer = DrafterTrainer(path, folder, draft, TrainerOptions(**QUICK, epochs=8, better_by=0))

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        owner: Any = trainer_module if when == "to_gguf" else folder
        patch.setattr(owner, when, full)
        assert trainer.look()
    assert trainer.reference == 0
    assert [*folder.drafters.iterdir(), *folder.checkpoints.iterdir()] == []
    (event,) = [one for one in read_events(folder.log) if one["event"] == "not published"]
    assert "No space left" in event["reason"]
    traffic(path, folder.path, draft, seed=1)
    assert trainer.look()
    assert trainer.reference == 1


@pytest.mark.slow
def test_nothing_worse_is_published(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """After a cycle that did harm, the next one begins with what is in use."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    trainer = DrafterTrainer(path, folder, draft, TrainerOptions(**QUICK, epochs=20))
    first = {name: one.clone() for name, one in trainer._head.state_dict().items()}
    assert trainer.look()
    assert trainer.reference == 1
    in_use = {name: one.clone() for name, one in trainer._in_use.items()}
    assert any(not torch.equal(in_use[name], one) for name, one in first.items())
    traffic(path, folder.path, draft, seed=1)
    trainer.options = TrainerOptions(**{**QUICK, "learning_rate": 30})
    assert trainer.look()
    assert trainer.reference == 1
    assert folder.candidates() == [1]
    assert all(torch.equal(trainer._head.state_dict()[name], one) for name, one in in_use.items())


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_trainer_goes_on(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """kill -9 in a cycle: the next one begins with what was published last, and nothing broken is left."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    traffic(path, folder.path, draft)
    command = [
        sys.executable,
        "-m",
        "llamatap",
        "cotrain",
        str(path),
        str(folder.path),
        "--draft",
        str(draft),
    ]
    command += ["--min-tokens", "200", "--new-tokens", "100", "--batch-tokens", "256", "--device", "cpu"]
    command += ["--learning-rate", "3e-3", "--poll-seconds", "0.1", "--threads", "1", "--nice", "0"]
    for attempt in (1, 2):
        # The second cycle of each takes forever.
        more = ["--epochs", "20" if attempt == 1 else "1000000"]
        process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)
        try:
            if attempt == 1:
                wait_for(lambda: folder.published(1) is not None, process)
                with pytest.raises(lt.InvalidInputError, match="another process trains in"):
                    folder.lock("trainer")
            else:
                wait_for(
                    lambda: sum(one["event"] == "trainer ready" for one in read_events(folder.log)) == 2,
                    process,
                )
                time.sleep(1)
        finally:
            process.kill()
            process.communicate()
    ready = [one["draft"] for one in read_events(folder.log) if one["event"] == "trainer ready"]
    assert ready == [0, 1]
    assert folder.candidates() == [1]
    for leftover in (folder.drafters / ".2.gguf.0a1b2c3d", folder.path / ".draft-abc"):
        leftover.mkdir()
    process = subprocess.Popen(
        [*command, "--epochs", "1000000"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(
            lambda: sum(one["event"] == "trainer ready" for one in read_events(folder.log)) == 3, process
        )
        assert not list(folder.drafters.glob(".*"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert (
            process.communicate()[1] == f"trains on what a server writes into {folder.path}; Ctrl-C ends it\n"
        )
    finally:
        process.kill()
        process.communicate()
    assert read_events(folder.log)[-1]["reason"] == "stopped"


@pytest.mark.slow
def test_a_killed_server_goes_on(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    """kill -9 of the serving side: its trainer goes on, and the next server takes what that publishes."""
    draft = draft_of("eagle3", path, weights, tmp_path)
    folder = CoTrainFolder(tmp_path / "f")
    code = f"""
import sys
import numpy as np, llamatap as lt
from llamatap.train import CoTrainer, CoTrainOptions
model = lt.Model({str(path)!r})
context = model.context(n_ctx=1024, n_seq_max=8, n_threads=1)
options = CoTrainOptions(trial_rounds=50, poll_seconds=0.1, log_seconds=0.5)
arguments = "--min-tokens 200 --new-tokens 100 --batch-tokens 256 --epochs 8 --learning-rate 3e-3 "
arguments += "--poll-seconds 0.1 --threads 1 --nice 0 --device cpu"
cotrainer = CoTrainer(
    model, {str(folder.path)!r}, {str(draft)!r}, options, trainer_arguments=arguments.split()
)
drafter = cotrainer.drafter(context, n_max=3)
rng = np.random.default_rng(0)
while True:
    prompts = [rng.integers(3, 13, 3).tolist() for _ in range(8)]
    list(lt.generate(context, prompts, drafter, max_tokens=30, ignore_eos=True))
"""
    pids: set[int] = set()

    def count(name: str) -> int:
        events = read_events(folder.log)
        pids.update(one["pid"] for one in events if one["event"] == "trainer started")
        return sum(one["event"] == name for one in events)

    server: subprocess.Popen[str]
    try:
        for attempt in (1, 2):
            server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
            try:
                wait_for(lambda n=attempt: count("serving started") == n, server)  # type: ignore[misc]
                wait_for(lambda: count("acceptance") > 0 and count("swapped") > 0, server)
            finally:
                server.kill()
                server.communicate()
            said = folder.serving_side()
            assert said is not None
            assert said.in_use > 0
            # It goes on, with the texts that are there.
            assert folder.is_locked("trainer")
    finally:
        count("")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    started = [one["draft"] for one in read_events(folder.log) if one["event"] == "serving started"]
    assert started[0] == 0
    assert started[1] > 0
    # One trainer outlived both servers.
    assert len(pids) == 1


def test_refusals(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    draft = draft_of("eagle3", path, weights, tmp_path)
    with pytest.raises(lt.ModelNotFoundError, match="no such file"):
        train_in_folder(path, tmp_path / "f", tmp_path / "none.gguf")
    with pytest.raises(lt.UnsupportedError, match="llama"):
        train_in_folder(path, tmp_path / "f", path)
    traffic(path, tmp_path / "g", draft, n=1)
    other = TinyLlama(seed=4).write(tmp_path / "other.gguf")
    with pytest.raises(lt.InvalidInputError, match=r"belongs to another target, tiny\.gguf"):
        train_in_folder(other, tmp_path / "g", draft)
    found = subprocess.run(
        [sys.executable, "-m", "llamatap", "cotrain", str(path), str(tmp_path / "f"), "--draft", "none.gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (1, "llamatap: no such file: none.gguf\n")


def test_the_plot_is_drawn(path: Path, weights: TargetWeights, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draft = draft_of("eagle3", path, weights, tmp_path)
    traffic(path, tmp_path / "f", draft, n=8)
    train_in_folder(path, tmp_path / "f", draft, TrainerOptions(**QUICK, minutes=0.001))
    assert (tmp_path / "f" / "acceptance.png").read_bytes()[:4] == b"\x89PNG"
