"""vendor/fetch.py against a small sdist of our own."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.paths import ROOT

SCRIPT = ROOT / "vendor" / "fetch.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a source checkout")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_engine"] = module
    spec.loader.exec_module(module)
    return module


FILES = {
    "LICENSE": b"licence",
    "src/a.cpp": b"int a;\n",
    "src/models/b.cpp": b"int b;",
    "ggml/src/ggml.c": b"c",
    "ggml/src/ggml-cuda/x.cu": b"cuda",
    "tests/t.cpp": b"test",
    "docs/big.md": b"docs",
    ".git/config": b"git",
}


@pytest.fixture
def patches(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    monkeypatch.setattr(script, "PATCHES", folder)
    return folder


@pytest.fixture
def sdist(script: ModuleType, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pkg-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {**FILES, "../../outside": b""}.items():
            prefix = "pkg-1.0/" if name.startswith("..") else "pkg-1.0/vendor/llama.cpp/"
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    pin: dict[str, Any] = json.loads((ROOT / "vendor" / "engine.json").read_text())
    pin["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    pin_file = tmp_path / "engine.json"
    pin_file.write_text(json.dumps(pin))
    monkeypatch.setattr(script, "PIN_FILE", pin_file)
    return path


def contents(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {".llamatap-stamp.json"}


BUILD = {"LICENSE", "src/a.cpp", "src/models/b.cpp", "ggml/src/ggml.c", "ggml/src/ggml-cuda/x.cu"}


def test_sets(script: ModuleType, sdist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vendor" / "llama.cpp"
    script.fetch(folder, "build", sdist)
    assert contents(folder) == BUILD
    script.fetch(folder, "peers", sdist)
    assert contents(folder) == BUILD | {"tests/t.cpp"}
    # The larger set serves for the smaller one too, and a second call touches nothing.
    before = os.stat(folder / "LICENSE").st_ino
    script.fetch(folder, "build", tmp_path / "not needed")
    assert os.stat(folder / "LICENSE").st_ino == before
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == ["llama.cpp"]


@pytest.mark.parametrize("damage", ["missing", "changed", "stamp", "another pin", "list"])
def test_a_damaged_folder_is_repaired(script: ModuleType, sdist: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "vendor" / "llama.cpp"
    script.fetch(folder, "build", sdist)
    stamp = folder / ".llamatap-stamp.json"
    if damage == "missing":
        (folder / "src/a.cpp").unlink()
    elif damage == "changed":
        (folder / "src/a.cpp").write_text("int z;")
    elif damage == "stamp":
        stamp.write_text(stamp.read_text()[:40])
    elif damage == "another pin":
        stamp.write_text(stamp.read_text().replace('"version": "0.3.36"', '"version": "0.3.35"'))
    else:
        stamp.write_text("[]")
    (folder.parent / ".llama.cpp.leftover").mkdir()
    script.fetch(folder, "build", sdist)
    assert contents(folder) == BUILD
    assert (folder / "src/a.cpp").read_bytes() == b"int a;\n"
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == ["llama.cpp"]


def test_a_wrong_hash_is_an_error(script: ModuleType, sdist: Path, tmp_path: Path) -> None:
    sdist.write_bytes(sdist.read_bytes() + b"x")
    with pytest.raises(script.FetchError, match="sha256"):
        script.fetch(tmp_path / "llama.cpp", "build", sdist)
    assert not (tmp_path / "llama.cpp").exists()


def test_an_interrupted_download_leaves_what_was_there(
    script: ModuleType, sdist: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "vendor" / "llama.cpp"
    script.fetch(folder, "build", sdist)
    (folder / "src/a.cpp").unlink()
    sdist.write_bytes(sdist.read_bytes()[:50])
    with pytest.raises(script.FetchError):
        script.fetch(folder, "build", sdist)
    assert contents(folder) == BUILD - {"src/a.cpp"}


def test_a_folder_of_someone_else_is_not_replaced(script: ModuleType, sdist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(script.FetchError, match="not written by this program"):
        script.fetch(folder, "build", sdist)
    assert contents(folder) == {"mine.txt"}


PATCH = """Why it is needed.

--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,3 +1,4 @@
 int a;
-int b;
+int c;
+int d;
 int e;
