"""The trainer of co-training: trains a head on the samples in the folder, and publishes draft files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llamatap._extras import needs
from llamatap._system_limits import require_memory
from llamatap._threads import default_threads
from llamatap._validate import instance
from llamatap._validate import path as checked_path
from llamatap.convert import to_gguf
from llamatap.errors import Error, InvalidInputError, ModelNotFoundError, NotFiniteError
from llamatap.storage import locks
from llamatap.storage.model_files import ModelFiles
from llamatap.train.cotrain.event_log import EventLog, plot_acceptance, read_events
from llamatap.train.cotrain.folder import CoTrainFolder
from llamatap.train.cotrain.options import TrainerOptions
from llamatap.train.cotrain.replay import CycleSamples, Replay
from llamatap.train.drafters.head_checkpoints import read_draft, read_head, write_head
from llamatap.train.drafters.heads import DraftHead, Eagle3Head
from llamatap.train.drafters.options import HeadTrainingOptions
from llamatap.train.drafters.stop_signals import StopSignals
from llamatap.train.drafters.target_weights import TargetWeights
from llamatap.train.drafters.trainer import HeadTrainer, device_of

with needs("train", "co-training"):
    import torch

__all__ = ["DrafterTrainer", "train_in_folder"]

_logger = logging.getLogger("llamatap")

# Fewer samples say nothing about a head.
_FEWEST_HELD_OUT = 4
# Of a serving side that was killed.
_SILENT_SECONDS = 1800.0


class _StopError(Exception):
    """The training is to end."""


def train_in_folder(
    target: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    draft: str | os.PathLike[str],
    options: TrainerOptions | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Train a drafter on the samples that a serving side writes into a folder, and publish what is better
    there, until SIGTERM, Ctrl-C or an option ends it.

    :param target: the GGUF file that is served.
    :param folder: the folder, as in :class:`llamatap.train.CoTrainer`; created if missing.
    :param draft: what the first training begins with: the draft file that is served, or the checkpoint that
        it was made from: EAGLE-3 as a ``.gguf`` file or a folder, an MTP block as ``.safetensors`` or
        ``.gguf``. Afterwards, also when the trainer is started again, it is the newest published draft that
        was not given up.
    :param ready: called when it waits for samples.
    :raises InvalidInputError: another process trains in the folder, the folder or the draft belongs to
        another target.
    :raises UnsupportedError: the draft or the target cannot be trained with.
    :raises ModelNotFoundError: a file is missing.
    :raises MissingPackageError: a package of the extra ``train`` is missing.
    """
    options = TrainerOptions() if options is None else options
    instance("options", options, TrainerOptions)
    target_path, draft_path = checked_path("target", target), checked_path("draft", draft)
    for path in (target_path, draft_path):
        if not path.exists():
            raise ModelNotFoundError(f"no such file: {path}")
    place = CoTrainFolder(folder)
    # A trainer that is being ended may still have it.
    lock = place.lock("trainer", seconds=5.0)
    try:
        place.remove_leftovers("trainer")
        serving = place.serving_side()
        engine_threads = 0 if serving is None else serving.n_threads
        torch.set_num_threads(options.n_threads or max(1, default_threads() - engine_threads))
        with StopSignals() as stop:
            trainer = DrafterTrainer(target_path, place, draft_path, options)
            ready()
            trainer.run(lambda: stop.requested)
    finally:
        locks.release(lock)


