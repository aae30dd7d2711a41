"""Training a drafting head from a GGUF file and texts to a draft file and its card."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap._validate import choice, instance
from llamatap._validate import path as checked_path
from llamatap.convert import to_gguf
from llamatap.convert.gguf_files import WeightType
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId, default_eagle3_layers, normalize
from llamatap.model import Model
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.file_hashes import file_sha256
from llamatap.storage.locks import locked
from llamatap.train.drafters.card import drafter_card
from llamatap.train.drafters.engine_acceptance import measure_in_engine
from llamatap.train.drafters.head_checkpoints import write_head
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead
from llamatap.train.drafters.multi_step_loss import StepCounts
from llamatap.train.drafters.options import HEADS, HeadKind, HeadTrainingOptions
from llamatap.train.drafters.sample_split import draft_vocabulary, prompt_of, split_by_prompt, token_counts
from llamatap.train.drafters.sample_tensors import SampleTensors
from llamatap.train.drafters.state_sources import capture_states, is_state_folder, read_texts, stored_states
from llamatap.train.drafters.target_weights import TargetWeights
from llamatap.train.drafters.trainer import HeadTrainer
from llamatap.train.drafters.training_log import TrainingLog

with needs("train", "training drafters"):
    import torch

__all__ = ["Stage", "TrainedHead", "train_head"]

#: Called with the name of a stage ("states", "training"), how far it is and how far it goes, and figures.
Stage = Callable[[str, float, float, dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """Result of a training.

    :ivar path: the draft file.
    :ivar card: its card.
    :ivar folder: log, plot, checkpoint and state of the training.
    :ivar figures: the last entry of the log.
    """

    path: Path
    card: Path
    folder: Path
    figures: dict[str, Any]


def train_head(
    kind: HeadKind,
    target: str | os.PathLike[str],
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: HeadTrainingOptions | None = None,
    *,
    type: WeightType = "q8_0",
    n_gpu_layers: int = 0,
    n_threads: int | None = None,
    progress: Stage | None = None,
    command: Sequence[str] = (),
) -> TrainedHead:
    """Train an EAGLE-3 head or an MTP block for a GGUF file, and write the draft file.

    The folder ``OUTPUT.training`` holds what the training needs to continue after a kill, its log, a plot
    and the checkpoint. Samples whose prompt (the tokens before the first one that counts) is that of a
    held-out sample are not trained on.

    :param kind: "eagle3" (https://arxiv.org/abs/2503.01840) or "mtp" (https://arxiv.org/abs/2412.19437,
        section 2.2).
    :param target: the GGUF file to draft for.
    :param data: texts, conversations or token ids as ``llamatap dataset`` takes them, whose states the target
        computes now; or a folder with states that it wrote (layouts ``npy`` and ``speculators``).
    :param output: a ``.gguf`` file; for "mtp" a ``.safetensors`` file of the block alone.
    :param type: type of the matrices of a GGUF file; a ``.safetensors`` file has bfloat16.
    :param n_gpu_layers: the target's layers on the GPU, -1 for all.
    :param n_threads: threads of the engine.
    :param progress: called as :data:`Stage` says.
    :param command: the command for the card.
    :raises InvalidInputError: the data hold nothing to train on, or belong to another target; the output's
        training is of other options; or it exists and ``resume`` is False.
    :raises UnsupportedError: the target has no single residual stream, or logits that are more than a norm
        and a head.
    :raises OutOfMemoryError: the states do not fit into memory.
    :raises MissingPackageError: a package of the extra ``train`` is missing.

    SIGTERM and Ctrl-C save the training's state first.
    """
    choice("kind", kind, HEADS)
    options = HeadTrainingOptions() if options is None else options
    instance("options", options, HeadTrainingOptions)
    target_path, data_path = checked_path("target", target), checked_path("data", data)
    draft = checked_path("output", output)
    suffix = {"eagle3": ".gguf", "mtp": ".safetensors"}[kind]
    if draft.suffix != suffix:
        raise InvalidInputError(f"the output of {kind} is a {suffix} file; found {draft.name}")
    folder = draft.with_name(draft.name + ".training")
    state = folder / "state.pt"
    if state.exists() and not options.resume:
        raise InvalidInputError(
            f"{folder} holds a training; continue it (resume, --resume), or remove the folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(folder, wait=False)
        with lock:
            run = _Run(kind, target_path, data_path, draft, folder, options, type, n_threads, progress)
            return run(n_gpu_layers, command)
    except BlockingIOError:
        raise InvalidInputError(f"another process trains in {folder}") from None


class _Run:
    """One training, from the files to the files."""

    def __init__(
        self,
        kind: HeadKind,
        target: Path,
        data: Path,
        draft: Path,
        folder: Path,
        options: HeadTrainingOptions,
        type: WeightType,
        n_threads: int | None,
        progress: Stage | None,
    ) -> None:
        self.kind, self.target, self.data, self.draft, self.folder = kind, target, data, draft, folder
        self.options, self.type = options, type
        self.context = {} if n_threads is None else {"n_threads": n_threads}
        self.progress: Stage = (lambda *_: None) if progress is None else progress
        name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(name)

    def __call__(self, n_gpu_layers: int, command: Sequence[str]) -> TrainedHead:
        options, state = self.options, self.folder / "state.pt"
        self.weights = TargetWeights.read(self.target)
        with Model(self.target, n_gpu_layers=n_gpu_layers) as self.model:
            self.layers = self._layers()
            self.samples = self._samples()
            training, held_out = split_by_prompt(self.samples, options.held_out, options.seed)
            tokens, coverage = self._draft_vocabulary(training)
            torch.manual_seed(options.seed)
            head = self._head(tokens).to(self.device)
            full_head = torch.from_numpy(self.weights.head).to(self.device)
            trainer = HeadTrainer(head, self.samples, training, held_out, full_head, options)
            fingerprint = self._fingerprint()
            resumes = options.resume and state.exists()
            self.log = TrainingLog(self.folder, continues=resumes)
            if resumes:
                trainer.load(state, fingerprint)
                self.log.drop_after(trainer.step)
            self.prompts = self._prompts(held_out)
            saved = measured = time.monotonic()

            def after_step() -> None:
                nonlocal saved, measured
                now = time.monotonic()
                if now - measured >= 60 * options.measure_minutes:
                    self._measure(trainer)
                    measured = time.monotonic()
                if now - saved >= options.save_seconds:
                    trainer.save(state, fingerprint)
                    saved = time.monotonic()
                self.progress("training", trainer.progress, 1.0, self._figures(trainer))

            try:
                with _interruptible():
                    trainer.run(after_step)
            finally:
                trainer.save(state, fingerprint)
            self._measure(trainer)
            self._write(head)
            facts = self._facts(head, training, held_out, coverage, trainer)
        card = self.draft.with_suffix(".md")
        with atomic_path(card) as scratch:
            scratch.write_text(drafter_card(self.draft.name, facts, self.log.entries, command))
        return TrainedHead(self.draft, card, self.folder, self.log.entries[-1])

    def _layers(self) -> list[LayerId]:
        """The layers of the samples' columns, H_n last."""
        n = self.model.n_layer
        if self.kind == "mtp":
            return [n]
        named = default_eagle3_layers(n) if self.options.layers is None else self.options.layers
        found = normalize(named, n)
        if len(found) != 3 or "norm" in found:
            raise InvalidInputError(f'EAGLE-3 reads three layers, 0..{n}, not "norm"; found {list(named)}')
        return [*found, n]

    def _samples(self) -> SampleTensors:
        if is_state_folder(self.data):
            found, made = stored_states(self.data, self.layers)
            if made.get("model_sha256") not in (None, file_sha256(self.target)):
                raise InvalidInputError(
                    f"{self.data} holds states of another file ({made.get('model', 'unknown')})"
                )
            return found
        limit = self.options.data.max_length or self.model.n_ctx_train
        options = dataclasses.replace(self.options.data, max_length=limit)
        texts, _ = read_texts(self.model, self.data, options)
        return capture_states(
            self.model,
            texts,
            self.layers,
            device=self.device if self._fits(texts.n_tokens) else "cpu",
            progress=lambda done: self.progress("states", done, texts.n_tokens, {}),
            **self.context,
        )

    def _fits(self, n_tokens: int) -> bool:
        """Whether the states fit into half of the GPU's free memory."""
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        return bool(2 * n_tokens * len(self.layers) * self.weights.n_embd < free // 2)

    def _draft_vocabulary(self, training: Sequence[int]) -> tuple[NDArray[np.int64] | None, float]:
        size = self.options.draft_vocab
        if self.kind == "mtp" or size in (0, self.weights.n_vocab):
            return None, 1.0
        counts = token_counts(self.samples, training, self.weights.n_vocab)
        return draft_vocabulary(counts, size)

    def _head(self, tokens: NDArray[np.int64] | None) -> DraftHead:
        if self.kind == "mtp":
            return MtpHead(self.weights, self.options.n_ff)
        layers = [int(layer) for layer in self.layers[:-1]]
        return Eagle3Head(self.weights, layers, tokens, self.options.n_ff)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "target": file_sha256(self.target),
            "tokens": self.samples.n_tokens,
            "samples": len(self.samples),
            **self.options.fingerprint(),
        }

    def _prompts(self, held_out: Sequence[int]) -> list[NDArray[np.int32]]:
        found = []
        for i in held_out:
            prompt = prompt_of(self.samples, i)
            if len(prompt):
                found.append(prompt.astype(np.int32))
            if len(found) == self.options.engine_prompts:
                break
        return found[: self.options.engine_prompts]

    def _measure(self, trainer: HeadTrainer) -> None:
        entry: dict[str, Any] = {
            "step": trainer.step,
            "epoch": trainer.epoch,
            "seconds": round(trainer.seconds, 1),
        }
        entry["learning_rate"] = trainer.learning_rate
        counts = trainer.take_counts()
        if counts is None:
            if self.log.entries and self.log.entries[-1]["step"] == trainer.step:
                return
            entry["training"] = None
        else:
            entry["training"] = _by_step(counts)
        held_out = trainer.measure()
        entry["held_out"] = None if held_out is None else _by_step(held_out)
        if self.prompts:
            found = measure_in_engine(
                self.model,
                self._export(trainer.head),
                self.prompts,
                self.options.steps,
                self.options.engine_tokens,
                **self.context,
            )
            entry["engine"] = {
                "tokens_per_round": found.tokens_per_round,
                "by_position": list(found.by_position),
                "tokens": found.tokens,
            }
        self.log.add(entry)
        self.log.plot()

    def _export(self, head: DraftHead) -> Path:
        """A draft file of the head as it is now."""
        checkpoint = write_head(self._checkpoint, head, self.weights)
        path = self.folder / "draft.gguf"
        to_gguf(checkpoint, self.target, path, type=self.type)
        return path

    @property
    def _checkpoint(self) -> Path:
        return self.folder / ("checkpoint" if self.kind == "eagle3" else "mtp.safetensors")

    def _write(self, head: DraftHead) -> None:
        if self.kind == "mtp":
            write_head(self.draft, head, self.weights)
        else:
            to_gguf(write_head(self._checkpoint, head, self.weights), self.target, self.draft, type=self.type)

    def _figures(self, trainer: HeadTrainer) -> dict[str, Any]:
        last = self.log.entries[-1] if self.log.entries else {}
        measured = last.get("engine") or last.get("held_out") or {}
        return {
            "epoch": trainer.epoch,
            "step": trainer.step,
            **({"tokens/round": measured["tokens_per_round"]} if measured else {}),
        }

    def _facts(
        self,
        head: DraftHead,
        training: Sequence[int],
        held_out: Sequence[int],
        coverage: float,
        trainer: HeadTrainer,
    ) -> dict[str, Any]:
        sizes = self.samples.lengths
        options = {key: value for key, value in self.options.fingerprint().items() if value is not None}
        facts: dict[str, Any] = {
            "kind": self.kind,
            "target": f"{self.target.name}, sha256 {file_sha256(self.target)}",
            "parameters": sum(one.numel() for one in head.parameters() if one.requires_grad),
            "data": self.data.name,
            "trained on": f"{len(training):,} samples, {int(sizes[list(training)].sum()):,} tokens",
            "held out": f"{len(held_out):,} samples",
            "layers": [one if one == "norm" else int(one) for one in self.layers],
        }
        if head.draft_tokens is not None:
            facts["draft vocabulary"] = (
                f"{len(head.draft_tokens):,} tokens, {coverage:.1%} of those predicted"
            )
        facts |= {"steps": trainer.step, "minutes": round(trainer.seconds / 60, 1), "options": options}
        licence = self.model.metadata.get("general.license")
        return facts | ({"licence of the target": str(licence)} if licence else {})


def _by_step(counts: StepCounts) -> dict[str, Any]:
    predicted = counts.predicted.clamp(min=1)
    return {
        "loss": [round(x, 4) for x in (counts.loss / predicted).tolist()],
        "by_position": [round(x, 4) for x in (counts.accepted / predicted).tolist()],
        "tokens_per_round": round(counts.tokens_per_round, 4),
        "tokens": int(counts.predicted[0]),
    }


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in this block, if it is in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
