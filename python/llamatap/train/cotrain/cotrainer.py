"""The serving side of co-training: collects samples, and replaces the drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamatap._closeable import Closeable
from llamatap._validate import instance
from llamatap._validate import path as checked_path
from llamatap.context import Context
from llamatap.drafting.model_drafters import DraftOptions
from llamatap.drafting.speculative_context import load_draft
from llamatap.errors import ClosedError, Error, InvalidInputError
from llamatap.loaded_model import files_of
from llamatap.model import Model
from llamatap.storage import locks
from llamatap.storage.file_hashes import file_sha256
from llamatap.train.cotrain.drafter import CoTrainedDrafter
from llamatap.train.cotrain.event_log import EventLog
from llamatap.train.cotrain.folder import CoTrainFolder, ServingSide
from llamatap.train.cotrain.options import CoTrainOptions
from llamatap.train.cotrain.sample_writer import SampleWriter
from llamatap.train.cotrain.text_recorder import TextRecorder
from llamatap.train.cotrain.trainer_process import TrainerProcess
from llamatap.train.cotrain.trial import N_STAGES, TrafficCounts, Trial, stage_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CoTrainer"]

_logger = logging.getLogger("llamatap")


class CoTrainer(Closeable):
    """Co-training, the serving side: a running generation whose drafter is retrained from its own traffic.

    :meth:`drafter` makes drafters for :func:`llamatap.generate` and :class:`llamatap.Session`. The texts that
    they draft for go into the folder as samples; drafts that the trainer publishes there are tried on new
    requests, and kept, or given up when tokens per round fall. The trainer is another process, ``llamatap
    cotrain``, which is started here unless one runs in the folder already, and again when it ends. Either
    process can be killed and started again; the other goes on. PyTorch is needed by the trainer alone.

    :param model: the target.
    :param folder: the folder of both sides; created if missing. With one that was used before, the newest
        draft in it is used.
    :param draft: the drafter's file to begin with: an EAGLE-3 or MTP ``.gguf`` file, or an
        ``mtp.safetensors``.
    :param options: bounds, and how new drafts are tried.
    :param start_trainer: whether to start the trainer; False leaves that to others.
    :param trainer_arguments: further arguments of ``llamatap cotrain``.
    :param python: the Python that runs it, one with PyTorch; None for this one.
    :param n_gpu_layers: layers of drafts on the GPU.
    :raises InvalidInputError: another process serves with the folder, or it belongs to another target.
    :raises OSError: the folder cannot be written.
    """

    # Closed until the folder is locked.
    _closed = True

    def __init__(
        self,
        model: Model,
        folder: str | os.PathLike[str],
        draft: str | os.PathLike[str],
        options: CoTrainOptions | None = None,
        *,
        start_trainer: bool = True,
        trainer_arguments: Sequence[str] = (),
        python: str | os.PathLike[str] | None = None,
        n_gpu_layers: int = 0,
    ) -> None:
        instance("model", model, Model)
        self.options = CoTrainOptions() if options is None else options
        instance("options", self.options, CoTrainOptions)
        self._model = model
        self._draft = checked_path("draft", draft)
        self._n_gpu_layers = n_gpu_layers
        self.folder = CoTrainFolder(folder)
        self._lock = self.folder.lock("serving")
        try:
            self.folder.remove_leftovers("serving")
            self._sha256 = files_of(model).sha256()
            before = self.folder.serving_side()
            if before is not None and before.model_sha256 not in (None, self._sha256):
                raise InvalidInputError(
                    f"{self.folder.path} belongs to another target, {before.model}; give another folder"
                )
        except BaseException:
            locks.release(self._lock)
            raise
        self._before = before
        self._log = EventLog(self.folder.log, "serving")
        self._writer = SampleWriter(self.folder.samples, self.options.max_bytes, self.options.queue_bytes)
        self._drafters: weakref.WeakSet[CoTrainedDrafter] = weakref.WeakSet()
        self._random = random.Random(0)
        # For what the watching thread and those that take drafts change; may be held for a second.
        self._changing = threading.RLock()
        # For the counts of rounds; held for an instant.
        self._counting = threading.Lock()
        self._in_use = self._first_number(before)
        self._side: ServingSide | None = None
        # Whether the folder lacks it.
        self._is_untold = False
        # The error of the last look, so that each is told once.
        self._failure = ""
        #: Rounds of the traffic since they were last looked at, by draft and stage: rounds, accepted tokens.
        self._rounds: Counter[tuple[int, int]] = Counter()
        self._accepted: Counter[tuple[int, int]] = Counter()
        self._traffic = TrafficCounts(self.options.trial_rounds)
        self._trial = self._open_trial(before)
        self._offered: int | None = None
        self._logged = time.monotonic()
        self._unlogged: Counter[tuple[int, str]] = Counter()
        self._n_logged_samples = 0
        command = [sys.executable if python is None else os.fspath(python), "-m", "llamatap", "cotrain"]
        command += [str(model.path), str(self.folder.path), "--draft", str(self._draft), "--follow"]
        self._trainer = (
            TrainerProcess([*command, *trainer_arguments], self.folder, self._log) if start_trainer else None
        )
        self._ending = threading.Event()
        self._closed = False
        self._log.add("serving started", model=model.path.name, draft=self._in_use)
        self._thread = threading.Thread(target=self._watch, name="llamatap-cotrain", daemon=True)
        self._thread.start()

    def _first_number(self, before: ServingSide | None) -> int:
        """Number of the draft to begin with: the one that was in use in the folder, if it is still there."""
        number = 0 if before is None else before.in_use
        return number if number not in self.folder.refused() and self._problem(number) is None else 0

    def _open_trial(self, before: ServingSide | None) -> Trial | None:
        """The trial that was not over when the process before this one ended: it begins anew."""
        if before is None or self._in_use != before.in_use or len(before.before_rates or ()) != N_STAGES:
            return None
        return Trial(before.before, list(before.before_rates or ()))

    # For those who generate.

    def drafter(self, context: Context, **options: Unpack[DraftOptions]) -> CoTrainedDrafter:
        """A drafter for :func:`llamatap.generate` or a session in a context of the model.

        :param context: the context to generate in.
        :param options: as in :func:`llamatap.load_drafter`.
        :raises InvalidInputError: the context is of another model, the draft does not fit it, is neither
            EAGLE-3 nor MTP, or reads other layers than the folder's.
        :raises Error: the draft cannot be loaded.
        :raises ClosedError: it was closed.
        """
        instance("context", context, Context)
        if self._closed:
            raise ClosedError("the co-trainer was closed; create another one")
        if context.model is not self._model:
            raise InvalidInputError("the context is of another model; co-training is for one")
        with self._changing:
            number = self._in_use
            model = self._load(number)
            try:
                made = CoTrainedDrafter(context, number, model, self, **options)
            except BaseException:
                model.close()
                raise
            try:
                self._tell(made, context.n_threads)
            except BaseException:
                made.close()
                raise
            self._drafters.add(made)
            if self._offered is not None:
                # What the other drafters will take.
                with contextlib.suppress(Error, OSError, MemoryError):
                    made.offer(self._offered, self._load(self._offered))
        return made

    def _load(self, number: int) -> Model:
        path = self._draft if number == 0 else self.folder.draft(number)
        return load_draft(self._model, path, n_gpu_layers=self._n_gpu_layers)

    def _tell(self, made: CoTrainedDrafter, n_threads: int) -> None:
        """Tell the trainer what the samples hold.

        :raises InvalidInputError: those of before hold something else.
        :raises OSError: a new folder cannot be written.
        """
        layers = tuple(int(layer) for layer in made.target_layers)
        said = self._side or self._before
        if said is not None and (said.kind, said.layers) != (made.kind, layers):
            raise InvalidInputError(
                f"{self.folder.path} belongs to a drafter of kind {said.kind} on the layers "
                f"{list(said.layers)}, this is {made.kind} on {list(layers)}; give another folder"
            )
        name, trial = self._model.path.name, self._trial_record()
        side = ServingSide(name, self._sha256, made.kind, layers, n_threads, **trial, closed=False)
        if said is None:
            # A new folder: now or never.
            self.folder.tell(side)
        self._say(side)

    def _trial_record(self) -> dict[str, Any]:
        trial = self._trial
        return {
            "in_use": self._in_use,
            "before": self._in_use if trial is None else trial.before,
            "before_rates": None if trial is None else [round(rate, 4) for rate in trial.rates],
        }

    def _say(self, side: ServingSide) -> None:
        """Tell the trainer; later, if the folder cannot be written: the requests must go on."""
        self._side = side
        try:
            self.folder.tell(side)
            self._is_untold = False
        except OSError as error:
            if not self._is_untold:
                _logger.warning("co-training in %s: %s", self.folder.path, error)
            self._is_untold = True

    @property
    def in_use(self) -> int:
        """Number of the draft in use for new requests; 0 for the one that it began with."""
        return self._in_use

    @property
    def trial(self) -> Trial | None:
        """The trial of the draft in use; None when it was kept."""
        return self._trial

    @property
    def dropped(self) -> dict[str, int]:
        """Number of texts that are no samples, or no longer, by reason
        (:attr:`~llamatap.train.cotrain.sample_writer.SampleWriter.dropped`)."""
        return self._writer.dropped

    @property
    def trainer_pid(self) -> int | None:
        """Process id of the trainer that was started here, while it runs."""
        return None if self._trainer is None else self._trainer.pid

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def flush(self) -> bool:
        """Wait until the samples of finished texts are in the folder. Returns whether they are."""
        return self._writer.flush()

    def close(self) -> None:
        """Write the samples of finished texts, end the trainer that was started here, and leave the folder.
        Close sessions first; drafters that are still in use go on with their draft. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        self._ending.set()
        try:
            self._thread.join()
            self._writer.close()
            with self._changing:
                self._count()
                self._log_acceptance()
                if self._side is not None:
                    self._say(dataclasses.replace(self._side, closed=True))
            self._log.add("serving ended", draft=self._in_use)
        finally:
            if self._trainer is not None:
                self._trainer.close()
            locks.release(self._lock)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"draft {self._in_use}"
        return f"CoTrainer({str(self.folder.path)!r}, {state})"

    # Told by drafters, in the threads that generate.

    def recorder(self) -> TextRecorder | None:
        """See :class:`~llamatap.train.cotrain.drafter.Told`."""
        if self._closed or (self.options.share < 1 and self._random.random() >= self.options.share):
            return None
        return TextRecorder(self.options.max_length)

    def collect(self, recorder: TextRecorder) -> None:
        """See :class:`~llamatap.train.cotrain.drafter.Told`."""
        if (sample := recorder.finish()) is None:
            self._writer.drop("nothing generated")
        else:
            self._writer.put(*sample)

    def round(self, draft: int, n_before: int, accepted: int) -> None:
        """See :class:`~llamatap.train.cotrain.drafter.Told`."""
        key = draft, stage_of(n_before)
        with self._counting:
            self._rounds[key] += 1
            self._accepted[key] += accepted

    def taken(self, draft: int) -> None:
        """See :class:`~llamatap.train.cotrain.drafter.Told`."""
        with self._changing:
            if self._offered != draft:
                # Another drafter of several took it first.
                return
            self._count()
            self._offered = None
            before, self._in_use = self._in_use, draft
            going_back = self._trial is not None and self._trial.before == draft
            self._trial = None if going_back else Trial(before, self._traffic.rates())
            self._traffic = TrafficCounts(self.options.trial_rounds)
            if not going_back:
                self._log.add("swapped", draft=draft, before=before)
            self._say_in_use()

    def not_taken(self, draft: int, error: Exception) -> None:
        """See :class:`~llamatap.train.cotrain.drafter.Told`."""
        with self._changing:
            if self._offered == draft:
                self._offered = None
                self._refuse(draft, str(error))

    # What the thread does from time to time.

    def _watch(self) -> None:
        while not self._ending.wait(self.options.poll_seconds):
            self._safe_look()

    def _safe_look(self) -> None:
        try:
            self.look()
            self._failure = ""
        except Exception as error:
            # The requests must go on.
            if repr(error) != self._failure:
                _logger.exception("co-training in %s failed", self.folder.path)
            self._failure = repr(error)

    def look(self) -> None:
        """Look into the folder once, as a thread does every ``poll_seconds``: count the traffic, judge the
        trial, offer a new draft, keep the trainer running, write the log."""
        with self._changing:
            if self._closed:
                return
            self._count()
            if self._offered is not None and not any(one.has_offer for one in self._drafters):
                # The drafter that was to take it is gone.
                self._offered = None
            self._judge()
            if time.monotonic() - self._logged >= self.options.log_seconds:
                self._log_acceptance()
            if self._side is None:
                return
            if self._is_untold:
                self._say(self._side)
            self.folder.give_sign()
            if self._trainer is not None:
                self._trainer.look()
        self._offer_newest()

    def _count(self) -> None:
        """Count the rounds since the last time."""
        with self._counting:
            found = [(*key, rounds, self._accepted[key]) for key, rounds in self._rounds.items()]
            self._rounds.clear()
            self._accepted.clear()
        for draft, stage, rounds, accepted in found:
            self._unlogged[draft, "rounds"] += rounds
            self._unlogged[draft, "accepted"] += accepted
            if draft == self._in_use:
                self._traffic.add(stage, rounds, accepted)
                if self._trial is not None:
                    self._trial.counts.add(stage, rounds, accepted)

    def _judge(self) -> None:
        trial = self._trial
        if trial is None or self._offered is not None or not self._open_drafters():
            return
        verdict = trial.verdict(self.options)
        if verdict == "keep":
            self._trial = None
            self._log.add("kept", draft=self._in_use, **_figures(trial))
            self._say_in_use()
            return
        if verdict is None:
            return
        given_up = self._in_use
        problem = self._problem(trial.before)
        figures = _figures(trial)
        self._log.add("went back", draft=given_up, to=trial.before, problem=problem, **figures)
        self.folder.refuse(given_up, "tokens per round fell on the traffic", figures)
        if problem is not None or not self._offer(trial.before):
            # Nothing better is at hand than the one in use.
            self._trial = None

    def _offer_newest(self) -> None:
        """Offer the newest published draft, once the traffic of the one in use is known."""
        with self._changing:
            busy = self._trial is not None or self._offered is not None or not self._open_drafters()
            if busy or self._traffic.rounds < self.options.trial_rounds:
                return
            number = max(self.folder.candidates(), default=0)
            if number <= self._in_use:
                return
        problem = self._problem(number)
        with self._changing:
            if problem is not None:
                self._refuse(number, problem)
            else:
                self._offer(number)

    def _open_drafters(self) -> list[CoTrainedDrafter]:
        return [one for one in self._drafters if not one.closed]

    def _problem(self, number: int) -> str | None:
        """What is wrong with a published file; None if it is as published."""
        if number == 0:
            return None
        try:
            said = self.folder.published(number)
            path = self.folder.draft(number)
            if said is None or not path.is_file():
                return "the file is gone"
            if path.stat().st_size != said.n_bytes or file_sha256(path) != said.sha256:
                return "the file is broken: it is not the one that was published"
        except (Error, OSError) as error:
            return str(error)
        return None

    def _offer(self, number: int) -> bool:
        """Load a draft for each drafter, which takes it between two rounds. Returns whether it could be
        loaded."""
        drafters = self._open_drafters()
        models: list[Model] = []
        try:
            models.extend(self._load(number) for _ in drafters)
        except (Error, OSError, MemoryError) as error:
            for one in models:
                one.close()
            self._refuse(number, str(error))
            return False
        self._offered = number
        for drafter, model in zip(drafters, models, strict=True):
            drafter.offer(number, model)
        return True

    def _refuse(self, number: int, reason: str) -> None:
        self._log.add("refused", draft=number, reason=reason)
        if number != 0:
            self.folder.refuse(number, reason, {})

    def _say_in_use(self) -> None:
        if self._side is not None:
            self._say(dataclasses.replace(self._side, **self._trial_record()))

    def _log_acceptance(self) -> None:
        self._logged = time.monotonic()
        written = self._writer.written
        for draft in sorted({draft for draft, _ in self._unlogged}):
            rounds, accepted = self._unlogged[draft, "rounds"], self._unlogged[draft, "accepted"]
            self._log.add(
                "acceptance",
                draft=draft,
                rounds=rounds,
                tokens_per_round=round(1 + accepted / max(rounds, 1), 4),
                samples=written - self._n_logged_samples,
                dropped=self._writer.dropped,
            )
            self._n_logged_samples = written
        self._unlogged.clear()


def _figures(trial: Trial) -> dict[str, Any]:
    return {
        "tokens_per_round": round(trial.counts.tokens_per_round, 4),
        "before": round(trial.expected, 4),
        "rounds": round(trial.counts.rounds),
    }
