"""Log of a training: a line of JSON for each measurement, and a plot of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from llamatap.storage.atomic_writes import atomic_path

__all__ = ["TrainingLog"]


class TrainingLog:
    """Log in a folder: ``log.jsonl``, and ``progress.png`` where matplotlib is installed.

    :ivar entries: all entries, those of an earlier run included.
    """

    def __init__(self, folder: Path, *, continues: bool) -> None:
        self.path = folder / "log.jsonl"
        self._plot = folder / "progress.png"
        self.entries: list[dict[str, Any]] = []
        if continues and self.path.exists():
            # A kill may have cut the last line.
            self.entries = [one for line in self.path.read_text().splitlines() if (one := _parsed(line))]
        else:
            self.path.write_text("")

    def drop_after(self, step: int) -> None:
        """Drop the entries after a step, which a continued training makes again."""
        self.entries = [one for one in self.entries if one["step"] <= step]
        with atomic_path(self.path) as scratch:
            scratch.write_text("".join(json.dumps(one) + "\n" for one in self.entries))

    def add(self, entry: dict[str, Any]) -> None:
        """Add an entry, with ``step``, ``seconds``, ``loss`` and what was measured."""
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def plot(self) -> Path | None:
        """Draw acceptance and loss over the minutes; None without matplotlib."""
        if importlib.util.find_spec("matplotlib") is None or not self.entries:
            return None
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        minutes = [one["seconds"] / 60 for one in self.entries]
        for label, key in (
            ("training (within the draft vocabulary)", "training"),
            ("held out", "held_out"),
            ("in the engine", "engine"),
        ):
            points = [
                (x, one[key]["tokens_per_round"])
                for x, one in zip(minutes, self.entries, strict=True)
                if one.get(key)
            ]
            if points:
                left.plot(*zip(*points, strict=True), marker=".", label=label)
        left.set(xlabel="minutes", ylabel="tokens per round", ylim=(1, None))
        left.legend(frameon=False)
        trained = [one for one in self.entries if one["training"]]
        for step in range(len(trained[0]["training"]["loss"]) if trained else 0):
            right.plot(
                [one["seconds"] / 60 for one in trained],
                [one["training"]["loss"][step] for one in trained],
                marker=".",
                label=f"step {step + 1}",
            )
        right.set(xlabel="minutes", ylabel="cross-entropy (nats)")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        with atomic_path(self._plot) as scratch:
            figure.savefig(scratch, dpi=120, format="png")
        return self._plot


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
