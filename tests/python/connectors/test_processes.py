"""Connectors: states put by one process and read by another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.generation import EXACT
from support.stored_samples import WRITER, check, end, states, values, writer

import llamatap as lt
from llamatap.connectors import (
    CallbackConnector,
    Connector,
    FileConnector,
    SharedMemoryConnector,
    Stored,
    connect,
    connectors,
)

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def name() -> Iterator[str]:
    """A name that nobody else uses; whatever is left under it is removed."""
    found = f"test-{uuid.uuid4().hex}"
    yield found
    shutil.rmtree(SharedMemoryConnector(found).folder)


@pytest.fixture(params=["files", "shared_memory"])
def connector(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> Connector:
    if request.param == "files":
        return connect("files", folder=tmp_path / "states")
    return connect("shared_memory", name=name)


def files_of(connector: Connector) -> list[str]:
    assert isinstance(connector, FileConnector)
    return sorted(path.name for path in connector.folder.iterdir() if path.is_file())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_put_is_read(dtype: str, connector: Connector) -> None:
    connector.setup()
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    first = connector.put(states(1, kind))
    second = connector.put(states(2, kind, n=1), loss_mask=[1])
    assert connector.put(states(3, kind), index=7, loss_mask=[0, 0, 1, 1, 0]) is not None
    assert first is not None
    assert second is not None
    # The parameters as they come out of JSON.
    one, other = (connector.get_generated(json.loads(json.dumps(one))) for one in (first, second))
    check(one, 1, dtype=dtype)
    check(other, 2, 1, dtype, [1])
    cached = connector.get_cached(7)
    check(cached, 3, dtype=dtype, mask=[0, 0, 1, 1, 0])
    assert connector.get_cached(6) is None
    # A new put makes another sample; the arrays already read stay.
    connector.put(states(4, kind), index=7)
    check(connector.get_cached(7), 4, dtype=dtype)
    check(cached, 3, dtype=dtype, mask=[0, 0, 1, 1, 0])
    assert len(files_of(connector)) == 3
    for _ in range(2):
        connector.delete(first["handle"])
        assert connector.get_generated({**first}) is None
        check(one, 1, dtype=dtype)
    check(connector.get_generated({"handle": second["handle"]}), 2, 1, dtype, [1])
    assert len(files_of(connector)) == 2


def test_nothing_is_copied_on_the_reading_side(connector: Connector) -> None:
    """A change of the file shows in the array; a change of the array does not reach the file."""
    assert isinstance(connector, FileConnector)
    large = lt.States(
        np.zeros((512, 3, 64), np.float32), np.arange(512, dtype=np.int32), (1, 2, 4), n_layer=4
    )
    connector.put(large, index=0)
    (path,) = connector.folder.glob("*.safetensors")
    found, again = connector.get_cached(0), connector.get_cached(0)
    assert found is not None
    assert again is not None
    mine = again["hidden_states"].view()
    mine.flags.writeable = True
    mine[0] = 5
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(7).tobytes())
    assert found["hidden_states"][-1, -1, -1] == 7
    assert found["hidden_states"][:-1].sum() == 0
    assert load_file(path)["hidden_states"][0].sum() == 0
    # The same memory by DLPack.
    given = np.from_dlpack(found["hidden_states"])
    assert np.shares_memory(given, found["hidden_states"])


def test_files_are_those_that_others_read(connector: Connector) -> None:
    """speculators' FileTransfer: hs_INDEX.safetensors, `hidden_states` and `token_ids`."""
    assert isinstance(connector, FileConnector)
    connector.put(states(1, np.float16), index=12)
    assert files_of(connector) == ["hs_12.safetensors"]
    found = load_file(connector.folder / "hs_12.safetensors")
    assert found["hidden_states"].tolist() == values(1).tolist()
    assert found["token_ids"].tolist() == [1, 2, 3, 4, 5]
    assert found["token_ids"].dtype == np.int64


@pytest.mark.parametrize("handle", ["/etc/hostname", "../x.safetensors", "", None, 3, "x.safetensors"])
def test_handles_of_elsewhere_are_refused(handle: Any, connector: Connector, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"mine")
    for one in (handle, str(other), f"{tmp_path}/states/../other.safetensors"):
        with pytest.raises(lt.InvalidInputError, match="expected a file of"):
            connector.get_generated({"hidden_states_path": one})
        with pytest.raises(lt.InvalidInputError, match="expected a file of"):
            connector.delete(one)
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345678",
        b"\xff" * 20,
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{}",
        b"\x09" + bytes(7) + b'{"a": 1} ',
    ],
)
def test_other_files_are_refused(data: bytes, connector: Connector) -> None:
    assert isinstance(connector, FileConnector)
    (connector.folder / "hs_0.safetensors").write_bytes(data)
    with pytest.raises(lt.InvalidInputError, match="holds no states"):
        connector.get_cached(0)


