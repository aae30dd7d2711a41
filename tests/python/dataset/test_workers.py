"""Workers of ``--rank`` and ``--world-size`` as real processes, at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.datasets import assert_same, random_rows, write_lines

import llamatap as lt
from llamatap import dataset

pytest.importorskip("pyarrow")

#: Several data sets one after another, each begun and ended together with the other worker:
#: MODEL INPUT FOLDER RANK ROUNDS BARRIER LAYOUT. Prints what each round's report says.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import llamatap as lt
from llamatap import dataset

model, rows, folder, rank, rounds, meeting, layout = sys.argv[1:]
rank, meeting = int(rank), Path(meeting)

def meet(name):
    # Wait for the other worker, so that both go on at the same moment.
    (meeting / f"{name}-{rank}").touch()
    until = time.monotonic() + 300
    while not (meeting / f"{name}-{1 - rank}").exists():
        if time.monotonic() > until:
            sys.exit(f"the other worker did not come to {name}")

class Together(dataset.Job):
    def _compute(self, work, wrote):
        super()._compute(work, wrote)
        meet(f"end-{Path(folder).name}-{number}")

with lt.Model(model) as model:
    for number in range(int(rounds)):
        options = dataset.Options(layers=[1, 2], layout=layout, batch_tokens=64, rank=rank, world_size=2,
                                  context={"n_threads": 1})
        job = Together(model, Path(rows), Path(folder) / str(number), options)
        meet(f"begin-{Path(folder).name}-{number}")
        report = job.run()
        print(json.dumps([report.n_written, report.complete]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["speculators", "npy"])
def test_two_workers_at_once(tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, layout: str) -> None:
    rounds = 8
    rows: list[Any] = random_rows(51, 24, longest=40)
    rows[5] = {"text": ""}
    path = write_lines(tmp_path / "in.jsonl", rows)
    (tmp_path / "meeting").mkdir()
    (tmp_path / "many").mkdir()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, tiny_path, path, tmp_path / "many"),
                *(str(rank), str(rounds), tmp_path / "meeting", layout),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        out, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
        found.append([json.loads(line) for line in out.splitlines()])
    options = dataset.Options(layers=[1, 2], layout=layout, batch_tokens=64, context={"n_threads": 1})
    dataset.write(tiny_model, path, tmp_path / "one", options)
    for number, reports in enumerate(zip(*found, strict=True)):
        written, complete = zip(*reports, strict=True)
        # Both did their part. Whoever settles last finishes; the other one may find it finished already.
        assert all(count > 0 for count in written)
        assert sum(written) == 23
        assert any(complete)
        assert_same(tmp_path / "many" / str(number), tmp_path / "one")
        assert (
            json.loads((tmp_path / "many" / str(number) / "llamatap.json").read_text())["status"]
            == "complete"
        )
