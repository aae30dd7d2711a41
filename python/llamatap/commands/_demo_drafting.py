"""``llamatap demo``: plain and drafted decoding of the same text, side by side in the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Literal

from llamatap.drafting.drafter import Drafter
from llamatap.drafting.model_drafters import named_drafter
from llamatap.errors import UnsupportedError
from llamatap.fetch import fetch
from llamatap.generation.results import Stats
from llamatap.generation.session import Session
from llamatap.model import Model

__all__ = ["default_drafter", "run"]

QUESTION = "Give me a simple recipe for pancakes."
_MAX_TOKENS = 96
_N_MAX = 3
# Lines of text on the screen, and columns of a side at most.
_LINES, _WIDTH = 14, 72
#: Drafters for SmolLM2 in a checkout.
_MODELS = ("smollm2-eagle3.gguf", "smollm2-mtp.safetensors")


def default_drafter(model_path: Path | None) -> str:
    """The drafter of a checkout for SmolLM2; for other models, and elsewhere, n-grams of the text."""
    if model_path is None:
        # The package's folder in a checkout is python/llamatap; a program often runs in the checkout.
        for folder in (Path(__file__).parents[3] / "models", Path("models")):
            for name in _MODELS:
                if (folder / name).is_file():
                    return str(folder / name)
    return "ngram"


class _Side:
    """One side: a generation, its text so far, and its time."""

    def __init__(self, title: str, session: Session) -> None:
        self.title = title
        self.text = ""
        self.tokens: list[int] = []
        self.seconds = 0.0
        #: When the first token came, in seconds of its own.
        self.first = 0.0
        #: Tokens of each pass after the prompt's.
        self.passes: list[int] = []
        self.stats: Stats | None = None
        self._session = session

    def step(self) -> bool:
        """Run a round. Returns whether the text goes on."""
        start = time.perf_counter()
        events = self._session.step()
        self.seconds += time.perf_counter() - start
        if self.tokens:
            self.passes.append(len(events))
        self.first = self.first or self.seconds
        for event in events:
            self.tokens.append(event.token)
            self.text += event.text
            if event.final is not None:
                self.stats = event.final.stats
        return self._session.pending > 0

    def speed(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / max(self.seconds - self.first, 1e-9) if len(self.tokens) > 1 else 0.0

    def acceptance(self) -> list[float]:
        """Acceptance by position. While the text grows, as if every draft had been as long as it may be."""
        if self.stats is not None:
            return self.stats.acceptance_by_position
        if max(self.passes, default=1) == 1:
            return []
        return [sum(n > i for n in self.passes) / len(self.passes) for i in range(1, _N_MAX + 1)]

    def figures(self) -> list[str]:
        lines = [f"{len(self.tokens)} tokens, {self.speed():.0f} a second"]
        if self.passes:
            each = (len(self.tokens) - 1) / len(self.passes)
            lines.append(f"{len(self.passes)} passes, {each:.2f} tokens each")
        if shares := self.acceptance():
            lines.append("accepted by position: " + " ".join(f"{share:.2f}" for share in shares))
        return lines


def _columns(sides: list[_Side], width: int) -> list[str]:
    """The lines of both sides, side by side."""
    blocks = []
    for side in sides:
        text = [line for part in side.text.splitlines() for line in textwrap.wrap(part, width) or [""]]
        text = text[-_LINES:]
        blocks.append([side.title, "", *text, *[""] * (_LINES - len(text)), "", *side.figures()])
    height = max(map(len, blocks))
    padded = [[*block, *[""] * (height - len(block))] for block in blocks]
    return [
        "   ".join(line[:width].ljust(width) for line in row).rstrip() for row in zip(*padded, strict=True)
    ]


class _Screen:
    """Draws lines over those that it drew before; without a terminal, only the last time."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._n_lines = 0
        self._drawn_at = 0.0

    def draw(self, lines: list[str], last: bool = False) -> None:
        now = time.perf_counter()
        if not last and (not self._live or now - self._drawn_at < 0.05):
            return
        self._drawn_at = now
        encoding = sys.stdout.encoding or "utf-8"
        text = "\n".join(lines).encode(encoding, "replace").decode(encoding)
        if self._live and self._n_lines:
            # Up, and clear to the end of the screen.
            print(f"\x1b[{self._n_lines}A\x1b[J", end="")
        print(text, flush=True)
        self._n_lines = len(lines)


def run(model_path: Path | None, drafter_name: str | None, text: str | None = None) -> None:
    """Generate the same text without and with a drafter, in turn, and show both while they grow.

    :param drafter_name: a file, "ngram" or "suffix"; None for the one of the checkout.
    :param text: the question; None for the built-in one.
    """
    path = model_path if model_path is not None else fetch("smollm2")
    name = drafter_name if drafter_name is not None else default_drafter(model_path)
    # Passes of several tokens are cheaper with float16 weights than with those of the file for SmolLM2.
    weights: Literal["f16"] | None = "f16" if model_path is None else None
    with Model(path, load_mtp=name == "mtp", weights=weights) as model:
        question = text if text is not None else QUESTION
        try:
            prompt = model.tokenize(model.apply_chat_template([{"role": "user", "content": question}]))
        except UnsupportedError:
            # No chat template.
            prompt = model.tokenize(question)
        n_ctx = len(prompt) + _MAX_TOKENS
        with model.context(n_ctx=n_ctx) as context, model.context(n_ctx=n_ctx) as second:
            drafter: Drafter = named_drafter(second, name, n_max=_N_MAX)
            with Session(context) as alone, Session(second, drafter) as with_drafts:
                sides = [
                    _Side("without a drafter", alone),
                    _Side(f"drafts by {Path(name).name}", with_drafts),
                ]
                for session in (alone, with_drafts):
                    session.add(prompt, max_tokens=_MAX_TOKENS)
                width = min((shutil.get_terminal_size((120, 40)).columns - 4) // 2, _WIDTH)
                print(f"\nquestion  {question!r}\n")
                _race(sides, _Screen(), width)
    plain, drafted = sides
    same = "the same text" if plain.tokens == drafted.tokens else "texts that part at a near-tie"
    print(
        f"\n{same}, with {drafted.speed() / max(plain.speed(), 1e-9):.2f} times the tokens per second "
        "(docs/drafting.md: what drafting costs here)"
    )


def _race(sides: list[_Side], screen: _Screen, width: int) -> None:
    """Let the side that has used less time go on, so that both show as much as they would alone."""
    running = list(sides)
    while running:
        side = min(running, key=lambda one: one.seconds)
        if not side.step():
            running.remove(side)
        screen.draw(_columns(sides, width))
    screen.draw(_columns(sides, width), last=True)