"""


def test_patches_are_applied(script: ModuleType, patches: Path, tmp_path: Path) -> None:
    (patches / "0001-x.patch").write_text(PATCH)
    file = tmp_path / "src/a.cpp"
    file.parent.mkdir()
    file.write_text("int a;\nint b;\nint e;\nint f;\n")
    assert script.apply_patch(patches / "0001-x.patch", tmp_path) == {"src/a.cpp"}
    assert file.read_text() == "int a;\nint c;\nint d;\nint e;\nint f;\n"


@pytest.mark.parametrize("content", ["int a;\nint z;\nint e;\n", "\nint a;\nint b;\nint e;\n", "int a;\n"])
def test_a_patch_that_does_not_fit_is_refused(
    script: ModuleType, patches: Path, tmp_path: Path, content: str
) -> None:
    (patches / "0001-x.patch").write_text(PATCH)
    file = tmp_path / "src/a.cpp"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(script.FetchError, match=r"0001-x\.patch does not fit this engine: line \d of src/a"):
        script.apply_patch(patches / "0001-x.patch", tmp_path)
    assert file.read_text() == content


BROKEN = {
    "no context": "@@ -2,0 +3 @@\n+int n;\n",
    "a line between": "@@ -1 +1 @@\n-int a;\n+int c;\n\n@@ -2 +2 @@\n-int b;\n+int d;\n",
    "cut": "@@ -1,2 +1,2 @@\n-int a;\n+int c;\n",
    "backwards": "@@ -2 +2 @@\n-int b;\n+int d;\n@@ -1 +1 @@\n-int a;\n+int c;\n",
    "no newline": "@@ -1 +1 @@\n-int a;\n+int c;\n\\ No newline at end of file\n",
}


@pytest.mark.parametrize("hunks", BROKEN.values(), ids=BROKEN)
def test_a_patch_that_is_none_is_refused(
    script: ModuleType, patches: Path, tmp_path: Path, hunks: str
) -> None:
    (patches / "0001-x.patch").write_text(f"Why.\n\n--- a/a.cpp\n+++ b/a.cpp\n{hunks}")
    file = tmp_path / "a.cpp"
    file.write_text("int a;\nint b;\n")
    with pytest.raises(script.FetchError, match=r"0001-x\.patch"):
        script.apply_patch(patches / "0001-x.patch", tmp_path)
    assert file.read_text() == "int a;\nint b;\n"


def test_several_hunks_and_files_in_a_patch(script: ModuleType, patches: Path, tmp_path: Path) -> None:
    """Against `diff`, as the patches are made, where it is installed."""
    if shutil.which("diff") is None:
        pytest.skip("needs diff")
    rng = random.Random(0)
    for number in range(20):
        text = ""
        for name in ("x.cpp", "y.cpp"):
            before = [f"{rng.randrange(9)}\n" for _ in range(60)]
            after = [line for line in before if rng.random() > 0.05]
            for _ in range(5):
                after.insert(rng.randrange(len(after) + 1), "new\n")
            for folder, lines in (("a", before), ("b", after)):
                (tmp_path / folder).mkdir(exist_ok=True)
                (tmp_path / folder / name).write_text("".join(lines))
            text += subprocess.run(
                ["diff", "-u", "--label", f"a/{name}", "--label", f"b/{name}", f"a/{name}", f"b/{name}"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
            ).stdout
        patch = patches / f"{number}.patch"
        patch.write_text("Why.\n\n" + text)
        assert script.apply_patch(patch, tmp_path / "a") == {"x.cpp", "y.cpp"}
        for name in ("x.cpp", "y.cpp"):
            assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_another_patch_is_another_engine(
    script: ModuleType, sdist: Path, patches: Path, tmp_path: Path
) -> None:
    folder, patch = tmp_path / "vendor" / "llama.cpp", patches / "0001-x.patch"

    def fetch() -> dict[str, float]:
        script.fetch(folder, "build", sdist)
        return {path: (folder / path).stat().st_mtime for path in BUILD}

    plain = fetch()
    patch.write_text("Why.\n\n--- a/src/a.cpp\n+++ b/src/a.cpp\n@@ -1 +1 @@\n-int a;\n+int b;\n")
    patched = fetch()
    assert (folder / "src/a.cpp").read_text() == "int b;\n"
    # A compiler must see what a patch changes, and nothing else.
    assert {path for path in BUILD if patched[path] != plain[path]} == {"src/a.cpp"}
    patch.write_text(patch.read_text().replace("-int a;", "-int z;"))
    with pytest.raises(script.FetchError, match=r"line 1 of src/a\.cpp should be 'int z;'"):
        fetch()
    assert (folder / "src/a.cpp").read_text() == "int b;\n"
    patch.unlink()
    assert fetch()["src/a.cpp"] >= patched["src/a.cpp"]
    assert (folder / "src/a.cpp").read_text() == "int a;\n"


@pytest.mark.slow
def test_the_engine_here_is_the_patched_one(script: ModuleType) -> None:
    folder = ROOT / "vendor" / "llama.cpp"
    if not (folder / script.STAMP).exists():
        pytest.skip("built from another folder")
    assert script.fault(folder, script.read_pin(), "build") is None
    barrier = (folder / "ggml/src/ggml-cpu/ggml-cpu.c").read_text().partition("void ggml_barrier")[2]
    assert "barrier_cond" in barrier[:2000]
