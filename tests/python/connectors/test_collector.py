"""Collectors put each generation when it ends: which samples are dropped, and the data set of the rest."""

from __future__ import annotations

import errno
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT
from support.training import generation, states

import llamatap as lt
from llamatap.connectors import CallbackConnector, Collector, FileConnector, SharedMemoryConnector


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test-{uuid.uuid4().hex}"
    yield found
    shutil.rmtree(SharedMemoryConnector(found).folder)


def room_for(name: str, n: int) -> SharedMemoryConnector:
    """A connector that has room for n samples of [1] and [2, 3], beginning with none."""
    other = SharedMemoryConnector(f"{name}-other")
    Collector(other)(generation([1], [2, 3]))
    (file,) = other.folder.glob("*.safetensors")
    size = file.stat().st_size
    shutil.rmtree(other.folder)
    return SharedMemoryConnector(name, max_bytes=size * n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_generations_are_numbered_as_they_end(dtype: str | None, tmp_path: Path) -> None:
    connector = FileConnector(tmp_path)
    collect = Collector(connector) if dtype == "bfloat16" else Collector(connector, dtype=dtype)
    texts = [([1], [2, 3]), ([4, 5], [6]), ([], [7, 8])]
    for prompt, tokens in texts:
        collect(generation(prompt, tokens))
    assert len(collect) == 3
    assert collect.dropped == {}
    for i, (prompt, tokens) in enumerate(texts):
        found = connector.get_cached(i)
        assert found is not None
        assert found["token_ids"].tolist() == [*prompt, *tokens]
        assert found["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(tokens)
        assert str(found["hidden_states"].dtype) == (dtype or "float32")
        assert found["hidden_states"].astype(np.float32).tolist() == states([*prompt, *tokens], 2).tolist()
    assert connector.get_cached(3) is None


def test_what_has_no_room_is_dropped_and_texts_go_on(name: str, tiny_model: lt.Model) -> None:
    """Samples without room are dropped: an error in on_states would end all texts in flight."""
    connector = SharedMemoryConnector(name, max_bytes=1)
    collect = Collector(connector)
    mode: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "states": "full", "prompt_states": True}
    prompts = [[5, 6, 7], [8, 9], [3]]
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        with pytest.raises(OSError, match="does not fit"):
            list(lt.generate(context, prompts, layers=[1, -1], on_states=connector.put_generation, **mode))
        found = list(lt.generate(context, prompts, layers=[1, -1], on_states=collect, **mode))
    assert [len(one.tokens) for one in found] == [5, 5, 5]
    assert len(collect) == 0
    assert collect.dropped == {"no room": 3}
    with pytest.raises(lt.InvalidInputError, match=r"no sample was put; dropped: \{'no room': 3\}"):
        collect.write_dataset(connector.folder / "rows")


def test_what_has_no_room_waits_for_it(name: str) -> None:
    """A reader deletes a sample while a put waits for room; the next put waits in vain."""
    connector = room_for(name, 1)
    collect = Collector(connector, wait=60.0)
    collect(generation([1], [2, 3]))
    waiting = threading.Thread(target=collect, args=(generation([4], [5, 6]),))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    connector.delete(str(connector.folder / "hs_0.safetensors"))
    waiting.join()
    found = connector.get_cached(1)
    assert found is not None
    assert found["token_ids"].tolist() == [4, 5, 6]
    assert collect.dropped == {}
    collect.wait = 0.1
    collect(generation([7], [8, 9]))
    assert len(collect) == 2
    assert collect.dropped == {"no room": 1}


def test_what_cannot_be_learnt_is_dropped(tmp_path: Path) -> None:
    spoilt = states([1, 2, 3], 2)
    spoilt[1, 0, 0] = np.nan
    connector = FileConnector(tmp_path)
    collect = Collector(connector)
    for one in (
        generation([1], [2, 3], spoilt),
        # One text is cancelled before any token; one has a single token and no prompt.
        generation([1, 2], []),
        generation([], []),
        generation([], [1]),
        generation([1], [2]),
    ):
        collect(one)
    assert collect.dropped == {"NaN or infinity in the states": 1, "no generated token to predict": 3}
    assert len(collect) == 1
    found = connector.get_cached(0)
    assert found is not None
    assert found["token_ids"].tolist() == [1, 2]


def test_other_errors_come_out(tmp_path: Path) -> None:
    """They are raised at the first text, before a night passes with nothing collected."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with pytest.raises(OSError, match="the disk is broken"):
        Collector(CallbackConnector(fail))(generation([1], [2, 3]))
    collect = Collector(FileConnector(tmp_path))
    last = generation([1], [2, 3])
    assert last.states is not None
    last.states._details["rows"] = "last"
    with pytest.raises(lt.InvalidInputError, match="generate with states='full'"):
        collect(last)
    with pytest.raises(lt.InvalidInputError, match="generation must be a Generation, not States"):
        collect(last.states)  # type: ignore[arg-type]
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ("connector", {"connector": "files"}),
        ("wait", {"wait": -1}),
        ("wait", {"wait": float("nan")}),
        ("dtype", {"dtype": "int8"}),
    ]
    for message, options in wrong:
        with pytest.raises(lt.InvalidInputError, match=message):
            Collector(**{"connector": FileConnector(tmp_path), **options})


def test_the_data_set_has_the_rows_of_the_indices(tmp_path: Path) -> None:
    """As Arrow has them; speculators' own class reads them in test_train_speculators."""
    ipc = pytest.importorskip("pyarrow.ipc")
    collect = Collector(FileConnector(tmp_path / "hidden_states"))
    for k in range(3):
        collect(generation([1] * (k + 1), [2, k]))
        collect.write_dataset(tmp_path / "rows")
        with (tmp_path / "rows" / "data-00000-of-00001.arrow").open("rb") as file:
            rows = ipc.open_stream(file).read_all().to_pydict()
        assert rows["input_ids"] == [[*[1] * (i + 1), 2, i] for i in range(k + 1)]
        assert rows["loss_mask"] == [[*[0] * (i + 1), 1, 1] for i in range(k + 1)]
        assert rows["seq_len"] == [i + 3 for i in range(k + 1)]
