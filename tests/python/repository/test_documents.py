"""README.md and docs/: their Python runs, gives what its comments say, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from llamatap.fetch import fetch

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

#: What stands for files and presets that a reader brings along.
STAND_INS = {
    '"Qwen3-4B-Q8_0.gguf"': 'fetch("smollm2")',
    '"z-image"': '"mine.toml"',
    '"FILE.gguf"': 'fetch("smollm2")',
    "max_tokens=512": "max_tokens=4",
    '"model.gguf"': 'fetch("smollm2")',
    # A model drafts, too.
    '"draft.gguf"': 'fetch("smollm2")',
    "max_tokens=64": "max_tokens=4",
}


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def promised(line: str) -> Any:
    """The value (of an array: the shape) that the comment at the end of a line names, or None."""
    comment = line.partition("  # ")[2]
    try:
        return ast.literal_eval(comment)
    except (SyntaxError, ValueError):
        found = re.search(r"\(\d+(, \d+)+\)", comment)
        return ast.literal_eval(found[0]) if found else None


def run(code: str, names: dict[str, Any], page: str) -> int:
    """Run a block statement by statement; the number of comments that were compared."""
    compared = 0
    lines = code.splitlines()
    for node in ast.parse(code).body:
        value: Any = None
        if isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), page, "eval"), names)
        else:
            exec(compile(ast.Module([node], []), page, "exec"), names)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = names[node.targets[0].id]
        assert node.end_lineno is not None
        expected = promised(lines[node.end_lineno - 1])
        if expected is None or value is None:
            continue
        assert getattr(value, "shape", value) == expected, lines[node.end_lineno - 1]
        compared += 1
    return compared


@pytest.mark.parametrize(
    ("page", "n_compared"),
    [
        ("README.md", 6),
        ("docs/converting.md", 1),
        ("docs/drafting.md", 0),
        ("docs/errors.md", 1),
        ("docs/exactness.md", 0),
        ("docs/extraction.md", 7),
        ("docs/files.md", 0),
        ("docs/generation.md", 2),
        ("docs/presets.md", 1),
        ("docs/taps.md", 0),
        ("docs/train-in-one-afternoon.md", 0),
    ],
)
def test_its_python_runs(
    page: str,
    n_compared: int,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (preset,) = blocks(ROOT / "docs" / "presets.md", "toml")
    Path("mine.toml").write_text(preset, "utf-8")
    Path("data").mkdir()
    Path("data/own.jsonl").write_text('{"input_ids": [1, 504, 3575], "loss_mask": [0, 1, 1]}\n')
    Path("measure.txt").write_text("What is umami?\n")
    names: dict[str, Any] = {"fetch": fetch}
    if page == "docs/files.md":
        (code,) = blocks(ROOT / "docs" / "extraction.md")[:1]
        run(f"{code}\nstates.save('states.safetensors')", names, page)
    compared = 0
    for code in blocks(ROOT / page):
        for theirs, ours in STAND_INS.items():
            code = code.replace(theirs, ours)
        compared += run(code, names, page)
    assert compared == n_compared


def test_the_texts_for_a_verifier_are_written(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [one for one in blocks(ROOT / "docs" / "serving.md") if "rows.jsonl" in one]
    for theirs, ours in STAND_INS.items():
        code = code.replace(theirs, ours)
    run(code, {"fetch": fetch}, "serving.md")
    assert len(Path("rows.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_python_is_python(page: Path) -> None:
    for code in blocks(page):
        ast.parse(code)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_readme_leads() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    assert (ROOT / "docs" / "images" / "demo.png").stat().st_size < 100_000
