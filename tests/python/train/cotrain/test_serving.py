"""The serving side of co-training: samples, their bounds, its folder, its options."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cotraining import F, Files, publish, serving, write_files
from support.generation import EXACT, ragged
from support.numerics import relative
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.rigged import write_rigged_model, wrong_at

import llamatap as lt
from llamatap.connectors.files import FileConnector
from llamatap.train import CoTrainer, CoTrainOptions
from llamatap.train.cotrain import folder as folder_module
from llamatap.train.cotrain.folder import CoTrainFolder
from llamatap.train.cotrain.sample_writer import sample_numbers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def test_samples_are_the_texts_and_their_states(tmp_path: Path) -> None:
    """In chunks of prompts, beside others, with drafts that are rejected."""
    target = TinyLlama().write(tmp_path / "target.gguf")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf")
    sizes: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 16, "n_batch": 32, "n_seq_max": 3, **EXACT}
    with (
        lt.Model(target) as model,
        model.context(**sizes) as context,
        CoTrainer(
            model, tmp_path / "f", draft, CoTrainOptions(poll_seconds=3600), start_trainer=False
        ) as cotrainer,
    ):
        drafter = cotrainer.drafter(context, n_max=3)
        prompts = ragged(np.random.default_rng(1), model.n_vocab, (70, 1, 9, 33, 5))
        texts = list(lt.generate(context, prompts, drafter, max_tokens=20, ignore_eos=True))
        assert sum(one.stats.accepted for one in texts) < sum(one.stats.drafted for one in texts)
        assert cotrainer.flush()
        assert cotrainer.dropped == {}
        reader = FileConnector(cotrainer.folder.samples)
        found = {}
        for number in sample_numbers(cotrainer.folder.samples):
            sample = reader.get_cached(number)
            assert sample is not None
            found[len(sample["token_ids"]) - 19] = sample
        with lt.Extractor(model, **EXACT) as extract:
            for text in texts:
                sample = found.pop(len(text.prompt))
                # The last token has no state: no pass has seen it.
                tokens = [*text.prompt.tolist(), *text.tokens.tolist()[:-1]]
                assert sample["token_ids"].tolist() == tokens
                assert sample["loss_mask"].tolist() == [0.0] * len(text.prompt) + [1.0] * 19
                assert sample["hidden_states"].dtype.name == "bfloat16"
                expected = extract(tokens, list(drafter.target_layers)).array
                assert drafter.target_layers[-1] == model.n_layer
                got = sample["hidden_states"].astype(np.float32)
                assert max(relative(a, b) for a, b in zip(got, expected, strict=True)) < 4e-3
        assert not found
        drafter.close()


def test_samples_are_bounded_in_bytes(files: Files, tmp_path: Path) -> None:
    """The oldest make room, those of an earlier process too."""
    limit = 100_000
    total = 0
    for _ in range(2):
        with serving(files, tmp_path, max_bytes=limit) as one:
            for _ in range(4):
                one.generate(4)
                assert one.cotrainer.flush()
                sizes = [path.stat().st_size for path in one.folder.samples.iterdir()]
                assert 0.7 * limit < sum(sizes) <= limit or total == 0
                total += 4
            assert one.cotrainer.dropped["oldest"] > 0
            numbers = sample_numbers(one.folder.samples)
            assert numbers == list(range(total - len(numbers), total))


def test_a_slow_disk_blocks_no_request(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    put = FileConnector.put

    def waiting(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return put(*arguments, **options)

    monkeypatch.setattr(FileConnector, "put", waiting)
    with serving(files, tmp_path, queue_bytes=40_000) as one:
        try:
            assert len(one.generate(12)) == 12
            # One is being written, some wait.
            dropped = one.cotrainer.dropped
            assert list(dropped) == ["queue full"]
            assert 4 < dropped["queue full"] < 11
        finally:
            gate.set()
        assert one.cotrainer.flush()
        assert len(sample_numbers(one.folder.samples)) == 12 - dropped["queue full"]


def test_a_full_disk_ends_nothing(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither samples nor what is told to the trainer; that is told as soon as there is room."""

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with serving(files, tmp_path, "right") as one:
        one.generate(8)
        assert one.cotrainer.flush()
        publish(one.folder, 1, files.drafts["wrong"])
        one.cotrainer.look()
        with monkeypatch.context() as patch:
            patch.setattr(FileConnector, "put", full)
            patch.setattr(folder_module, "_write", full)
            one.generate(6)
            assert one.cotrainer.in_use == 1
            one.cotrainer.look()
            one.generate(6)
            assert one.cotrainer.in_use == 0
            assert one.cotrainer.flush()
            assert one.cotrainer.dropped == {"no room on the disk": 12}
            one.generate(6)
            one.cotrainer.look()
            # Given up, although the folder does not say so.
            assert not one.drafter.has_offer
            assert list(one.folder.drafters.glob("*.refused.json")) == []
        one.cotrainer.look()
        assert (one.folder.drafters / "1.refused.json").exists()
        side = one.folder.serving_side()
        assert side is not None
        assert (side.in_use, side.before, side.before_rates) == (0, 0, None)
        monkeypatch.setattr(folder_module, "_write", full)
    # The folder was left nevertheless, and can be used again.
    with serving(files, tmp_path, "right") as one:
        one.generate(1)
    with (
        pytest.raises(OSError, match="No space left"),
        serving(files, tmp_path / "new", "right"),
    ):
        pass


