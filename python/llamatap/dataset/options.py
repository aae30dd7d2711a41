"""Options of a data set of hidden states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llamatap._validate import choice, flag, instance, integer
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.states import dtype_name

__all__ = ["DatasetOptions"]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options of a data set: layers, samples, chat template, files.

    :ivar layers: layer ids, numbered as ``convention`` says; None for the three layers that EAGLE-3 drafters
        are trained on. The layout appends the last layer unless it is the last id already.
    :ivar convention: a name of :data:`llamatap.layers.CONVENTIONS`.
    :ivar layout: a name of :data:`llamatap.dataset.LAYOUTS`.
    :ivar dtype: dtype of the states: bfloat16, float16 or float32.
    :ivar max_length: maximum number of tokens in a sample; longer ones are truncated on the right. None for
        the context length that the model was trained with.
    :ivar min_tokens: samples with fewer tokens are skipped: a single token has nothing to predict.
    :ivar min_loss_tokens: samples with fewer tokens in the loss mask, after truncation, are skipped.
    :ivar template: a chat template, instead of the model's own.
    :ivar template_variables: variables for the template, e.g. ``enable_thinking``.
    :ivar date: the date that chat templates see as today, YYYY-MM-DD. None for today; on ``resume``, for the
        date of the first run.
    :ivar supervise_empty_thoughts: include the empty thoughts that a chat template adds
        (``<think>\\n\\n</think>``) in the loss mask, for a model that is to learn when not to think.
    :ivar on_error: "skip" leaves out samples that fail and reports them, "stop" raises.
    :ivar resume: continue the data set in the folder.
    :ivar rank: the rank of this worker, from 0.
    :ivar world_size: the number of workers that share the samples, each a process with the same arguments.
    :ivar batch_tokens: maximum number of tokens computed at once.
    :ivar queue: maximum number of batches that are computed and not yet written. None is lost when killed.
    :ivar context: options of :class:`llamatap.Extractor`, e.g. ``n_threads`` or ``type_k``.
    :raises InvalidInputError: a value is wrong.
    """

    layers: Sequence[LayerId] | None = None
    convention: str = "llamatap"
    layout: str = "speculators"
    dtype: str = "bfloat16"
    max_length: int | None = None
    min_tokens: int = 2
    min_loss_tokens: int = 1
    template: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    supervise_empty_thoughts: bool = False
    on_error: Literal["skip", "stop"] = "skip"
    resume: bool = False
    rank: int = 0
    world_size: int = 1
    batch_tokens: int = 512
    queue: int = 2
    context: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype_name(self.dtype)
        for name in ("convention", "layout"):
            instance(name, getattr(self, name), str)
        for name in ("template", "date"):
            if getattr(self, name) is not None:
                instance(name, getattr(self, name), str)
        for name in ("template_variables", "context"):
            instance(name, getattr(self, name), Mapping)
            try:
                json.dumps(dict(getattr(self, name)))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidInputError(f"{name} must hold JSON values: {error}") from None
        unknown = [name for name in self.context if name not in ContextOptions.__annotations__]
        if unknown:
            known = ", ".join(ContextOptions.__annotations__)
            raise InvalidInputError(f"context has no option {', '.join(map(str, unknown))}; it takes {known}")
        for name, low in (
            ("max_length", 1),
            ("min_tokens", 1),
            ("min_loss_tokens", 0),
            ("rank", 0),
            ("world_size", 1),
            ("batch_tokens", 1),
            ("queue", 1),
        ):
            value = getattr(self, name)
            if value is not None or name != "max_length":
                # Python integers, because JSON cannot hold NumPy's.
                object.__setattr__(self, name, integer(name, value, low))
        if self.rank >= self.world_size:
            raise InvalidInputError(
                f"rank must be less than world_size={self.world_size}, not {self.rank}: ranks count from 0"
            )
        flag("supervise_empty_thoughts", self.supervise_empty_thoughts)
        flag("resume", self.resume)
        choice("on_error", self.on_error, ("skip", "stop"))
