"""Drafters with a draft context: EAGLE-3, MTP, DFlash, and smaller language models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from llamatap._native import _core, flush_log, native_of
from llamatap._options import Option, checked_options, takes_options
from llamatap._validate import instance
from llamatap.context import Batch, Context
from llamatap.drafting.chain import members
from llamatap.drafting.draft_length import MaxTokens, checked_n_max, checked_n_min, numeric_n_max
from llamatap.drafting.drafter import Drafter
from llamatap.drafting.native_drafter import NativeDrafter
from llamatap.drafting.ngram import NGramDrafter
from llamatap.drafting.speculative_context import SpeculativeContext, call_at_close, load_draft
from llamatap.drafting.suffix import SuffixDrafter, SuffixOptions
from llamatap.errors import InvalidInputError, ModelNotFoundError
from llamatap.loaded_model import LoadedModel
from llamatap.states import States

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "DFlashDrafter",
    "DraftOptions",
    "Eagle3Drafter",
    "ModelDrafter",
    "MtpDrafter",
    "SpeculativeDrafter",
    "draft_contexts",
    "load_drafter",
    "named_drafter",
]


class DraftOptions(TypedDict, total=False):
    """Keyword arguments of :class:`SpeculativeDrafter`."""

    n_max: Annotated[
        MaxTokens,
        Option(
            4,
            'maximum number of tokens in a draft, or "auto". Some files give fewer: several MTP blocks one '
            "token each, DFlash one block",
            check=checked_n_max,
        ),
    ]
    n_min: Annotated[int, Option(0, "shorter drafts are dropped, unless they were sampled", low=0)]
    p_min: Annotated[
        float,
        Option(
            0.0,
            "a draft ends where no token has at least this probability; with DSpark, where its confidence "
            "head "
            "gives less",
            low=0,
            high=1,
        ),
    ]
    temperature: Annotated[
        float,
        Option(
            0.0,
            "0 drafts the most likely tokens. Above 0, tokens are sampled from softmax(logits / temperature) "
            "and drafts carry their distributions, for ``generate(..., rejection=True)``",
            low=0,
        ),
    ]
    seed: Annotated[int, Option(0, "random seed", low=0, high=2**32 - 1)]


@takes_options(DraftOptions)
class SpeculativeDrafter(NativeDrafter):
    """Base of drafters with a draft context, one for each kind of file; they take the same arguments.

    :param spec: the draft context, of a file of the drafter's kind. Closing it closes the drafter.
    :options:
    :ivar spec: the draft context.
    :raises InvalidInputError: a number is out of range, or a file of another kind.
    :raises ClosedError: the draft context was closed; also later, by all methods except :meth:`reset`.
    """

    #: As in :attr:`SpeculativeContext.kind`.
    kind: ClassVar[str]

    def __init__(self, spec: SpeculativeContext, **options: Unpack[DraftOptions]) -> None:
        instance("spec", spec, SpeculativeContext)
        if spec.kind != self.kind:
            raise InvalidInputError(
                f"{type(self).__name__} needs a file of kind {self.kind}; {spec.model.path.name} is of kind "
                f"{spec.kind}"
                + (" (no MTP blocks in it, or loaded without load_mtp=True)" if self.kind == "mtp" else "")
            )
        chosen = checked_options(DraftOptions, options, f"{type(self).__name__}()")
        n_max, temperature = chosen["n_max"], chosen["temperature"]
        limit, why = numeric_n_max(n_max), ""
        most = native_of(spec).longest_block if spec.n_heads == 1 else spec.n_heads
        if most is not None and most < limit:
            limit, why = most, f" with {spec.model.path.name}"
        core = _core.speculative_drafter(
            native_of(spec),
            n_max=limit,
            n_min=checked_n_min(chosen["n_min"], limit, why),
            p_min=chosen["p_min"],
            temperature=temperature,
            seed=chosen["seed"],
        )
        super().__init__(core, n_max if n_max == "auto" else limit)
        self.spec = spec
        self.target_layers = spec.target_layers
        self.draws = temperature > 0
        call_at_close(spec, self._release)

    def process(self, batch: Batch, states: States | None = None) -> None:
        """See :meth:`Drafter.process`. The states may have more layers, in any order."""
        instance("batch", batch, Batch)
        core = native_of(self)
        features = self._features(batch, states) if self.target_layers else None
        try:
            core.process(batch, features)
        finally:
            flush_log()

    def _features(self, batch: Batch, states: States | None) -> NDArray[np.float32]:
        """The states as the core takes them: float32 ``(n_tokens, n_features)``."""
        layers = ", ".join(map(repr, self.target_layers))
        if states is None:
            raise InvalidInputError(
                f"the drafter needs states of the target: decode within `with context.tap(layers=[{layers}]) "
                "as tap:`, then call `process(batch, tap.states)`"
            )
        instance("states", states, States)
        if states.array.dtype != np.float32 or not set(self.target_layers) <= set(states.layers):
            raise InvalidInputError(
                f"the drafter needs layers [{layers}] in float32; the states are of layers "
                f"{list(states.layers)} in {states.array.dtype}"
            )
        if len(states) != len(batch) or (batch.n_embd == 0 and (states.tokens != batch.tokens).any()):
            raise InvalidInputError(
                f"the states are of {len(states)} tokens, but the batch has {len(batch)}, or other ones; "
                f"give "
                "each batch the states of its own decode, from a tap with rows='all'"
            )
        array = states.select(self.target_layers).array
        return np.ascontiguousarray(array.reshape(len(array), -1))


class Eagle3Drafter(SpeculativeDrafter):
    """Drafts with an EAGLE-3 block: one decoder layer on the token and features of three of the target's
    layers (https://arxiv.org/abs/2503.01840). Arguments: as in :class:`SpeculativeDrafter`.
    """

    kind = "eagle3"


class MtpDrafter(SpeculativeDrafter):
    """Drafts with the multi-token-prediction blocks of a model, or of a separate file. With several blocks
    the k-th one drafts the k-th token, so a draft has at most as many tokens. Arguments: as in
    :class:`SpeculativeDrafter`.
    """

    kind = "mtp"


class DFlashDrafter(SpeculativeDrafter):
    """Drafts with a DFlash or DSpark file: a block of tokens in one decode, which sees features of the target
    (https://arxiv.org/abs/2602.06036). The block has ``spec.block_size`` positions. Arguments: as in
    :class:`SpeculativeDrafter`.
    """

    kind = "dflash"


class ModelDrafter(SpeculativeDrafter):
    """Drafts with a smaller language model that has the target's vocabulary.

    :param context: a draft context with such a model; or the target's context, with ``draft``.
    :param draft: the model's file, the loaded model, or a draft context beside the target's.
    :param options: as in :class:`SpeculativeDrafter`.
    :raises InvalidInputError: a number is out of range, the vocabulary differs, or the draft context belongs
        to another target.
    :raises UnsupportedError: a recurrent model, which cannot roll tokens back.
    """

    kind = "model"

    def __init__(
        self,
        context: Context | SpeculativeContext,
        draft: str | os.PathLike[str] | LoadedModel | SpeculativeContext | None = None,
        **options: Unpack[DraftOptions],
    ) -> None:
        if draft is None:
            if not isinstance(context, SpeculativeContext):
                raise InvalidInputError(
                    "give ModelDrafter a draft context, or the target's context and a model"
                )
            super().__init__(context, **options)
        else:
            instance("context", context, Context)
            assert isinstance(context, Context)
            super().__init__(_beside(context, draft, as_model=True), **options)


_BY_KIND: Mapping[str, type[SpeculativeDrafter]] = {
    one.kind: one for one in (Eagle3Drafter, MtpDrafter, DFlashDrafter, ModelDrafter)
}


def _beside(
    context: Context,
    draft: str | os.PathLike[str] | LoadedModel | SpeculativeContext,
    *,
    as_model: bool = False,
) -> SpeculativeContext:
    """The draft context for this target, created unless it is given.

    :raises InvalidInputError: it was made for another one.
    """
    if not isinstance(draft, SpeculativeContext):
        return SpeculativeContext(context, draft, as_model=as_model)
    if draft.target is not context:
        raise InvalidInputError("the draft context was made for another context; give its target")
    return draft


def load_drafter(
    context: Context,
    draft: str | os.PathLike[str] | LoadedModel | SpeculativeContext,
    **options: Unpack[DraftOptions],
) -> SpeculativeDrafter:
    """Make the drafter for a file, whatever its kind: an :class:`Eagle3Drafter`, :class:`MtpDrafter`,
    :class:`DFlashDrafter` or :class:`ModelDrafter`.

    :param context: the target's context.
    :param draft: a file, also an ``mtp.safetensors``; a loaded model; or a draft context beside the target's.
    :param options: as in :class:`SpeculativeDrafter`.
    :raises InvalidInputError: the draft does not fit the context's model, was made for another context, or
        has MTP blocks but was loaded without them; or a number is out of range.
    :raises ModelLoadError: the file cannot be loaded.
    """
    if isinstance(context, LoadedModel):
        raise InvalidInputError("expected the target's context, found its model: make one by model.context()")
    instance("context", context, Context)
    spec = _beside(context, draft)
    if spec.kind == "model" and isinstance(draft, LoadedModel):
        n_blocks = draft.metadata.get(f"{draft.arch}.nextn_predict_layers", 0)
        if n_blocks:
            spec.close()
            # As a plain model the whole of it would draft, perhaps the target itself.
            raise InvalidInputError(
                f"{draft.path.name} has MTP blocks ({n_blocks}), but was loaded without them: load it with "
                "load_mtp=True, or let ModelDrafter draft with all of it"
            )
    return _BY_KIND[spec.kind](spec, **options)


def draft_contexts(drafter: Drafter) -> list[SpeculativeContext]:
    """The draft contexts of a drafter, or of all drafters in a chain: what they have as ``spec``."""
    found = (getattr(one, "spec", None) for one in members(drafter))
    return [spec for spec in found if isinstance(spec, SpeculativeContext)]


def named_drafter(
    context: Context, name: str, *, n_gpu_layers: int = 0, **options: Unpack[DraftOptions]
) -> Drafter:
    """Make the drafter that a command line names: "ngram", "suffix", "mtp" (the target's own blocks, which
    must be loaded), or a file.

    :raises InvalidInputError: as in :func:`load_drafter`; or ``p_min`` with n-grams, which have no
        probabilities.
    :raises ModelLoadError: the file cannot be loaded.
    """
    if name == "ngram":
        if options.keys() - {"n_max", "n_min"}:
            raise InvalidInputError("n-grams have no probabilities; p_min needs suffix, mtp or a file")
        return NGramDrafter(n_max=options.get("n_max", 8), n_min=options.get("n_min", 1))
    if name == "suffix":
        return SuffixDrafter(**cast("SuffixOptions", options))
    if name == "mtp":
        return MtpDrafter(SpeculativeContext(context, context.model), **options)
    if not os.path.exists(name):
        raise ModelNotFoundError(f"no drafter {name}: expected ngram, suffix, mtp, or a file")
    draft = load_draft(context.model, name, n_gpu_layers=n_gpu_layers)
    return load_drafter(context, draft, **options)
