"""Options of training a drafting head."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llamatap._validate import choice, flag, instance, integer, number
from llamatap._validate import path as checked_path
from llamatap.dataset.options import DatasetOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

__all__ = ["HEADS", "HeadKind", "HeadTrainingOptions"]

#: Kinds of heads that can be trained.
HeadKind: TypeAlias = Literal["eagle3", "mtp"]
HEADS: tuple[HeadKind, ...] = ("eagle3", "mtp")


@dataclass(frozen=True, kw_only=True)
class HeadTrainingOptions:
    """Options of training a drafting head.

    :ivar layers: EAGLE-3's three layers of the target; None for 2, n/2 and n-3. An MTP block has none.
    :ivar draft_vocab: EAGLE-3: size of the draft vocabulary, the tokens that are predicted most often in the
        data; 0, or as many as the target has, for its whole vocabulary.
    :ivar n_ff: width of the head's feed-forward network; None for the target's.
    :ivar steps: drafting steps in the loss; drafts should not be much longer.
    :ivar decay: weight of a step in the loss, relative to the step before it.
    :ivar epochs: passes over the data.
    :ivar minutes: end after this time, even if epochs are left; None for no limit. The learning rate falls
        to its end by whichever comes first.
    :ivar batch_tokens: maximum number of tokens in a batch, padding included.
    :ivar learning_rate: its highest value, after ``warmup`` steps; then it falls as a cosine, to 2 % of it.
    :ivar warmup: optimizer steps in which the learning rate rises, at most a tenth of all.
    :ivar weight_decay: of AdamW, on matrices.
    :ivar gradient_clip: maximum norm of the gradient.
    :ivar precision: "float32", or "bfloat16" for matrix products (the weights stay in float32); "auto" is
        bfloat16 on a GPU.
    :ivar device: PyTorch's name of a device; None for a GPU if there is one.
    :ivar seed: of the initial weights, the order of samples and the choice of held-out ones.
    :ivar held_out: maximum number of samples that are not trained on; at most an eighth of all.
    :ivar measure_minutes: minutes between measurements on the held-out samples.
    :ivar engine_prompts: prompts of held-out samples that the engine drafts on at each measurement; 0 leaves
        that out.
    :ivar engine_tokens: maximum number of tokens that it generates after each.
    :ivar save_seconds: seconds between saves of the training's state: the most that a kill costs.
    :ivar resume: continue the training that was begun for the same output.
    :ivar start: a draft file of the same kind, or its checkpoint, whose weights are trained further, for
        instance on more data. Layers, draft vocabulary and width are then its own: ``layers``,
        ``draft_vocab`` and ``n_ff`` are not used.
    :ivar data: how rows become samples: ``max_length``, ``template``, ``supervise_empty_thoughts``, ...
    :raises InvalidInputError: a value is wrong.
    """

    layers: Sequence[LayerId] | None = None
    draft_vocab: int = 8192
    n_ff: int | None = None
    steps: int = 3
    decay: float = 0.8
    epochs: int = 8
    minutes: float | None = None
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str | None = None
    seed: int = 0
    held_out: int = 64
    measure_minutes: float = 3.0
    engine_prompts: int = 8
    engine_tokens: int = 64
    save_seconds: float = 60.0
    resume: bool = False
    start: str | os.PathLike[str] | None = None
    data: DatasetOptions = field(default_factory=DatasetOptions)

    def __post_init__(self) -> None:
        for name, low in (
            ("draft_vocab", 0),
            ("steps", 1),
            ("epochs", 1),
            ("batch_tokens", 2),
            ("warmup", 0),
            ("seed", 0),
            ("held_out", 0),
            ("engine_prompts", 0),
            ("engine_tokens", 1),
        ):
            integer(name, getattr(self, name), low)
        if self.n_ff is not None:
            integer("n_ff", self.n_ff, 1)
        for name in ("decay", "learning_rate", "gradient_clip", "measure_minutes", "save_seconds"):
            _above_zero(name, getattr(self, name))
        if not number("weight_decay", self.weight_decay) >= 0:
            raise InvalidInputError(f"weight_decay must be 0 or more, not {self.weight_decay!r}")
        if self.minutes is not None:
            _above_zero("minutes", self.minutes)
        choice("precision", self.precision, ("auto", "float32", "bfloat16"))
        flag("resume", self.resume)
        if self.start is not None:
            checked_path("start", self.start)
            if self.layers is not None or self.n_ff is not None:
                raise InvalidInputError("layers and n_ff are those of the draft that training starts from")
        instance("data", self.data, DatasetOptions)

    def fingerprint(self) -> dict[str, Any]:
        """The options that a resumed training must share with the one that it continues."""
        free = {"minutes", "device", "measure_minutes", "engine_prompts", "engine_tokens", "save_seconds"}
        found = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name not in free | {"resume", "start", "data"}
        }
        return found | {"layers": None if self.layers is None else list(self.layers)}


def _above_zero(name: str, value: object) -> None:
    # NaN fails the comparison.
    if not number(name, value) > 0:
        raise InvalidInputError(f"{name} must be above 0, not {value!r}")
