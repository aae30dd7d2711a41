"""Card of a trained drafter: data, training, acceptance, and how to make it again, as Markdown."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["card_path", "drafter_card"]


def card_path(draft: Path) -> Path:
    """The path of a drafter's card: ``draft.md`` for ``draft.gguf``, or ``draft.gguf.md`` where that is the
    card of another file, or something else."""
    path = draft.with_suffix(".md")
    if not path.exists():
        return path
    with path.open(errors="replace") as file:
        is_ours = file.readline().rstrip("\n") == f"# {draft.name}"
    return path if is_ours else draft.with_name(f"{draft.name}.md")


def drafter_card(
    name: str, facts: Mapping[str, Any], log: Sequence[Mapping[str, Any]], command: Sequence[str]
) -> str:
    """Write a card.

    :param name: file name of the drafter.
    :param facts: what was trained, on what, by name.
    :param log: entries of :class:`llamatap.train.drafters.training_log.TrainingLog`.
    :param command: the command that makes it again.
    """
    last = log[-1] if log else {}
    lines = [f"# {name}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {_shown(value)} |" for key, value in facts.items()]
    lines += [f"| machine | {platform.machine()}, {_processor()} |", ""]
    rows = [
        (label, last[key])
        for label, key in (("held out", "held_out"), ("in the engine", "engine"))
        if last.get(key)
    ]
    if rows:
        n = max(len(found["by_position"]) for _, found in rows)
        lines += [
            "Greedy drafting after prompts that were not trained on, and the share of drafts that were "
            "accepted up to each position. Held out: along the recorded texts; in the "
            "engine: after the prompts.",
            "",
            "| | tokens per round | " + " | ".join(f"position {i + 1}" for i in range(n)) + " |",
            "| --- " * (n + 2) + "|",
        ]
        for label, found in rows:
            shares = " | ".join(f"{share:.3f}" for share in found["by_position"])
            lines.append(f"| {label} | {found['tokens_per_round']:.2f} | {shares} |")
        lines.append("")
    if command:
        lines += ["Made with:", "", f"    {shlex.join(command)}", ""]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