class DrafterTrainer:
    """Trains in cycles.

    :ivar reference: number of the draft that a new one must be better than: the newest that was published and
        not given up; 0 for the first.
    """

    def __init__(self, target: Path, folder: CoTrainFolder, draft: Path, options: TrainerOptions) -> None:
        self.options = options
        self._target = target
        self._folder = folder
        self._draft = draft
        self._log = EventLog(folder.log, "trainer")
        self._device = device_of(options.device)
        self._weights = TargetWeights.read(target)
        self._sha256 = ModelFiles(target).sha256()
        serving = folder.serving_side()
        if serving is not None and serving.model_sha256 not in (None, self._sha256):
            raise InvalidInputError(
                f"{folder.path} belongs to another target, {serving.model}; give that file"
            )
        self._head: DraftHead
        self._in_use: dict[str, torch.Tensor]
        self.reference: int
        self._begin_with_newest()
        self._full_head = torch.from_numpy(self._weights.head).to(self._device)
        n_layer = self._weights.n_layer
        read = list(self._head.target_layers) if isinstance(self._head, Eagle3Head) else []
        self._replay = Replay(
            folder, self._sha256, [*read, n_layer], self._weights.n_embd, self._weights.n_vocab
        )
        self._rng = np.random.default_rng(options.seed)
        self._newest_sample = -1
        self._cycle = 0
        self._log.add(
            "trainer ready",
            pid=os.getpid(),
            draft=self.reference,
            threads=torch.get_num_threads(),
            device=str(self._device),
        )

    # Where a training begins.

    def _begin_with_newest(self) -> None:
        """Begin with the newest candidate whose weights can be read; without one, with the first draft."""
        for number in reversed(self._folder.candidates()):
            if (head := self._read_checkpoint(number)) is not None:
                self.reference = number
                break
        else:
            head = self._first_head()
            self.reference = 0
        self._head = head.to(self._device)
        self._in_use = _copied(self._head)

    def _read_checkpoint(self, number: int) -> DraftHead | None:
        """The head of a published draft; None if its weights cannot be read."""
        folder = self._folder.checkpoints
        block = folder / f"{number}.safetensors"
        try:
            return read_head(block if block.exists() else folder / str(number), self._weights)
        except (Error, OSError) as error:
            self._log.add("passed over", draft=number, reason=f"its checkpoint: {error}")
            return None

    def _first_head(self) -> DraftHead:
        """The head that it was started with."""
        return read_draft(self._draft, self._target, self._weights, self._folder.path)

    # Cycles.

    def run(self, must_stop: Any) -> None:
        """Train until ``must_stop()``, or until an option ends it."""
        options = self.options
        started = time.monotonic()

        def ends() -> bool:
            late = options.minutes is not None and time.monotonic() - started > 60 * options.minutes
            return bool(must_stop()) or late or (options.follow and self._is_left())

        reason = "stopped"
        try:
            while not ends():
                if not self.look(ends):
                    _sleep(options.poll_seconds, ends)
        except _StopError:
            pass
        except BaseException as error:
            reason = repr(error)
            raise
        finally:
            self._draw()
            self._log.add("trainer ended", draft=self.reference, reason=reason)

    def _is_left(self) -> bool:
        """Whether the serving side is gone."""
        serving = self._folder.serving_side()
        return (serving is not None and serving.closed) or self._folder.silent_seconds() > _SILENT_SECONDS

    def look(self, must_stop: Any = lambda: False) -> bool:
        """Train one cycle if there are samples for it. Returns whether there were.

        :param must_stop: asked after each step; the cycle is given up if it is True.
        """
        options = self.options
        if self.reference and self.reference not in self._folder.candidates():
            given_up = self.reference
            self._begin_with_newest()
            self._log.add("began again", draft=self.reference, given_up=given_up)
        self._replay.look()
        # Samples count from 0 again if all were removed.
        self._newest_sample = min(self._newest_sample, self._replay.newest)
        training, held_out = self._replay.sides()
        new = [number for number in training if number > self._newest_sample]
        enough = (
            self._replay.n_tokens(training) >= options.min_tokens
            and self._replay.n_tokens(new) >= min(options.new_tokens, options.min_tokens)
            and len(held_out) >= _FEWEST_HELD_OUT
        )
        if not enough:
            return False
        chosen = self._replay.choose(self._newest_sample, options.cycle_tokens, options.held_out, self._rng)
        loaded = self._replay.load(*chosen)
        if not loaded.training or not loaded.held_out:
            return False
        self._cycle += 1
        self._newest_sample = self._replay.newest
        try:
            self._train(loaded, must_stop)
        except NotFiniteError as error:
            self._log.add("not finite", cycle=self._cycle, reason=str(error))
            self._head.load_state_dict(self._in_use)
        self._draw()
        return True

    def _train(self, loaded: CycleSamples, must_stop: Any) -> None:
        options = self.options
        started = time.monotonic()
        chosen = HeadTrainingOptions(
            steps=options.steps,
            decay=options.decay,
            epochs=options.epochs,
            batch_tokens=options.batch_tokens,
            learning_rate=options.learning_rate,
            seed=options.seed + self._cycle,
        )
        trainer = HeadTrainer(
            self._head, loaded.samples, loaded.training, loaded.held_out, self._full_head, chosen
        )
        if self._device.type == "cpu":
            require_memory(
                trainer.step_bytes(),
                f"a training step of {options.batch_tokens} tokens takes about",
                "give fewer (batch_tokens, --batch-tokens), or let the serving side collect shorter texts",
            )
        trained = _copied(self._head)
        self._head.load_state_dict(self._in_use)
        before = trainer.measure()
        self._head.load_state_dict(trained)
        del trained

        def after_step() -> None:
            if must_stop():
                raise _StopError

        after_step()
        trainer.run(after_step)
        counts, after = trainer.take_counts(), trainer.measure()
        assert before is not None
        assert after is not None
        old, new = before.tokens_per_round, after.tokens_per_round
        self._log.add(
            "trained",
            cycle=self._cycle,
            steps=trainer.step,
            tokens=int(loaded.samples.lengths[loaded.training].sum()),
            samples=len(loaded.training),
            held_out_samples=len(loaded.held_out),
            unusable=self._replay.unusable,
            seconds=round(time.monotonic() - started, 1),
            draft=self.reference,
            held_out=round(new, 4),
            by_position=after.figures()["by_position"],
            in_use=round(old, 4),
            loss=None if counts is None else counts.figures()["loss"],
        )
        if new >= old + options.better_by:
            self._publish(new, old)
        elif new < old - options.better_by:
            # It unlearned: begin again with what is in use.
            self._head.load_state_dict(self._in_use)

    def _publish(self, new: float, old: float) -> None:
        """Publish the head: checkpoint, draft file, and at last what makes others take it."""
        number = self._folder.next_number()
        kind: Any = self.options.type or ("bf16" if self._head.kind == "mtp" else "q8_0")
        name = f"{number}.safetensors" if self._head.kind == "mtp" else str(number)
        path = self._folder.checkpoints / name
        try:
            checkpoint = write_head(path, self._head, self._weights, dtype="float32")
            to_gguf(checkpoint, self._target, self._folder.draft(number), type=kind)
            self._folder.publish(number, self.reference, round(new, 4), round(old, 4))
        except OSError as error:
            # The head is trained on; there may be room after the next cycle.
            self._log.add("not published", draft=number, reason=str(error))
            _logger.warning("draft %d cannot be published: %s", number, error)
            self._folder.remove_old(self.options.keep)
            return
        self._log.add("published", draft=number, base=self.reference)
        self.reference = number
        self._in_use = _copied(self._head)
        self._folder.remove_old(self.options.keep)

    def _draw(self) -> None:
        try:
            plot_acceptance(self._folder.plot, read_events(self._folder.log))
        except Exception as error:
            # The training must go on.
            _logger.warning("%s cannot be drawn: %r", self._folder.plot, error)


def _copied(head: DraftHead) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}


def _sleep(seconds: float, must_stop: Any) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not must_stop():
        time.sleep(min(0.2, seconds))