def test_spoilt_headers_are_refused(connector: Connector) -> None:
    """Shapes and places that do not fit the data."""
    assert isinstance(connector, FileConnector)
    connector.put(states(), index=0)
    path = connector.folder / "hs_0.safetensors"
    data = path.read_bytes()
    for old, new in (
        (b"[5,3,4]", b"[5,3,5]"),
        (b'"I64"', b'"I16"'),
        (b'"F32"', b'"F16"'),
        (b"token_", b"tokan_"),
    ):
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))
        with pytest.raises(lt.InvalidInputError, match="holds no states"):
            connector.get_cached(0)
    path.write_bytes(data[:-1])
    with pytest.raises(lt.InvalidInputError, match="holds no states"):
        connector.get_cached(0)


def test_what_is_no_sample_is_refused(connector: Connector) -> None:
    spoilt = values(1)
    spoilt[2, 1, 0] = np.inf
    tokens = np.arange(5, dtype=np.int32)
    for one, message in (
        (
            lt.States(spoilt, tokens, (1, 2, 4), n_layer=4),
            r"NaN or infinity in layers \[2\]: nothing was put",
        ),
        (lt.States(values(1)[0], tokens, (1, 2, 4), n_layer=4), "extract without pool="),
        (values(1), "states must be a States"),
    ):
        with pytest.raises(lt.InvalidInputError, match=message):
            connector.put(one)  # type: ignore[arg-type]
    for mask in ([1, 1], [[1] * 5], [0, 1, 2, 0, 0]):
        with pytest.raises(lt.InvalidInputError, match="loss_mask must be 0 or 1 for each of the 5 tokens"):
            connector.put(states(), loss_mask=mask)
    for index in (-1, 1.5, "x"):
        with pytest.raises(lt.InvalidInputError, match="index must be"):
            connector.put(states(), index=index)  # type: ignore[arg-type]
    assert files_of(connector) == []