def test_a_sample_that_cannot_be_removed_ends_nothing(files: Files, tmp_path: Path) -> None:
    (tmp_path / "samples" / "hs_0.safetensors" / "a").mkdir(parents=True)
    with serving(files, tmp_path, max_bytes=100_000) as one:
        one.generate(12)
        assert one.cotrainer.flush()
        assert one.cotrainer.dropped["cannot be written"] == 1
        assert len(sample_numbers(one.folder.samples)) > 3


@pytest.mark.parametrize(
    "changes", [{"in_use": []}, {"layers": 5}, {"before": "0"}, {"more": 1}, {"closed": None}], ids=str
)
def test_a_folder_of_another_version_is_refused(
    changes: dict[str, Any], files: Files, tmp_path: Path
) -> None:
    with serving(files, tmp_path) as one:
        one.generate(1)
    path = tmp_path / "serving.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with (
        pytest.raises(lt.InvalidInputError, match=r"serving\.json is not a file of co-training"),
        serving(files, tmp_path),
    ):
        pass


def test_bounds_of_a_text(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path, max_length=10) as one:
        one.generate(1)
        one.session.add([5] * 12, max_tokens=8)
        one.finish()
        assert one.cotrainer.flush()
        assert one.cotrainer.dropped == {"nothing generated": 1}
        sample = FileConnector(one.folder.samples).get_cached(0)
        assert sample is not None
        assert sample["loss_mask"].tolist() == [0.0] * 3 + [1.0] * 7
    with serving(files, tmp_path / "share", share=0.5) as one:
        one.generate(40, 4)
        assert one.cotrainer.flush()
        assert 10 < len(sample_numbers(one.folder.samples)) < 30


def test_texts_in_flight_take_bounded_memory(files: Files, tmp_path: Path) -> None:
    """Beyond it their samples are shorter, but whole up to there."""
    row = 2 * 4 * 64
    with serving(files, tmp_path, text_bytes=40 * row, draft="fair") as one:
        most = 0
        for i in range(4):
            one.add(i, 40)
        while one.session.pending:
            one.session.step()
            recorders = [found for found in one.drafter._recorders.values() if found is not None]
            most = max(most, sum(found.n_bytes for found in recorders))
        assert 36 * row < most <= 40 * row
        assert one.cotrainer.flush()
        reader = FileConnector(one.folder.samples)
        lengths = []
        for number in sample_numbers(one.folder.samples):
            sample = reader.get_cached(number)
            assert sample is not None
            tokens = sample["token_ids"].tolist()
            assert tokens[3:] == [F[token] for token in tokens[2:-1]]
            assert sample["hidden_states"].shape == (len(tokens), 4, 64)
            lengths.append(len(tokens))
        assert sum(lengths) <= 40
        assert len(lengths) == 4


def test_a_folder_is_of_one_server_and_one_target(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path / "f") as one:
        with (
            pytest.raises(lt.InvalidInputError, match="another process serves with"),
            serving(files, tmp_path / "f"),
        ):
            pass
        one.generate(1)
    other = write_rigged_model(tmp_path / "other.gguf", wrong_at(F, [9]))
    with (
        pytest.raises(lt.InvalidInputError, match=r"belongs to another target, target\.gguf"),
        serving(Files(other, files.drafts), tmp_path / "f"),
    ):
        pass
    with (
        pytest.raises(lt.InvalidInputError, match=r"on the layers \[1, 2, 3, 4\], this is eagle3 on \[0, 1"),
        serving(files, tmp_path / "f", "other layers"),
    ):
        pass
    with (
        pytest.raises(lt.InvalidInputError, match="co-training is for EAGLE-3 and MTP"),
        serving(Files(files.target, {"fair": files.target}), tmp_path / "g"),
    ):
        pass
    # Nothing of it is left behind.
    with serving(files, tmp_path / "f"), serving(files, tmp_path / "g"):
        pass


def test_what_a_killed_server_left(files: Files, tmp_path: Path) -> None:
    folder = CoTrainFolder(tmp_path)
    for leftover in (folder.samples / ".hs_3.safetensors.0a1b2c3d", tmp_path / ".serving.json.0a1b2c3d"):
        leftover.mkdir()
    with serving(files, tmp_path) as one:
        one.generate(2)
        assert one.cotrainer.flush()
        assert sorted(path.name for path in folder.samples.iterdir()) == [
            "hs_0.safetensors",
            "hs_1.safetensors",
        ]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"share": 0},
        {"share": 1.5},
        {"share": float("nan")},
        {"max_bytes": 0},
        {"margin": -1},
        {"poll_seconds": 0},
        {"trial_rounds": 0},
        {"max_length": 1},
    ],
    ids=str,
)
def test_options(changes: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError, match=next(iter(changes))):
        CoTrainOptions(**changes)


def test_the_serving_side_needs_no_pytorch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import llamatap.serve.workers.model_worker\n"
        "from llamatap.train import CoTrainer\n"
        "from llamatap.__main__ import main\n"
        "main(['cotrain', '--help'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "The trainer of co-training" in found.stdout
