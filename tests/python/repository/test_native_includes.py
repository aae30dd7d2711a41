"""The core's structure: data flows engine -> capture -> draft -> bind, read from the #include lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mutations import MUTATIONS, Mutation
from support.paths import ROOT

CSRC = ROOT / "csrc"

#: Each folder may include those before it and itself.
ORDER = ["engine", "capture", "draft", "bind"]
#: The same within the engine; the small files beside these folders belong to none.
ENGINE_ORDER = ["private", "model", "context"]
#: Plain structs that the inner folder fills for the outer one.
PLAIN = {
    "engine/model/draft_traits.hpp",
    "engine/context/graph.hpp",
    "engine/context/position_ranges.hpp",
}
#: The engine's public headers; all others of its own are internal.
PUBLIC = re.compile(r"llama(-cpp)?\.h|ggml(-backend|-cpu|-cpp)?\.h|gguf\.h")


def includes() -> Iterator[tuple[str, str]]:
    """(file, what it includes), both as written: relative to csrc/ where they are ours."""
    for path in sorted(CSRC.rglob("*.?pp")):
        for included in re.findall(r'^#include [<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
            yield path.relative_to(CSRC).as_posix(), included


def test_no_inner_folder_includes_an_outer_one() -> None:
    wrong = []
    for file, included in includes():
        folder, of_included = file.split("/")[0], included.split("/")[0]
        if of_included in ORDER and ORDER.index(of_included) > ORDER.index(folder):
            wrong.append((file, included))
        if folder != of_included or folder != "engine" or included in PLAIN:
            continue
        room, of_room = file.split("/")[1], included.split("/")[1]
        both = room in ENGINE_ORDER and of_room in ENGINE_ORDER
        if both and ENGINE_ORDER.index(of_room) > ENGINE_ORDER.index(room):
            wrong.append((file, included))
    assert wrong == []


def test_llama_h_is_the_engine_folders_alone() -> None:
    assert {file.split("/")[0] for file, included in includes() if included.startswith("llama")} == {"engine"}


def test_internal_headers_of_the_engine_are_engine_privates_alone() -> None:
    internal = {
        file
        for file, included in includes()
        if included.startswith(("llama", "ggml", "gguf")) and not PUBLIC.fullmatch(included)
    }
    assert internal
    assert all(file.startswith("engine/private/") for file in internal)


def test_engine_private_is_included_in_the_engine_alone() -> None:
    users = {file.split("/")[0] for file, included in includes() if included.startswith("engine/private/")}
    assert users == {"engine"}


def test_pybind11_is_binds_alone() -> None:
    assert {file.split("/")[0] for file, included in includes() if included.startswith("pybind11")} == {
        "bind"
    }


def test_every_source_is_built() -> None:
    listed = re.findall(r"csrc/\S+\.cpp|tests/cpp/\w+\.cpp", (ROOT / "CMakeLists.txt").read_text())
    sources = [*CSRC.rglob("*.cpp"), *(ROOT / "tests" / "cpp").glob("*.cpp")]
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in sources)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_applies_to_one_place(mutation: Mutation) -> None:
    assert (ROOT / mutation.path).read_text().count(mutation.old) == 1
    assert all((ROOT / word).exists() for word in mutation.tests.split() if word.startswith("tests/"))