def test_generations_are_put_as_they_end(connector: Connector, tiny_model: lt.Model) -> None:
    """Prompt and text are one sample, equal to a forward pass."""
    found: list[Any] = []
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        texts = lt.generate(
            context,
            [[5, 6, 7], [8, 9]],
            max_tokens=6,
            ignore_eos=True,
            states="full",
            prompt_states=True,
            layers=[1, -1],
            on_states=lambda one: found.append((one.index, connector.put_generation(one))),
        )
        tokens = [[*one.prompt.tolist(), *one.tokens.tolist()] for one in texts]
    assert sorted(index for index, _ in found) == [0, 1]
    for index, params in found:
        read = connector.get_generated(params)
        assert read is not None
        assert read["token_ids"].tolist() == tokens[index]
        assert read["loss_mask"].tolist() == [0] * (3 - index) + [1] * 6
        with lt.Extractor(tiny_model, **EXACT) as extractor:
            expected = extractor(tokens[index], [1, -1]).array
        np.testing.assert_allclose(read["hidden_states"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_two_processes_share_memory(kill: bool, name: str) -> None:
    process, params = writer(name)
    try:
        connector = SharedMemoryConnector(name)
        connector.setup()
        for k, one in enumerate(params):
            check(connector.get_generated(one), k)
        check(connector.get_cached(0), 9, mask=[0, 0, 0, 1, 1])
        held = connector.get_generated(params[1])
        for one in params[:2]:
            connector.delete(one["handle"])
        assert len(files_of(connector)) == 3
        # Another writer leaves the samples of a living process alone.
        mine = connector.put(states(5))
        assert len(files_of(connector)) == 4
    finally:
        end(process, kill)
    if kill:
        # They stay until another connector opens, even one that puts nothing.
        check(connector.get_generated(params[2]), 2)
        assert len(files_of(connector)) == 4
        SharedMemoryConnector(name)
    assert files_of(connector) == [Path(mine["handle"]).name]
    check(connector.get_generated(mine), 5)
    assert connector.get_generated(params[2]) is None
    assert connector.get_cached(0) is None
    check(held, 1)
    assert len(list(connector.folder.glob("writer-*"))) == 1


def test_the_memory_has_a_bound(name: str) -> None:
    free = shutil.disk_usage("/dev/shm").total
    assert SharedMemoryConnector(name).max_bytes == free // 2
    # 5 rows of 3 layers of 4 floats, and 5 ids: 280 bytes; a file has a header, too.
    first = SharedMemoryConnector(name).put(states(1), index=0)
    size = (SharedMemoryConnector(name).folder / "hs_0.safetensors").stat().st_size
    assert size > 280
    connector = SharedMemoryConnector(name, max_bytes=size + 280)
    second = connector.put(states(2))
    # A replaced sample makes room for the new one.
    connector.put(states(3), index=0)
    with pytest.raises(OSError, match=r"of 280 bytes does not fit: [\d,]+ of max_bytes=") as caught:
        connector.put(states(4))
    assert caught.value.errno == errno.ENOSPC
    assert len(files_of(connector)) == 2
    check(connector.get_generated(second), 2)
    check(connector.get_cached(0), 3)
    connector.delete(second["handle"])
    check(connector.get_generated(connector.put(states(4))), 4)
    assert first["handle"].endswith("hs_0.safetensors")
    assert SharedMemoryConnector(name, max_bytes=2**40).max_bytes == 2**40
    for wrong in (0, -1, 1.5, "1G"):
        with pytest.raises(lt.InvalidInputError, match="max_bytes must be"):
            SharedMemoryConnector(name, max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_a_dead_writer_left_makes_room(name: str) -> None:
    process, _ = writer(name)
    mine = SharedMemoryConnector(name, max_bytes=4600)
    # This process is now a writer; samples left by the other one stay until room is needed.
    mine.put(states(5))
    end(process, kill=True)
    assert len(files_of(mine)) == 6
    for k in range(20):
        mine.put(states(k), index=100 + k % 2)
        mine.put(states(k), index=200 + k % 2)
    assert len(files_of(mine)) == 5
    assert mine.get_cached(0) is None


@pytest.mark.slow
def test_a_forked_child_keeps_no_lock(name: str) -> None:
    """A loader's worker may outlive the process that put the samples."""
    code = WRITER.replace(
        "sys.stdin.readline()",
        "import os, time\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "sys.stdin.readline()",
    )
    process, params = writer(name, code)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        connector = SharedMemoryConnector(name)
        connector.put(states(6), index=3)
        assert files_of(connector) == ["hs_3.safetensors"]
        assert connector.get_generated(params[1]) is None
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
        if process.stdin is not None:
            process.stdin.close()


READER = """
import sys
from llamatap.connectors import connect

held = connect("shared_memory", name=sys.argv[1]).get_cached(0)
print("[]", flush=True)
sys.stdin.readline()
"""


def test_a_reader_that_dies_leaves_nothing(name: str) -> None:
    connector = SharedMemoryConnector(name)
    params = connector.put(states(1), index=0)
    before = sorted(path.name for path in connector.folder.rglob("*"))
    process, _ = writer(name, READER)
    end(process, kill=True)
    assert sorted(path.name for path in connector.folder.rglob("*")) == before
    check(connector.get_cached(0), 1)
    connector.delete(params["handle"])
    assert files_of(connector) == []


def test_the_memory_is_this_users(name: str) -> None:
    folder = SharedMemoryConnector(name).folder
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.parent.stat().st_mode & 0o077 == 0
    for wrong in ("", "../x", "a/b", ".", None):
        with pytest.raises(lt.InvalidInputError, match="name must be"):
            SharedMemoryConnector(wrong)  # type: ignore[arg-type]


def test_a_function_gets_what_is_put() -> None:
    seen: list[tuple[Stored, int | None]] = []
    connector = connect("callback", function=lambda stored, index: seen.append((stored, index)))
    connector.setup()
    assert connector.put(states(2), index=4, loss_mask=[0, 1, 1, 1, 1]) is None
    ((stored, index),) = seen
    assert index == 4
    assert stored["hidden_states"].tolist() == values(2).tolist()
    assert stored["token_ids"].tolist() == [2, 3, 4, 5, 6]
    assert stored["loss_mask"].tolist() == [0, 1, 1, 1, 1]
    assert connector.get_cached(4) is None
    assert connector.get_generated({"handle": "x"}) is None
    connector.delete("x")
    with pytest.raises(lt.InvalidInputError, match="function must take"):
        CallbackConnector(3)  # type: ignore[arg-type]


def test_connectors_are_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert connectors().keys() >= {"files", "shared_memory", "callback"}
    with pytest.raises(lt.InvalidInputError, match=r"no connector 'mooncake'; there are \[.*'files'"):
        connect("mooncake")
    # A package of somebody else's.
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[llamatap.connectors]\nnowhere = elsewhere_connector:Nowhere\nwrong = elsewhere_connector:Wrong\n"
    )
    (tmp_path / "elsewhere_connector.py").write_text(
        "from llamatap.connectors import CallbackConnector\n"
        "class Nowhere(CallbackConnector):\n"
        "    def __init__(self):\n"
        "        super().__init__(print)\n"
        "class Wrong:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(connect("nowhere")).__name__ == "Nowhere"
    with pytest.raises(
        lt.InvalidInputError, match=r"elsewhere_connector:Wrong is not a llamatap\.connectors"
    ):
        connect("wrong")
