"""Data sets by two workers of Ray on this machine; `nox -s ray` installs it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import TEMPLATE, assert_same, expected_states, random_rows, write_lines
from support.numerics import EXACT, computes_with_nan, relative
from support.tiny import TinyLlama

import llamatap as lt
from llamatap import dataset

ray = pytest.importorskip("ray")

from llamatap.ray import HiddenStates, cluster_write, write  # noqa: E402  needs ray
from llamatap.ray.worker import ModelLoading, Worker  # noqa: E402

# Ray's own warnings, and sockets that it leaves to the end of the process.
pytestmark = pytest.mark.filterwarnings("ignore")

Options = dataset.Options

#: Called in a worker with its part, before that is computed.
Before = Callable[[Worker, Sequence[Sequence[int]]], None]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # The GPUs are of Ray's bookkeeping alone.
    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False
    )
    yield
    ray.shutdown()


def options(**more: Any) -> Options:
    return Options(**{"layers": [1, 2], "batch_tokens": 64, **more})


def have_workers(monkeypatch: pytest.MonkeyPatch, before: Before) -> None:
    """Make workers call a function before each part."""

    class Preceded(Worker):
        def _compute(self, part: Sequence[Sequence[int]]) -> list[int]:
            before(self, part)
            return super()._compute(part)

    monkeypatch.setattr(cluster_write, "Worker", Preceded)


def test_two_workers(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = random_rows(61, 120)
    rows[17] = {"text": ""}
    path = write_lines(tmp_path / "in.jsonl", rows)
    (tmp_path / "pids").mkdir()
    pids, folder = tmp_path / "pids", tmp_path / "many"

    def before(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        import time

        (pids / str(os.getpid())).touch()
        # The first ones wait for each other, so that none does it all.
        until = time.monotonic() + 120
        while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.01)

    have_workers(monkeypatch, before)
    calls: list[tuple[int, int]] = []
    report = write(
        tiny_path,
        path,
        folder,
        options(),
        concurrency=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    found = {int(path.name) for path in pids.iterdir()}
    assert len(found) == 2
    assert os.getpid() not in found
    assert report.complete
    assert (report.n_samples, report.n_written, list(report.skipped)) == (119, 119, [17])
    lines = (folder / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [17]
    assert calls[0] == (0, report.n_tokens)
    assert calls[-1] == (report.n_tokens, report.n_tokens)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    dataset.write(tiny_model, path, tmp_path / "one", options())
    assert_same(folder, tmp_path / "one")
    # Nothing is left to do.
    assert write(tiny_path, path, folder, options(resume=True)).n_written == 0


@computes_with_nan
def test_states_that_are_no_numbers(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][255] = np.nan
    path = tiny.write(tmp_path / "nan.gguf")
    rows = random_rows(62, 30)
    rows[3], rows[20] = {"input_ids": [7, 255]}, {"input_ids": [255, 8]}
    report = write(path, rows, tmp_path / "many", options(layout="npy"))
    assert list(report.skipped) == [3, 20]
    assert "NaN or infinity in layers [1, 2, 4]" in report.skipped[20]
    with lt.Model(path) as model:
        dataset.write(model, rows, tmp_path / "one", options(layout="npy"))
    assert_same(tmp_path / "many", tmp_path / "one")
    with pytest.raises(lt.InvalidInputError, match=r"row (3|20): NaN or infinity"):
        write(path, rows, tmp_path / "stop", options(on_error="stop"))


def test_a_worker_that_dies_is_started_again(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(63, 60)
    died, folder = tmp_path / "died", tmp_path / "many"

    def before(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        if not died.exists():
            died.touch()
            # The state left by a process that dies while writing.
            half = folder / "hidden_states" / f".hs_{part[0][0]}.safetensors.0123abcd"
            half.mkdir()
            (half / f"hs_{part[0][0]}.safetensors").write_text("half")
            os._exit(1)

    have_workers(monkeypatch, before)
    report = write(tiny_path, rows, folder, options())
    assert died.exists()
    assert (report.n_written, report.complete) == (60, True)
    dataset.write(tiny_model, rows, tmp_path / "one", options())
    assert_same(folder, tmp_path / "one")


def test_a_worker_that_always_dies(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(64, 60)
    deaths = tmp_path / "deaths"

    def before(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        if any(40 in batch for batch in part):
            with deaths.open("a") as file:
                file.write("x")
            os._exit(1)

    with monkeypatch.context() as patch:
        have_workers(patch, before)
        with pytest.raises(lt.EngineError, match=r"a worker of Ray died, .* resume continues"):
            write(tiny_path, rows, tmp_path / "many", options(), retries=1)
    assert deaths.read_text() == "xx"
    there = {file.name: file.stat().st_ino for file in (tmp_path / "many" / "hidden_states").glob("hs_*")}
    assert 0 < len(there) < 60
    with pytest.raises(lt.InvalidInputError, match="already holds a data set; continue it"):
        write(tiny_path, rows, tmp_path / "many", options())
    # A data set is resumed by one process or by several.
    report = dataset.write(tiny_model, rows, tmp_path / "many", options(resume=True))
    assert (report.n_written, report.complete) == (60 - len(there), True)
    after = {file.name: file.stat().st_ino for file in (tmp_path / "many" / "hidden_states").iterdir()}
    assert after.items() >= there.items()
    dataset.write(tiny_model, rows, tmp_path / "one", options())
    assert_same(tmp_path / "many", tmp_path / "one")


def test_errors_of_a_worker(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(65, 20)

    def full(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        raise OSError(errno.ENOSPC, "no space left", "hs_1")

    with monkeypatch.context() as patch:
        have_workers(patch, full)
        with pytest.raises(OSError, match="no space left") as caught:
            write(tiny_path, rows, tmp_path / "full", options())
    assert caught.value.errno == errno.ENOSPC
    assert re.search(r"on \S+, process \d+:\nTraceback", str(caught.value.__cause__))

    other = TinyLlama(seed=1).write(tmp_path / "other.gguf")

    def replaced(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        worker.loading = ModelLoading(str(other), 0, None)

    with monkeypatch.context() as patch:
        have_workers(patch, replaced)
        with pytest.raises(lt.InvalidInputError, match=r"would compute other states: .*model_sha256 is"):
            write(tiny_path, rows, tmp_path / "other", options())

    with monkeypatch.context() as patch:
        # Like a machine that does not see the file.
        patch.setattr(ModelLoading, "__reduce__", lambda self: (ModelLoading, (f"{self.path}.x", 0, None)))
        with pytest.raises(lt.ModelNotFoundError, match=r"no such file: .*\.gguf\.x"):
            write(tiny_path, rows, tmp_path / "absent", options())
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("given", "cpus", "gpus"), [({}, 1, 0), ({"num_cpus": 0.5, "num_gpus": 0.25}, 0.5, 0.25)]
)
def test_resources(
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    cpus: float,
    gpus: float,
) -> None:
    seen = tmp_path / "seen"

    def before(worker: Worker, part: Sequence[Sequence[int]]) -> None:
        with seen.open("a") as file:
            file.write(
                json.dumps([ray.get_runtime_context().get_assigned_resources(), worker.loading.n_gpu_layers])
            )
            file.write("\n")

    have_workers(monkeypatch, before)
    write(tiny_path, random_rows(66, 8), tmp_path / "o", options(), concurrency=1, **given)
    for line in seen.read_text().splitlines():
        resources, layers = json.loads(line)
        assert (resources.get("CPU", 0), resources.get("GPU", 0)) == (cpus, gpus)
        assert layers == (-1 if gpus else 0)


def test_bad_arguments(tiny_path: Path, tmp_path: Path) -> None:
    def refused(match: str, own: Options | None = None, **given: Any) -> None:
        with pytest.raises(lt.InvalidInputError, match=match):
            write(tiny_path, random_rows(67, 3), tmp_path / "o", own or options(), **given)
        assert not (tmp_path / "o").exists()

    refused("leave out rank and world_size", options(rank=1, world_size=2))
    refused("concurrency must be", concurrency=0)
    refused("retries must be", retries=-1)
    refused("num_gpus must be a number of at least 0, not -1", num_gpus=-1)
    with pytest.raises(lt.ModelNotFoundError):
        write(tmp_path / "none.gguf", random_rows(67, 3), tmp_path / "o")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stage(tiny: TinyLlama, tmp_path: Path, dtype: str) -> None:
    path = tiny.write(tmp_path / "tiny.gguf", chat_template=TEMPLATE)
    rows: list[dict[str, Any]] = [{**row, "name": f"row {i}"} for i, row in enumerate(random_rows(68, 20))]
    rows[4] = {"input_ids": [5, 300], "loss_mask": [1, 1], "name": "row 4"}
    own = Options(layers=[3, 1], dtype=dtype, context=EXACT)
    found = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        HiddenStates,
        compute=ray.data.ActorPoolStrategy(size=1),
        fn_constructor_kwargs={"model": path, "options": own},
    )
    by_name = {row["name"]: row for row in found.iter_rows()}
    assert len(by_name) == 20
    for row in rows:
        one = by_name[row["name"]]
        assert set(one) == {"name", "input_ids", "loss_mask", "hidden_states", "error"}
        states = one["hidden_states"]
        if row["name"] == "row 4":
            assert "found 5..300" in one["error"]
            assert (states.shape, len(one["input_ids"])) == ((0, 2, tiny.n_embd), 0)
            continue
        assert one["error"] is None
        assert one["input_ids"].tolist() == row["input_ids"]
        assert one["loss_mask"].astype(int).tolist() == row["loss_mask"]
        expected = expected_states(tiny, row["input_ids"], [3, 1])
        if dtype == "bfloat16":
            assert states.dtype == np.uint16
            states = (states.astype(np.uint32) << 16).view(np.float32)
        assert states.shape == expected.shape
        assert relative(states, expected) < (1e-5 if dtype == "float32" else 4e-3)


def test_chats_in_the_stage(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "tiny.gguf", chat_template=TEMPLATE)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "thinking": "x"}]
    rows = [{"messages": turns}, {"messages": turns * 2}]
    own = Options(layers=[2])
    found = ray.data.from_items(rows).map_batches(
        HiddenStates,
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=1),
        fn_constructor_kwargs={"model": path, "options": own},
    )
    made = sorted(found.iter_rows(), key=lambda row: len(row["input_ids"]))
    with lt.Model(path) as model:
        samples = dataset.Job(model, rows, tmp_path / "o", own).samples
    for row, sample in zip(made, samples, strict=True):
        assert row["error"] is None
        assert row["input_ids"].tolist() == sample.tokens.tolist()
        assert row["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert row["hidden_states"].shape == (len(sample.tokens), 1, tiny.n_embd)
