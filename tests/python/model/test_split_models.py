"""Split models: which files they are, what their hash is, and what is said of a shard that is not the first.

Oracles: hashlib and coreutils for the hashes; the same model in one file for the states.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.numerics import EXACT
from support.tiny import TinyLlama, split

import llamatap as lt
from llamatap.storage.model_files import ModelFiles, shard_paths


@pytest.fixture
def shards(tiny_path: Path, tmp_path: Path) -> list[Path]:
    found = split(tiny_path, tmp_path / "split")
    assert [path.name for path in found] == [f"part-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def combined(paths: list[Path]) -> str:
    lines = [hashlib.sha256(path.read_bytes()).hexdigest() + "\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_hash_is_of_all_shards(tiny_model: lt.Model, shards: list[Path]) -> None:
    with lt.Model(shards[0]) as model, lt.Extractor(model, **EXACT) as extractor:
        states = extractor([5, 6, 7])
        provenance = states.provenance
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        assert np.array_equal(states.array, extractor([5, 6, 7]).array)
    assert provenance["model_sha256"] == combined(shards)
    assert provenance["model"] == shards[0].name
    # The command in the documentation.
    command = "sha256sum part-*.gguf | cut -c 1-64 | sha256sum"
    said = subprocess.run(command, shell=True, cwd=shards[0].parent, capture_output=True, text=True)
    assert said.stdout.split()[0] == provenance["model_sha256"]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_replaced_shard_is_not_hashed_as_the_loaded_one(index: int, shards: list[Path]) -> None:
    with (
        lt.Model(shards[0]) as model,
        lt.Extractor(model) as one,
        lt.Extractor(model) as two,
        lt.Extractor(model) as three,
    ):
        first, second, third = one([5]), two([5]), three([5])
        assert first.provenance["model_sha256"] == combined(shards)
        content = shards[index].read_bytes()
        shards[index].unlink()
        assert second.provenance["model_sha256"] is None
        shards[index].write_bytes(content + b"more")
        assert third.provenance["model_sha256"] is None


def test_saved_sequences_are_of_a_model_with_all_its_shards(tmp_path: Path) -> None:
    """The models differ in what only the last shard holds."""
    tiny = TinyLlama()
    one = split(tiny.write(tmp_path / "one.gguf"), tmp_path / "a")
    last = max(gguf.GGUFReader(one[-1]).tensors, key=lambda tensor: tensor.n_elements).name
    tiny.weights[last] = tiny.weights[last][::-1].copy()
    other = split(tiny.write(tmp_path / "other.gguf"), tmp_path / "b")
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True)] == [True, True, False]
    with lt.Model(one[0]) as model, model.context(n_ctx=64) as context:
        context.decode(lt.Batch.of([5, 6, 7]))
        saved = context.save(0)
    with (
        lt.Model(other[0]) as model,
        model.context(n_ctx=64) as context,
        pytest.raises(lt.InvalidInputError, match="weights"),
    ):
        context.restore(0, saved)


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 2])
def test_another_shard_than_the_first_is_refused_with_the_name_of_the_first(
    index: int, shards: list[Path]
) -> None:
    message = f"this is shard {index + 1} of 3 of a split model; give the first one, {shards[0]}"
    with pytest.raises(lt.ModelLoadError, match=re.escape(message)):
        lt.Model(shards[index])
    assert message in str(lt.probe(shards[index]).error)
    renamed = shards[index].rename(shards[index].with_name("other.gguf"))
    with pytest.raises(
        lt.ModelLoadError, match=f"shard {index + 1} of 3 of a split model; give the first one$"
    ):
        lt.Model(renamed)


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(lt.ModelLoadError, match=re.escape(shards[1].name)):
        lt.Model(shards[0])


def test_a_whole_file_may_have_the_name_of_a_shard(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(tiny_path.read_bytes())
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"something else")
    with lt.Model(path) as model:
        found = lt.extract(model, [5]).provenance["model_sha256"]
    assert found == hashlib.sha256(tiny_path.read_bytes()).hexdigest()


def test_names_of_shards(tmp_path: Path) -> None:
    names = [path.name for path in shard_paths(tmp_path / "a-00001-of-00002.gguf")]
    assert names == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for name in ("a.gguf", "a-00002-of-00002.gguf", "a-00001-of-2.gguf", "a-00001-of-00002.bin"):
        assert shard_paths(tmp_path / name) == [tmp_path / name]
    with pytest.raises(FileNotFoundError):
        ModelFiles(tmp_path / "a.gguf")
