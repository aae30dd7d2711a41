"""Helpers of the tests of co-training: a target with a table, drafts that follow it more or less, traffic."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.generation import EXACT
from support.tiny_models.rigged import cycle, write_rigged_eagle3, write_rigged_model, wrong_at

import llamatap as lt
from llamatap.train import CoTrainer, CoTrainOptions
from llamatap.train.cotrain.drafter import CoTrainedDrafter
from llamatap.train.cotrain.event_log import read_events
from llamatap.train.cotrain.folder import CoTrainFolder

F = cycle()
#: The tables that drafts follow: always right, right for two tokens of three, never right.
TABLES = {"right": F, "fair": wrong_at(F, range(3, 64, 3)), "wrong": wrong_at(F, range(64))}
#: The thread of the co-trainer looks only when a test says so; short trials.
BY_HAND: dict[str, Any] = {"poll_seconds": 3600, "trial_rounds": 20, "log_seconds": 0.001}


@dataclass(frozen=True)
class Files:
    """A target of four layers, and drafts for it.

    :ivar drafts: by the names of TABLES; and "other layers", which reads other ones, "other target", which is
        for a wider one.
    """

    target: Path
    drafts: dict[str, Path]


def write_files(folder: Path) -> Files:
    drafts = {name: write_rigged_eagle3(folder / f"{name}.gguf", F, table) for name, table in TABLES.items()}
    drafts["other layers"] = write_rigged_eagle3(folder / "layers.gguf", F, F, target_layers=(0, 1, 2))
    return Files(write_rigged_model(folder / "target.gguf", F), drafts)


@dataclass
class Serving:
    """A session with a co-trained drafter."""

    cotrainer: CoTrainer
    context: lt.Context
    drafter: CoTrainedDrafter
    session: lt.Session

    @property
    def folder(self) -> CoTrainFolder:
        return self.cotrainer.folder

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [one for one in read_events(self.folder.log) if one["event"] in names]

    def generate(self, n: int, max_tokens: int = 24) -> list[lt.Generation]:
        """Texts after prompts of three tokens, all of them at once; each is checked."""
        for i in range(n):
            self.add(i, max_tokens)
        return self.finish()

    def add(self, i: int, max_tokens: int = 24) -> int:
        return self.session.add([3 + i % 61, 20, 3 + (7 * i) % 61], max_tokens=max_tokens, ignore_eos=True)

    def finish(self) -> list[lt.Generation]:
        """Run the session to its end."""
        found = []
        while self.session.pending:
            found += [one.final for one in self.session.step() if one.final is not None]
        for text in found:
            check_text(text)
        return found


def check_text(text: lt.Generation) -> None:
    """The target's own: each token follows from the one before it."""
    tokens = [*text.prompt.tolist(), *text.tokens.tolist()]
    start = len(text.prompt)
    assert tokens[start:] == [F[token] for token in tokens[start - 1 : -1]]


@contextlib.contextmanager
def serving(
    files: Files,
    folder: Path,
    draft: str = "fair",
    *,
    n_seq_max: int = 4,
    python: Path | None = None,
    trainer_arguments: Sequence[str] = (),
    start_trainer: bool = False,
    **options: Any,
) -> Iterator[Serving]:
    with (
        lt.Model(files.target) as model,
        model.context(n_ctx=512 * n_seq_max, n_seq_max=n_seq_max, **EXACT) as context,
        CoTrainer(
            model,
            folder,
            files.drafts[draft],
            CoTrainOptions(**{**BY_HAND, **options}),
            start_trainer=start_trainer,
            python=python,
            trainer_arguments=trainer_arguments,
        ) as cotrainer,
    ):
        drafter = cotrainer.drafter(context, n_max=3)
        with lt.Session(context, drafter) as session:
            yield Serving(cotrainer, context, drafter, session)
        drafter.close()


def publish(folder: CoTrainFolder, number: int, source: Path, base: int = 0) -> None:
    """Publish a file, as a trainer does."""
    shutil.copy(source, folder.draft(number))
    folder.publish(number, base, 2.0, 1.5)
