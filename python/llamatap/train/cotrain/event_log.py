"""The log of co-training: a line of JSON for each event, appended by both sides, and its plot.

Each entry has ``time`` (seconds of the epoch), ``side`` ("serving" or "trainer"), ``event`` and figures:

==============  ============================================================================================
``acceptance``  ``draft``, and since the last entry about it: ``rounds``, ``tokens_per_round``,
                ``samples``, ``dropped`` (by reason, since the start)
``swapped``     ``draft``, ``before``: new requests are drafted for by another draft
``kept``        ``draft``: it passed its trial
``went back``   ``draft``, ``to``, ``tokens_per_round``, ``before``, ``rounds``
``refused``     ``draft``, ``reason``
``trained``     ``cycle``, ``steps``, ``tokens``, ``seconds``, ``held_out`` (tokens per round), ``in_use``
                (those of the draft in use), ``loss``
``published``   ``draft``, ``base``; or ``not published``: ``draft``, ``reason``
==============  ============================================================================================

Others say that a side started or ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamatap.storage.atomic_writes import atomic_path

__all__ = ["EventLog", "plot_acceptance", "read_events"]

#: Size at which a log is set aside and a new one begun.
_MOST_BYTES = 32 * 2**20
_POINTS = 40


class EventLog:
    """Appends the events of one side.

    :param side: "serving" or "trainer".
    """

    def __init__(self, path: Path, side: str) -> None:
        self.path = path
        self._side = side

    def add(self, event: str, **figures: Any) -> None:
        """Append an entry. An error of the system is ignored: the log must not end what it tells about."""
        line = json.dumps({"time": round(time.time(), 3), "side": self._side, "event": event, **figures})
        with contextlib.suppress(OSError):
            # One write in append mode: entries of two processes do not mix.
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(handle).st_size
                os.write(handle, f"{line}\n".encode())
            finally:
                os.close(handle)
            if size > _MOST_BYTES and self._side == "serving":
                self.path.replace(self.path.with_suffix(".1.jsonl"))


def read_events(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, without lines that a kill has cut."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"time", "event"} <= entry.keys():
                    found.append(entry)
    return found


def plot_acceptance(path: Path, events: Sequence[dict[str, Any]]) -> Path | None:
    """Draw tokens per round over the minutes: of the traffic, and on held-out samples; None without
    matplotlib, or without entries."""
    traffic = [one for one in events if one["event"] == "acceptance"]
    if importlib.util.find_spec("matplotlib") is None or not traffic:
        return None
    from matplotlib.figure import Figure

    start = events[0]["time"]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    minutes, values = _smoothed(traffic, start)
    axes.plot(minutes, values, marker=".", label="traffic")
    trained = [one for one in events if one["event"] == "trained"]
    if trained:
        x = [(one["time"] - start) / 60 for one in trained]
        axes.plot(x, [one["held_out"] for one in trained], marker="x", lw=0.8, label="held out, as trained")
        axes.plot(x, [one["in_use"] for one in trained], lw=0.8, ls=":", label="held out, in use")
    for one in events:
        if one["event"] in ("swapped", "went back"):
            colour = "C2" if one["event"] == "swapped" else "C3"
            axes.axvline((one["time"] - start) / 60, color=colour, lw=0.7, alpha=0.6)
    axes.set(xlabel="minutes", ylabel="tokens per round", ylim=(1, None))
    axes.legend(frameon=False, title="lines: a new draft (red: back)", title_fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    with atomic_path(path) as scratch:
        figure.savefig(scratch, dpi=120, format="png")
    return path


def _smoothed(traffic: Sequence[dict[str, Any]], start: float) -> tuple[list[float], list[float]]:
    """Minutes and tokens per round of the traffic, in at most ``_POINTS`` steps of about as many rounds."""
    per_point = sum(one["rounds"] for one in traffic) / _POINTS
    minutes: list[float] = []
    values: list[float] = []
    rounds, tokens = 0, 0.0
    for one in traffic:
        rounds += one["rounds"]
        tokens += one["rounds"] * one["tokens_per_round"]
        if rounds > per_point or (one is traffic[-1] and rounds > 0):
            minutes.append((one["time"] - start) / 60)
            values.append(tokens / rounds)
            rounds, tokens = 0, 0.0
    return minutes, values
