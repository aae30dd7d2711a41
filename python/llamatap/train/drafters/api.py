"""Training a drafting head from a GGUF file and texts to a draft file and its card."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap._system_limits import require_memory
from llamatap._validate import choice, instance
from llamatap._validate import path as checked_path
from llamatap.convert import to_gguf
from llamatap.convert.gguf_files import WeightType
from llamatap.dataset.options import DatasetOptions
from llamatap.errors import InvalidInputError, ModelNotFoundError, OutOfMemoryError
from llamatap.layers import LayerId, default_eagle3_layers, normalize
from llamatap.model import Model
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.locks import acquire, release
from llamatap.storage.model_files import ModelFiles
from llamatap.train.drafters.card import card_path, drafter_card
from llamatap.train.drafters.engine_acceptance import measure_in_engine
from llamatap.train.drafters.head_checkpoints import read_draft, write_head
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead
from llamatap.train.drafters.options import HEADS, HeadKind, HeadTrainingOptions
from llamatap.train.drafters.sample_split import draft_vocabulary, prompt_of, split_by_prompt, token_counts
from llamatap.train.drafters.sample_tensors import SampleTensors
from llamatap.train.drafters.state_sources import capture_states, is_state_folder, read_texts, stored_states
from llamatap.train.drafters.stop_signals import StopSignals
from llamatap.train.drafters.target_weights import TargetWeights
from llamatap.train.drafters.trainer import HeadTrainer, device_of, is_bfloat16, read_state
from llamatap.train.drafters.training_log import TrainingLog

with needs("train", "training drafters"):
    import torch

__all__ = ["Stage", "TrainedHead", "train_head"]

_logger = logging.getLogger("llamatap")

# Tokens of a pass of the target on the CPU; on a GPU more, as every call of the engine costs.
_PASS = 2048
# Tokens of a text without a prompt after which the engine drafts.
_TEXT_PROMPT = 16

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
        training is of other options, or exists and ``resume`` is False; or the output is a folder, or the
        target.
    :raises UnsupportedError: the target has no single residual stream, or logits that are more than a norm
        and a head.
    :raises OutOfMemoryError: the states, the head or a training step do not fit into memory.
    :raises MissingPackageError: a package of the extra ``train`` is missing.

    SIGTERM and Ctrl-C end the step and save the training's state first; a second one ends at once.
    """
    choice("kind", kind, HEADS)
    options = HeadTrainingOptions() if options is None else options
    instance("options", options, HeadTrainingOptions)
    target_path, data_path = checked_path("target", target), checked_path("data", data)
    draft = checked_path("output", output)
    suffix = {"eagle3": ".gguf", "mtp": ".safetensors"}[kind]
    if draft.suffix != suffix:
        raise InvalidInputError(f"the output of {kind} is a {suffix} file; found {draft.name}")
    if draft.is_dir():
        raise InvalidInputError(f"the output {draft} is a folder")
    if draft.exists() and target_path.exists() and draft.samefile(target_path):
        raise InvalidInputError(f"the output {draft} is the target; choose another name")
    folder = draft.with_name(draft.name + ".training")
    state = folder / "state.pt"
    if state.exists() and not options.resume:
        raise InvalidInputError(
            f"{folder} holds a training; continue it (resume, --resume), or remove the folder"
        )
    for path in (target_path, data_path):
        if not path.exists():
            raise ModelNotFoundError(f"no such file: {path}")
    run = _Run(kind, target_path, data_path, draft, folder, options, type, n_threads, progress)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = acquire(folder, wait=False)
    except BlockingIOError:
        raise InvalidInputError(f"another process trains in {folder}") from None
    try:
        return run(n_gpu_layers, command)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the memory of {run.device} is full; give fewer tokens in a batch (batch_tokens, "
            "--batch-tokens) or shorter samples (max_length, --max-length)"
        ) from error
    finally:
        release(handle)
        # Nothing was trained.
        with contextlib.suppress(OSError):
            folder.rmdir()


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
        self.skipped: dict[int, str] = {}
        self.context = {} if n_threads is None else {"n_threads": n_threads}
        self.progress: Stage = (lambda *_: None) if progress is None else progress
        self.device = device_of(options.device)

    def __call__(self, n_gpu_layers: int, command: Sequence[str]) -> TrainedHead:
        options, state = self.options, self.folder / "state.pt"
        self.pass_tokens = _PASS if n_gpu_layers == 0 else 4 * _PASS
        self.weights = TargetWeights.read(self.target)
        self.target_hash = ModelFiles(self.target).sha256()
        self.start = self._start()
        with Model(self.target, n_gpu_layers=n_gpu_layers) as self.model:
            self.layers = self._layers()
            resumes = options.resume and state.exists()
            if resumes:
                # Before the states are computed, which takes long.
                read_state(state, self._fingerprint())
            self.samples = self._samples()
            training, held_out = split_by_prompt(self.samples, options.held_out, options.seed)
            if options.held_out and not held_out:
                _logger.warning(
                    "none of %d samples is held out (one of 8 is): acceptance is not measured",
                    len(self.samples),
                )
            tokens, coverage = self._draft_vocabulary(training)
            torch.manual_seed(options.seed)
            head = self._head(tokens).to(self.device)
            full_head = torch.from_numpy(self.weights.head).to(self.device)
            trainer = HeadTrainer(head, self.samples, training, held_out, full_head, options)
            if self.device.type == "cpu":
                require_memory(
                    trainer.step_bytes(),
                    f"a training step of {options.batch_tokens} tokens takes about",
                    "give fewer (batch_tokens, --batch-tokens) or shorter samples (max_length, --max-length)",
                )
            fingerprint = {**self._fingerprint(), "samples": self.samples.sha256()}
            self.log = TrainingLog(self.folder, continues=resumes)
            if resumes:
                trainer.load(state, fingerprint)
                self.log.drop_after(trainer.step)
            self.prompts = self._prompts(held_out)
            saved = measured = time.monotonic()

            def after_step() -> None:
                nonlocal saved, measured
                if stop.requested:
                    trainer.save(state, fingerprint)
                    raise KeyboardInterrupt
                now = time.monotonic()
                if now - measured >= 60 * options.measure_minutes:
                    self._measure(trainer)
                    measured = time.monotonic()
                if now - saved >= options.save_seconds:
                    trainer.save(state, fingerprint)
                    saved = time.monotonic()
                self.progress("training", trainer.progress, 1.0, self._figures(trainer))

            with StopSignals() as stop:
                trainer.run(after_step)
            trainer.save(state, fingerprint)
            self._measure(trainer)
            self._write(head)
            facts = self._facts(head, training, held_out, coverage, trainer)
        card = card_path(self.draft)
        with atomic_path(card) as scratch:
            scratch.write_text(drafter_card(self.draft.name, facts, self.log.entries, command))
        return TrainedHead(self.draft, card, self.folder, self.log.entries[-1])

    def _start(self) -> DraftHead | None:
        """The head whose training goes on, if there is one."""
        if self.options.start is None:
            return None
        path = Path(self.options.start)
        if not path.exists():
            raise ModelNotFoundError(f"no such file: {path}")
        head = read_draft(path, self.target, self.weights, self.folder)
        if head.kind != self.kind:
            raise InvalidInputError(f"{path} is a drafter of the kind {head.kind}, not {self.kind}")
        return head

    def _layers(self) -> list[LayerId]:
        """The layers of the samples' columns, H_n last."""
        n = self.model.n_layer
        named = self.options.layers
        if isinstance(self.start, Eagle3Head):
            return [*self.start.target_layers, n]
        if self.kind == "mtp":
            if named is not None:
                raise InvalidInputError("layers (--layers) are EAGLE-3's; an MTP block reads H_n")
            return [n]
        if named is None:
            # Fewer blocks have no three layers that are apart.
            named = default_eagle3_layers(n) if n >= 7 else [0, n // 2, n]
        found = normalize(named, n)
        if len(set(found)) != 3 or "norm" in found:
            raise InvalidInputError(
                f'EAGLE-3 reads three different layers, 0..{n}, not "norm"; found {list(named)}. Give others '
                "(layers=, --layers)"
            )
        return [*found, n]

    def _samples(self) -> SampleTensors:
        if is_state_folder(self.data):
            if self.options.data != DatasetOptions():
                raise InvalidInputError(
                    f"{self.data} holds states of samples that are made already: max_length, template and "
                    "supervise_empty_thoughts are for texts"
                )
            found, made = stored_states(self.data, self.layers)
            if made.get("model_sha256") not in (None, self.target_hash):
                raise InvalidInputError(
                    f"{self.data} holds states of another file, {made.get('model', 'unknown')}; the target "
                    f"is {self.target.name}, sha256 {self.target_hash}"
                )
            return found
        # Attention takes memory with the square of a sample's length.
        limit = self.options.data.max_length or min(self.model.n_ctx_train, self.options.batch_tokens)
        options = dataclasses.replace(self.options.data, max_length=limit)
        texts, skipped = read_texts(self.model, self.data, options)
        self.skipped = skipped
        if skipped:
            reasons = "; ".join(f"row {row}: {why}" for row, why in list(skipped.items())[:3])
            _logger.warning("%d rows of %s are left out: %s", len(skipped), self.data, reasons)
        return capture_states(
            self.model,
            texts,
            self.layers,
            device=self.device if self._fits(texts.n_tokens) else "cpu",
            batch_tokens=self.pass_tokens,
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
        if self.start is not None:
            if self.start.draft_tokens is None:
                return None, 1.0
            tokens = self.start.draft_tokens.numpy()
            counts = token_counts(self.samples, training, self.weights.n_vocab)
            return tokens, float(counts[tokens].sum() / max(int(counts.sum()), 1))
        if self.kind == "mtp" or size == 0 or size >= self.weights.n_vocab:
            return None, 1.0
        counts = token_counts(self.samples, training, self.weights.n_vocab)
        return draft_vocabulary(counts, size)

    def _head(self, tokens: NDArray[np.int64] | None) -> DraftHead:
        if self.start is not None:
            return self.start
        n_ff = self.options.n_ff or self.weights.n_ff
        n_head = 0 if self.kind == "mtp" else self.weights.n_vocab if tokens is None else len(tokens)
        require_memory(
            # Float32: beside the weights their gradients, and the two moments of AdamW.
            (16 if self.device.type == "cpu" else 4) * self.weights.n_embd * (3 * n_ff + n_head),
            f"a head with a feed-forward network of width {n_ff} takes about",
            "give a narrower one (n_ff, --n-ff) or fewer tokens to draft (draft_vocab, --draft-vocab)",
        )
        if self.kind == "mtp":
            return MtpHead(self.weights, self.options.n_ff)
        layers = [int(layer) for layer in self.layers[:-1]]
        return Eagle3Head(self.weights, layers, tokens, self.options.n_ff)

    def _fingerprint(self) -> dict[str, Any]:
        """What a continued training must be equal in, beside the samples."""
        return {
            "kind": self.kind,
            "target": self.target_hash,
            "bfloat16": is_bfloat16(self.options, self.device),
            **({} if self.options.start is None else {"start": Path(self.options.start).name}),
            **self.options.fingerprint(),
        }

    def _prompts(self, held_out: Sequence[int]) -> list[NDArray[np.int32]]:
        found = []
        for i in held_out:
            prompt = prompt_of(self.samples, i)
            if not len(prompt):
                # A plain text: its beginning.
                part = slice(self.samples.offsets[i], self.samples.offsets[i + 1])
                prompt = self.samples.tokens[part][:_TEXT_PROMPT].cpu().numpy()
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
            entry["training"] = counts.figures()
        held_out = trainer.measure()
        entry["held_out"] = None if held_out is None else held_out.figures()
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
        checkpoint = write_head(self._checkpoint, head, self.weights, dtype=self._dtype)
        path = self.folder / "draft.gguf"
        to_gguf(checkpoint, self.target, path, type="bf16" if self.kind == "mtp" else self.type)
        return path

    @property
    def _dtype(self) -> str:
        """Dtype of the checkpoint's matrices, which the draft file's are made of."""
        return "bfloat16" if self.kind == "mtp" or self.type == "bf16" else "float32"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / ("checkpoint" if self.kind == "eagle3" else "mtp.safetensors")

    def _write(self, head: DraftHead) -> None:
        if self.kind == "mtp":
            write_head(self.draft, head, self.weights)
        else:
            checkpoint = write_head(self._checkpoint, head, self.weights, dtype=self._dtype)
            to_gguf(checkpoint, self.target, self.draft, type=self.type)
        # The last measurement's, which may hold the target's embedding and head.
        (self.folder / "draft.gguf").unlink(missing_ok=True)

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
            **({} if self.options.start is None else {"starts from": Path(self.options.start).name}),
            "target": f"{self.target.name}, sha256 {self.target_hash}",
            "parameters": sum(one.numel() for one in head.parameters() if one.requires_grad),
            "data": self.data.name,
            "trained on": f"{len(training):,} samples, {int(sizes[list(training)].sum()):,} tokens",
            "held out": f"{len(held_out):,} samples",
            **({"rows left out": len(self.skipped)} if self.skipped else {}),
            "layers read": [int(one) for one in self.layers[:-1] or self.layers],
        }
        if head.draft_tokens is not None:
            facts["draft vocabulary"] = (
                f"{len(head.draft_tokens):,} tokens, {coverage:.1%} of those predicted in training"
            )
        facts |= {"steps": trainer.step, "minutes": round(trainer.seconds / 60, 1), "options": options}
        if self.device.type == "cuda":
            facts["GPU"] = torch.cuda.get_device_name(self.device)
        licence = self.model.metadata.get("general.license")
        return facts | ({"licence of the target": str(licence)} if licence else {})
