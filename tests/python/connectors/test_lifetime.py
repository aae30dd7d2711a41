"""How long samples in shared memory live, and which process ends them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stored_samples import WRITER, check, end, states, writer

from llamatap.connectors import FileConnector, SharedMemoryConnector, shared_memory


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test-{uuid.uuid4().hex}"
    yield found
    shutil.rmtree(SharedMemoryConnector(found).folder)


def names(connector: FileConnector) -> list[str]:
    return sorted(path.name for path in connector.folder.iterdir())


FORKING = """
import os
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(len(list(connector.folder.glob("*.safetensors"))), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "sys.exit(1)", "raise ValueError"])
def test_a_process_that_exits_leaves_nothing(how: str, name: str) -> None:
    """A process cleans up whether it succeeds or fails; its forked child removes nothing when it exits."""
    mine = SharedMemoryConnector(name)
    mine.put(states(6), index=3)
    before = names(mine)
    code = WRITER.replace("sys.stdin.readline()\n", FORKING) + ("" if how == "return" else f"{how}\n")
    process, _ = writer(name, code)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == 5 + 1
    held = mine.get_cached(0)
    end(process)
    assert names(mine) == before
    check(held, 9, mask=[0, 0, 0, 1, 1])
    check(mine.get_cached(3), 6)


@pytest.mark.slow
def test_setup_removes_what_killed_ones_left(name: str) -> None:
    reader = SharedMemoryConnector(name)
    process, params = writer(name)
    end(process, kill=True)
    check(reader.get_generated(params[3]), 3)
    reader.setup()
    assert names(reader) == []


@pytest.mark.slow
def test_what_a_living_one_puts_in_place_is_not_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living process puts its sample between the look at a dead one's sample and the removal."""
    process, _ = writer(name)
    living, reader = SharedMemoryConnector(name), SharedMemoryConnector(name)
    living.put(states(5), index=8)
    end(process, kill=True)
    putting: list[threading.Thread] = []
    look = shared_memory._writer_of

    def look_and_wait(path: Path) -> object:
        found = look(path)
        if path.name == "hs_0.safetensors":
            putting.append(threading.Thread(target=living.put, args=(states(7),), kwargs={"index": 0}))
            putting[-1].start()
            # Without the lock, the removal would be done by now.
            putting[-1].join(0.5)
        return found

    monkeypatch.setattr(shared_memory, "_writer_of", look_and_wait)
    reader.setup()
    (thread,) = putting
    thread.join()
    check(reader.get_cached(0), 7)
    check(reader.get_cached(8), 5)


SPAWNED = """
import pickle, sys
from support.stored_samples import states

connector = pickle.loads(bytes.fromhex(sys.argv[1]))
assert connector.get_cached(0)["token_ids"].tolist() == [1, 2, 3, 4, 5]
connector.put(states(2), index=1)
print(connector.max_bytes, connector.get_cached(1)["token_ids"].tolist())
"""


@pytest.mark.slow
def test_loaders_workers_have_it(name: str, tmp_path: Path) -> None:
    """Spawned workers, like those of speculators, own the samples that they put."""
    connectors: list[Any] = [
        SharedMemoryConnector(name, max_bytes=98765432100),
        FileConnector(tmp_path / "states"),
    ]
    for connector in connectors:
        connector.put(states(1), index=0)
    given = [pickle.dumps(connector).hex() for connector in connectors]
    found = subprocess.run(
        [sys.executable, "-c", SPAWNED, given[0]],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout == "98765432100 [2, 3, 4, 5, 6]\n"
    assert connectors[0].get_cached(1) is None
    for connector, one in zip(connectors, given, strict=True):
        check(pickle.loads(bytes.fromhex(one)).get_cached(0), 1)
        check(connector.get_cached(0), 1)
