from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from support.datasets import assert_same, random_rows, read_states, visible_files, write_lines
from support.numerics import computes_with_nan
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset
from llamatap.dataset.folder import DatasetFolder

Options = dataset.Options

#: A run that takes its time, and tells of each batch as it is computed: MODEL INPUT FOLDER LOG LAYOUT.
PROGRAM = """
import sys, time
import llamatap as lt
from llamatap import dataset
from llamatap.dataset import job

class Slow(lt.Extractor):
    def __call__(self, inputs, *rest, **options):
        found = super().__call__(inputs, *rest, **options)
        if rest and isinstance(found, list):
            with open(sys.argv[4], "a") as log:
                log.write("computed\\n")
            print("computed", flush=True)
        time.sleep(0.004)
        return found

class SlowLayout(dataset.LAYOUTS[sys.argv[5]]):
    def write(self, *arguments):
        time.sleep(0.002)
        super().write(*arguments)

job.Extractor = Slow
# The disk is slower than the computation, so several batches wait.
dataset.LAYOUTS[sys.argv[5]] = SlowLayout
with lt.Model(sys.argv[1]) as model:
    options = dataset.Options(
        layers=[1, 2], layout=sys.argv[5], batch_tokens=64, resume=True, context={"n_threads": 1}
    )
    print(dataset.write(model, sys.argv[2], sys.argv[3], options).n_written)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["speculators", "npy"])
def test_killed_at_any_moment(layout: str, tiny_path: Path, tmp_path: Path) -> None:
    rows = random_rows(4, 150, longest=40)
    path = write_lines(tmp_path / "in.jsonl", rows)
    draw = random.Random(5)

    def start(folder: str) -> subprocess.Popen[str]:
        command: list[str | Path] = [
            sys.executable,
            "-c",
            PROGRAM,
            tiny_path,
            path,
            tmp_path / folder,
            tmp_path / f"{folder}.log",
            layout,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start("calm") as calm:
        calm.communicate()
        assert calm.returncode == 0
    n_batches = len((tmp_path / "calm.log").read_text().splitlines())
    assert n_batches > 40

    states = tmp_path / "killed"
    known: dict[Path, int] = {}

    def inodes() -> dict[Path, int]:
        found = (*states.glob("hidden_states/hs_*"), *states.glob("layer_*"))
        return {path: path.stat().st_ino for path in found}

    n_kills = 0
    while True:
        with start("killed") as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(draw.randint(1, 12))]
            time.sleep(draw.random() * 0.01)
            # It finished: the last line is the number of samples written, or there is none.
            if lines[-1] != "computed\n":
                process.communicate()
                assert process.returncode == 0
                break
            process.kill()
        n_kills += 1
        there = inodes()
        # Existing files stay and were not written again.
        assert there.items() >= known.items()
        known = there
    assert n_kills > 3
    assert inodes().items() >= known.items()
    assert_same(tmp_path / "killed", tmp_path / "calm")
    # Only a batch that was being handed over is computed again.
    repeated = len((tmp_path / "killed.log").read_text().splitlines()) - n_batches
    assert 0 <= repeated <= n_kills
    assert not (states / ".llamatap" / "computed").exists()
    assert [path for path in states.rglob(".*.????????") if path.is_dir()] == []


def test_what_was_computed_is_written_by_the_next_run(
    tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(14, 30)
    options: dict[str, Any] = {"layers": [1, 2], "batch_tokens": 64, "dtype": "float32"}
    layout = dataset.LAYOUTS["speculators"]
    write = layout.write

    def failing(self: Any, index: int, states: Any) -> None:
        if index > 9:
            raise OSError(errno.ENOSPC, "no room")
        write(self, index, states)

    monkeypatch.setattr(layout, "write", failing)
    with pytest.raises(OSError, match="no room"):
        dataset.write(tiny_model, rows, tmp_path / "o", Options(**options))
    monkeypatch.undo()
    kept = tmp_path / "o" / ".llamatap" / "computed"
    (one, *_) = sorted(kept.iterdir())
    data = one.read_bytes()
    # Files that are not whole, or of before a power failure, are not taken.
    (kept / "1000").write_bytes(data[:-4])
    (kept / "1001").write_bytes(b"")
    head = json.loads(data.partition(b"\n")[0])
    head["boot"] = "another"
    (kept / "1002").write_bytes(json.dumps(head).encode() + b"\n" + bytes(len(data.partition(b"\n")[2])))
    computed: list[list[int]] = []

    class Telling(lt.Extractor):
        def __call__(self, inputs: Any, *rest: Any, **named: Any) -> Any:
            if isinstance(inputs[0], np.ndarray):
                computed.extend(one.tolist() for one in inputs)
            return super().__call__(inputs, *rest, **named)

    monkeypatch.setattr("llamatap.dataset.job.Extractor", Telling)
    report = dataset.write(tiny_model, rows, tmp_path / "o", Options(**options, resume=True))
    assert report.complete
    assert computed
    saved = [rows[index]["input_ids"] for index in head["samples"]]
    assert not [tokens for tokens in saved if tokens in computed]
    monkeypatch.undo()
    dataset.write(tiny_model, rows, tmp_path / "calm", Options(**options))
    assert_same(tmp_path / "o", tmp_path / "calm")


def test_a_worker_leaves_to_others_what_they_computed(
    tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers may be alive and still writing."""
    rows = random_rows(14, 30)
    layout = dataset.LAYOUTS["speculators"]
    folder = tmp_path / "o"

    def options(rank: int) -> Options:
        return Options(layers=[1, 2], batch_tokens=64, resume=True, rank=rank, world_size=2)

    def failing(self: Any, index: int, states: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(layout, "write", failing)
        with pytest.raises(OSError, match="no room"):
            dataset.write(tiny_model, rows, folder, options(0))
    kept = {path: path.read_bytes() for path in (folder / ".llamatap" / "computed").iterdir()}
    (index, *_) = json.loads(next(iter(kept.values())).partition(b"\n")[0])["samples"]
    half = folder / "hidden_states" / f".hs_{index}.safetensors.12345678"
    half.mkdir()
    assert not dataset.write(tiny_model, rows, folder, options(1)).complete
    assert half.is_dir()
    assert {path: path.read_bytes() for path in kept} == kept
    assert dataset.write(tiny_model, rows, folder, options(0)).complete
    assert not half.exists()
    dataset.write(tiny_model, rows, tmp_path / "calm", Options(layers=[1, 2], batch_tokens=64))
    assert_same(folder, tmp_path / "calm")


def interrupted(model: lt.Model, rows: list[dict[str, Any]], folder: Path, options: Options) -> None:
    """A run that ends after some batches."""

    class EnoughError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        if done > total // 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        dataset.write(model, rows, folder, options, progress=progress)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": [1, 3]}, r"layers is \[1, 2, 4\] there and \[1, 3, 4\] here"),
        ({"dtype": "float32"}, "dtype is 'bfloat16' there and 'float32' here"),
        ({"max_length": 30}, "max_length is 4096 there and 30 here"),
        ({"batch_tokens": 128}, "batch_tokens is 64 there and 128 here"),
        ({"date": "2001-02-03"}, "date is '.*' there and '2001-02-03' here"),
        ({"template_variables": {"x": 1}}, "template_variables is {} there and {'x': 1} here"),
        ({"context": {"type_k": "f32"}}, "type_k is 'f16' there and 'f32' here"),
        ({"context": {"n_ubatch": 32}}, "context is {} there and {'n_ubatch': 32} here"),
        ({"layout": "npy"}, "layout is 'speculators' there and 'npy' here"),
        ({"template": "x"}, "template is None there and 'x' here"),
        ({"min_tokens": 3}, "min_tokens is 2 there and 3 here"),
        ({"min_loss_tokens": 2}, "min_loss_tokens is 1 there and 2 here"),
    ],
)
def test_resume_takes_the_same_alone(
    tiny_model: lt.Model, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    rows = random_rows(6, 30)
    options: dict[str, Any] = {"layers": [1, 2], "batch_tokens": 64}
    interrupted(tiny_model, rows, tmp_path / "o", Options(**options))
    before = visible_files(tmp_path / "o")
    with pytest.raises(lt.InvalidInputError, match=named) as caught:
        dataset.write(tiny_model, rows, tmp_path / "o", Options(**{**options, "resume": True, **change}))
    # Where the hash differs, the error says what it is of.
    assert ("samples_sha256 is of" in str(caught.value)) == ("samples_sha256 is '" in str(caught.value))
    assert visible_files(tmp_path / "o") == before


def test_resume_of_another_model_or_input(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows = random_rows(7, 30)
    options = Options(layers=[1, 2], batch_tokens=64)
    interrupted(tiny_model, rows, tmp_path / "o", options)
    resumed = Options(layers=[1, 2], batch_tokens=64, resume=True)
    other_path = TinyLlama(seed=1).write(tmp_path / "other.gguf")
    with lt.Model(other_path) as other, pytest.raises(lt.InvalidInputError, match="model_sha256 is"):
        dataset.write(other, rows, tmp_path / "o", resumed)
    with lt.Model(other_path) as other:
        other_path.unlink()
        with pytest.raises(lt.InvalidInputError, match=r"other\.gguf is gone or was replaced"):
            dataset.write(other, rows, tmp_path / "o", resumed)
    with lt.Model(tiny_model.path, weights="f16") as other:
        with pytest.raises(lt.InvalidInputError, match="weights is None there and 'f16' here"):
            dataset.write(other, rows, tmp_path / "o", resumed)
        interrupted(other, rows, tmp_path / "f16", options)
    with pytest.raises(lt.InvalidInputError, match="weights is 'f16' there and None here"):
        dataset.write(tiny_model, rows, tmp_path / "f16", resumed)
    changed = [*rows[:-1], {**rows[-1], "loss_mask": [1] * len(rows[-1]["input_ids"])}]
    with pytest.raises(
        lt.InvalidInputError, match=r"samples_sha256 is .*\(samples_sha256 is the hash of token ids"
    ):
        dataset.write(tiny_model, changed, tmp_path / "o", resumed)
    with pytest.raises(lt.InvalidInputError, match="already holds a data set; continue it"):
        dataset.write(tiny_model, rows, tmp_path / "o", options)
    report = dataset.write(tiny_model, rows, tmp_path / "o", resumed)
    assert report.complete
    assert 0 < report.n_written < 30
    dataset.write(tiny_model, rows, tmp_path / "calm", options)
    assert_same(tmp_path / "o", tmp_path / "calm")
    # Nothing is left to do.
    assert dataset.write(tiny_model, rows, tmp_path / "o", resumed).n_written == 0
    # Files that were removed or cut since are written again.
    states = tmp_path / "o" / "hidden_states"
    (states / "hs_3.safetensors").unlink()
    os.truncate(states / "hs_7.safetensors", 100)
    (tmp_path / "o" / "state.json").unlink()
    assert dataset.write(tiny_model, rows, tmp_path / "o", resumed).n_written == 2
    assert_same(tmp_path / "o", tmp_path / "calm")
    (tmp_path / "o" / "llamatap.json").write_text('{"status": "x", "made_with": {}}')
    with pytest.raises(
        lt.InvalidInputError, match=r"llamatap\.json is not the manifest of a llamatap data set"
    ):
        dataset.write(tiny_model, rows, tmp_path / "o", resumed)


def test_a_file_cut_short_is_written_again(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows = random_rows(8, 30)
    options: dict[str, Any] = {"layers": [1, 2], "batch_tokens": 64}
    interrupted(tiny_model, rows, tmp_path / "o", Options(**options))
    first = next((tmp_path / "o" / "hidden_states").glob("hs_*"))
    os.truncate(first, 100)
    (first.parent / f".{first.name}.01234567").mkdir()
    (first.parent / f".{first.name}.01234567" / first.name).write_text("half")
    (first.parent / ".mine").write_text("not ours")
    dataset.write(tiny_model, rows, tmp_path / "o", Options(**options, resume=True))
    assert (first.parent / ".mine").read_text() == "not ours"
    (first.parent / ".mine").unlink()
    dataset.write(tiny_model, rows, tmp_path / "calm", Options(**options))
    assert_same(tmp_path / "o", tmp_path / "calm")


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    """A model whose embedding of token 255 is NaN."""
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][255] = np.nan
    with lt.Model(tiny.write(tmp_path_factory.mktemp("nan") / "nan.gguf")) as model:
        yield model


@computes_with_nan
@pytest.mark.parametrize("world_size", [1, 3])
def test_states_that_are_no_numbers_are_left_out(spoilt: lt.Model, tmp_path: Path, world_size: int) -> None:
    rows = random_rows(9, 20)
    bad = [3, 4, 11, 18]
    for i in bad:
        rows[i] = {"input_ids": [7, 255, 8 + i]}
    for rank in range(world_size):
        options = Options(layers=[1, 2], batch_tokens=100, rank=rank, world_size=world_size)
        report = dataset.write(spoilt, rows, tmp_path / "o", options)
    assert report.complete
    assert report.n_samples == 16
    assert list(report.skipped) == bad
    assert "NaN or infinity in layers [1, 2, 4]" in report.skipped[3]
    # Files are numbered without a gap, and say themselves which row they are of.
    found = {}
    for i in range(16):
        tokens, states, metadata = read_states(tmp_path / "o" / "hidden_states" / f"hs_{i}.safetensors")
        assert np.isfinite(states.astype(np.float32)).all()
        found[int(metadata["row"])] = tokens.tolist()
    assert found == {i: row["input_ids"] for i, row in enumerate(rows) if i not in bad}
    assert len(list((tmp_path / "o" / "hidden_states").iterdir())) == 16
    with pyarrow.memory_map(str(tmp_path / "o" / "data-00000-of-00001.arrow")) as memory:
        table = pyarrow.ipc.open_stream(memory).read_all().to_pydict()
    files = [read_states(tmp_path / "o" / "hidden_states" / f"hs_{i}.safetensors")[0] for i in range(16)]
    assert table["input_ids"] == [tokens.tolist() for tokens in files]
    kinds = [json.loads(line) for line in (tmp_path / "o" / "skipped.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in kinds] == bad


@computes_with_nan
def test_moving_files_may_be_interrupted(
    spoilt: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(10, 20)
    for i in (2, 5, 9):
        rows[i] = {"input_ids": [7, 255, 8 + i]}
    options: dict[str, Any] = {"layers": [1], "batch_tokens": 100}
    dataset.write(spoilt, rows, tmp_path / "calm", Options(**options))
    replace = Path.replace
    moves = 0

    def failing(self: Path, target: Path) -> Path:
        nonlocal moves
        # Files are written in a folder of their own first.
        if self.name.startswith("hs_") and not self.parent.name.startswith("."):
            moves += 1
            if moves in (2, 4):
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            dataset.write(spoilt, rows, tmp_path / "o", Options(**options, resume=True))
    assert dataset.write(spoilt, rows, tmp_path / "o", Options(**options, resume=True)).n_written == 0
    assert_same(tmp_path / "o", tmp_path / "calm")


@computes_with_nan
def test_stop_at_states_that_are_no_numbers(spoilt: lt.Model, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6]}, {"input_ids": [5, 255]}]
    with pytest.raises(lt.InvalidInputError, match=r"row 1: NaN or infinity in layers \[1, 4\]"):
        dataset.write(spoilt, rows, tmp_path / "o", Options(layers=[1], on_error="stop"))
    with pytest.raises(lt.InvalidInputError, match="no sample has finite states"):
        dataset.write(spoilt, rows[1:], tmp_path / "p", Options(layers=[1]))


def test_one_run_at_a_time(tiny_model: lt.Model, tmp_path: Path) -> None:
    rows = random_rows(11, 30)
    inside, go = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        inside.set()
        go.wait(60)

    options = Options(layers=[1], batch_tokens=64)
    with lt.Model(tiny_model.path) as other:
        first = threading.Thread(
            target=dataset.write, args=(other, rows, tmp_path / "o", options), kwargs={"progress": progress}
        )
        first.start()
        try:
            assert inside.wait(60)
            for rank, world in ((0, 1), (1, 2)):
                again = Options(layers=[1], batch_tokens=64, resume=True, rank=rank, world_size=world)
                with pytest.raises(lt.BusyError, match="another run is writing to"):
                    dataset.write(tiny_model, rows, tmp_path / "o", again)
        finally:
            go.set()
            first.join()
    with DatasetFolder(tmp_path / "o").used(0, 2):
        with DatasetFolder(tmp_path / "o").used(1, 2):
            pass
        # Another number of workers shares the samples out otherwise.
        for rank, world in ((0, 2), (1, 3), (0, 1)):
            with pytest.raises(lt.BusyError), DatasetFolder(tmp_path / "o").used(rank, world):
                pass
    with DatasetFolder(tmp_path / "o").used(1, 3):
        pass


def test_a_disk_that_is_full_or_read_only(
    tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        rows = random_rows(13, 60)
        options: dict[str, Any] = {"layers": [1, 2], "batch_tokens": 64}
        # Somebody else filled it in the meantime.
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**12}))
        with pytest.raises(OSError, match=r"hs_|computed") as caught:
            dataset.write(tiny_model, rows, folder / "o", Options(**options))
        assert caught.value.errno == errno.ENOSPC
        there = visible_files(folder / "o")
        assert 0 < len(there) < 60
        for name in there:
            if name.suffix == ".safetensors":
                read_states(folder / "o" / name)
        subprocess.run(["mount", "-o", "remount,size=4m,ro", folder], check=True)
        with pytest.raises(OSError, match="small") as caught:
            dataset.write(tiny_model, rows, folder / "o", Options(**options, resume=True))
        assert caught.value.errno == errno.EROFS
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        report = dataset.write(tiny_model, rows, folder / "o", Options(**options, resume=True))
        assert report.complete
        dataset.write(tiny_model, rows, tmp_path / "calm", Options(**options))
        assert_same(folder / "o", tmp_path / "calm")
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_power_failure(tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were written into a mapped file, and not on the disk, may be zero afterwards."""
    rows = random_rows(15, 30)
    options: dict[str, Any] = {"layers": [1, 2], "layout": "npy", "batch_tokens": 64}
    dataset.write(tiny_model, rows, tmp_path / "calm", Options(**options))
    folder = tmp_path / "o"
    n_tokens = sum(len(row["input_ids"]) for row in rows)
    synced: list[int] = []

    def progress(done: int, total: int) -> None:
        if done > total // 3 and not synced:
            (folder / ".llamatap" / "written").read_bytes()
            synced.append(done)
            monkeypatch.setattr("llamatap.dataset.layouts.npy._INTERVAL", 0.0)
        elif synced and done > total // 2:
            monkeypatch.setattr("llamatap.dataset.layouts.npy._INTERVAL", 1e9)
        if done > total * 3 // 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset.write(tiny_model, rows, folder, Options(**options), progress=progress)
    marks = np.frombuffer((folder / ".llamatap" / "written").read_bytes(), np.uint8)
    assert set(marks.tolist()) == {0, 1, 2}
    monkeypatch.setattr("llamatap.dataset.layouts.npy.boot_id", lambda: "another")
    lengths = np.array([len(row["input_ids"]) for row in rows])
    starts = np.cumsum(lengths) - lengths
    for layer in (1, 2, 4):
        array = np.load(folder / f"layer_{layer}.npy", mmap_mode="r+")
        for index in np.flatnonzero(marks == 1):
            array[starts[index] : starts[index] + lengths[index]] = 0
    report = dataset.write(tiny_model, rows, folder, Options(**options, resume=True))
    assert report.complete
    assert report.n_tokens == n_tokens
    assert report.n_written == int((marks < 2).sum())
    assert_same(folder, tmp_path / "calm")
    after = np.frombuffer((folder / ".llamatap" / "written").read_bytes(), np.uint8)
    assert (after > 0).all()


@pytest.mark.parametrize("layout", ["speculators", "npy"])
def test_what_a_killed_run_left_half_written(layout: str, tiny_model: lt.Model, tmp_path: Path) -> None:
    """An array of a layer takes all of its room from the start: a copy for each kill would fill the disk."""
    options: dict[str, Any] = {"layers": [1], "layout": layout, "batch_tokens": 64}
    folder = tmp_path / "o"
    interrupted(tiny_model, random_rows(16, 20), folder, Options(**options))
    names = ("layer_1.npy", "index.npy", "state.json", "skipped.jsonl", "llamatap.json", ".llamatap/written")
    half = [(folder / name).with_name(f".{Path(name).name}.01234567") for name in names]
    for path in half:
        path.mkdir()
        (path / "half").write_text("half")
    (folder / ".mine").mkdir()
    assert dataset.write(tiny_model, random_rows(16, 20), folder, Options(**options, resume=True)).complete
    assert [path for path in half if path.exists()] == []
    assert (folder / ".mine").is_dir()
