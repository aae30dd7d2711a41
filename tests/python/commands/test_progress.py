"""Progress bars: one way for all commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny import TinyLlama

from llamatap.__main__ import main
from llamatap.commands import _progress


class Recorder:
    """Bars that are written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        monkeypatch.setattr(_progress, "progress_bar", self.bar)

    @contextlib.contextmanager
    def bar(self, total: float, unit: str, *, quiet: bool, **options: Any) -> Iterator[Any]:
        self.told.append((options["desc"], total, options["initial"], quiet))
        yield self
        self.told.append("closed")

    def update(self, n: float) -> None:
        self.told.append(n)

    def set_postfix(self, figures: dict[str, Any]) -> None:
        self.told.append(figures)


def test_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    with _progress.StageBars(quiet=False) as bars:
        bars("states", 0, 10)
        bars("states", 4, 10)
        bars("training", 0.25, 1, {"loss": 0.5, "step": 3})
        bars("training", 0.5, 1)
    assert recorder.told == [
        ("states", 10, 0, False),
        0,
        4,
        "closed",
        ("training", 1, 0.25, False),
        0.0,
        {"loss": "0.50", "step": 3},
        0.25,
        "closed",
    ]


def test_a_data_set_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"input_ids": [3, 4, 5]}\n{"input_ids": [6, 7, 8, 9]}\n')
    model = TinyLlama().write(tmp_path / "tiny.gguf")
    assert main(["dataset", str(model), str(texts), "-o", str(tmp_path / "states"), "--layers", "1"]) == 0
    assert recorder.told[0] == (None, 7, 0, False)
    assert recorder.told[-1] == "closed"
    assert sum(recorder.told[1:-1]) == 7
