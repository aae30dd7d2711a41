"""Options of a data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llamatap._validate import flag, instance, integer, shown
from llamatap.context import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.states import dtype_name

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a data set: layers, samples, chat template, files.

    :ivar layers: the layers, as ``convention`` counts; None for the three that EAGLE-3 drafters are trained
        on. The layout adds the last layer, unless it is the last of these already.
    :ivar convention: a name of :data:`llamatap.layers.CONVENTIONS`.
    :ivar layout: a name of :data:`llamatap.dataset.LAYOUTS`.
    :ivar dtype: of the states: bfloat16, float16 or float32.
    :ivar max_length: longer samples are cut on the right to this many tokens; None for the context that the
        model was trained for.
    :ivar min_tokens: samples of fewer tokens are left out: of one token nothing can be predicted.
    :ivar min_loss_tokens: so are samples with fewer tokens in the loss mask, after they were cut.
    :ivar template: a chat template in place of the model's own.
    :ivar template_variables: variables for it, e.g. ``enable_thinking``.
    :ivar date: what chat templates take for today, YYYY-MM-DD; None for today, and what it was then on
        ``resume``.
    :ivar supervise_empty_thoughts: whether the loss counts in the empty thoughts that a chat template adds
        (``<think>\\n\\n</think>``): for a model that is to learn when not to think.
    :ivar on_error: whether a sample that fails is left out and reported, or ends the work.
    :ivar resume: go on with what the folder holds.
    :ivar rank: which of the workers this is, from 0.
    :ivar world_size: the number of workers that share the work, each a process with the same arguments.
    :ivar batch_tokens: the most tokens that are computed at once.
    :ivar queue: the most batches that are computed and not yet in their files. A kill loses none of them.
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
                raise InvalidInputError(f"{name} must hold what JSON has: {error}") from None
        unknown = [name for name in self.context if name not in ContextOptions.__annotations__]
        if unknown:
            known = ", ".join(ContextOptions.__annotations__)
            raise InvalidInputError(f"context has no {', '.join(map(str, unknown))}; it takes {known}")
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
                # NumPy's integers become Python's, which JSON has.
                object.__setattr__(self, name, integer(name, value, low))
        if self.rank >= self.world_size:
            raise InvalidInputError(
                f"rank {self.rank} of {self.world_size} workers: ranks count from 0; give world_size"
            )
        flag("supervise_empty_thoughts", self.supervise_empty_thoughts)
        flag("resume", self.resume)
        if self.on_error not in ("skip", "stop"):
            raise InvalidInputError(f"on_error must be 'skip' or 'stop', not {shown(self.on_error)}")
