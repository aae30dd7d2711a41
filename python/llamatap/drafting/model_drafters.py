"""Drafters with a draft context: EAGLE-3, MTP, DFlash, and smaller language models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict

from llamatap._native import _core, flush_log, native_of
from llamatap._validate import instance, integer, number
from llamatap.context import Batch, Context
from llamatap.drafting.drafter import Drafter, NativeDrafter, NGramDrafter, check_shortest, longest_draft
from llamatap.drafting.speculative_context import SpeculativeContext
from llamatap.errors import InvalidInputError
from llamatap.loaded_model import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "DFlashDrafter",
    "DraftOptions",
    "Eagle3Drafter",
    "ModelDrafter",
    "MtpDrafter",
    "SpeculativeDrafter",
    "load_drafter",
    "named_drafter",
]


class DraftOptions(TypedDict, total=False):
    """The keyword arguments of :class:`SpeculativeDrafter`."""

    n_max: int | Literal["auto"]
    n_min: int
    p_min: float
    temperature: float
    seed: int


class SpeculativeDrafter(NativeDrafter):
    """Drafts with a draft context; the base of those for each kind of file, which take the same arguments.

    :param spec: the draft context, of a file of the drafter's kind. Once it is closed, so is the drafter.
    :param n_max: the most tokens of a draft, or "auto". What the file can give is less with several MTP
        blocks (as many tokens) and with DFlash (a block).
    :param n_min: shorter drafts are given up, unless they were drawn.
    :param p_min: a draft ends where the drafter finds no token as likely as this; with DSpark, where its
        confidence head is less sure.
    :param temperature: 0 drafts the most likely tokens. Above, tokens are drawn from softmax(logits /
        temperature) and drafts carry their distributions, for ``generate(..., rejection=True)``.
    :param seed: of the draws.
    :ivar spec: the draft context.
    :raises InvalidInputError: a number is out of range, or a file of another kind.
    :raises ClosedError: the draft context was closed; also later, of all but :meth:`reset`.
    """

    #: As of :attr:`SpeculativeContext.kind`.
    kind: ClassVar[str]

    def __init__(
        self,
        spec: SpeculativeContext,
        *,
        n_max: int | Literal["auto"] = 4,
        n_min: int = 0,
        p_min: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        instance("spec", spec, SpeculativeContext)
        if spec.kind != self.kind:
            raise InvalidInputError(
                f"{type(self).__name__} drafts with a file of the kind {self.kind}; "
                f"{spec.model.path.name} is of the kind {spec.kind}"
                + (" (no MTP blocks in it, or loaded without load_mtp=True)" if self.kind == "mtp" else "")
            )
        probability = number("p_min", p_min)
        if not 0 <= probability <= 1:
            raise InvalidInputError(f"p_min must be in 0..1, not {p_min}")
        heat = number("temperature", temperature)
        if not 0 <= heat < float("inf"):
            raise InvalidInputError(f"temperature must be finite and not negative, not {temperature}")
        longest, why = longest_draft(n_max), ""
        most = native_of(spec).longest_block if spec.n_heads == 1 else spec.n_heads
        if most is not None and most < longest:
            longest, why = most, f" with {spec.model.path.name}"
        core = _core.speculative_drafter(
            native_of(spec),
            n_max=longest,
            n_min=check_shortest(n_min, longest, why),
            p_min=probability,
            temperature=heat,
            seed=integer("seed", seed, 0, 2**32 - 1),
        )
        super().__init__(core, n_max if n_max == "auto" else longest)
        self.spec = self._spec = spec
        self.target_layers = spec.target_layers
        self.draws = heat > 0
        spec.drafters.add(self)

    def process(self, batch: Batch) -> None:
        instance("batch", batch, Batch)
        core = native_of(self)
        features = self.spec.features() if self.target_layers else None
        if features is not None and len(features) != len(batch):
            raise InvalidInputError(
                f"the open tap holds the states of {len(features)} tokens, the batch has {len(batch)}; "
                "process each batch right after it was decoded"
            )
        try:
            core.process(batch, features)
        finally:
            flush_log()


class Eagle3Drafter(SpeculativeDrafter):
    """Drafts with an EAGLE-3 block: one decoder layer on the token and features of three of the target's
    layers (https://arxiv.org/abs/2503.01840). Arguments: as of :class:`SpeculativeDrafter`.
    """

    kind = "eagle3"


class MtpDrafter(SpeculativeDrafter):
    """Drafts with the multi-token-prediction blocks of a model, or of a file of their own. Of several, the
    k-th drafts the k-th token, so that a draft has as many tokens at most. Arguments: as of
    :class:`SpeculativeDrafter`.
    """

    kind = "mtp"


class DFlashDrafter(SpeculativeDrafter):
    """Drafts with a DFlash or DSpark file: a block of tokens in one decode, that sees features of the target
    (https://arxiv.org/abs/2602.06036). The block has ``spec.block_size`` places. Arguments: as of
    :class:`SpeculativeDrafter`.
    """

    kind = "dflash"


class ModelDrafter(SpeculativeDrafter):
    """Drafts with a smaller language model that has the target's vocabulary.

    :param context: a draft context made of one; or the target's context, and then
    :param draft: the model's file, the loaded model, or a draft context beside that target.
    :param options: as of :class:`SpeculativeDrafter`.
    :raises InvalidInputError: a number is out of range, another vocabulary, or another context's draft.
    :raises UnsupportedError: a recurrent model, which cannot take tokens back.
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
                raise InvalidInputError("give ModelDrafter a draft context, or the target's and a model")
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
    """A draft context for this target.

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
    """The drafter for a file, whatever its kind: an :class:`Eagle3Drafter`, :class:`MtpDrafter`,
    :class:`DFlashDrafter` or :class:`ModelDrafter`.

    :param context: the target's.
    :param draft: a file, a loaded model, or a draft context beside the target's.
    :param options: as of :class:`SpeculativeDrafter`.
    :raises InvalidInputError: the draft does not fit the context's model, was made for another context, has
        MTP blocks but was loaded without them; or a number is out of range.
    :raises ModelLoadError: the file cannot be loaded.
    """
    instance("context", context, Context)
    spec = _beside(context, draft)
    if spec.kind == "model" and isinstance(draft, LoadedModel):
        n_blocks = draft.metadata.get(f"{draft.arch}.nextn_predict_layers", 0)
        if n_blocks:
            spec.close()
            # Nobody means the whole of it, least of all where it is the target itself.
            raise InvalidInputError(
                f"{draft.path.name} has MTP blocks ({n_blocks}), but was loaded without them: load it with "
                "load_mtp=True, or let ModelDrafter draft with all of it"
            )
    return _BY_KIND[spec.kind](spec, **options)


def named_drafter(
    context: Context, name: str, *, n_gpu_layers: int = 0, **options: Unpack[DraftOptions]
) -> Drafter:
    """The drafter that a command line names: "ngram", "mtp" (the target's own blocks, which must be loaded),
    or the file of one.

    :raises InvalidInputError: as of :func:`load_drafter`; or ``p_min`` of n-grams, which have no
        probabilities.
    :raises ModelLoadError: the file cannot be loaded.
    """
    if name == "ngram":
        if options.keys() - {"n_max", "n_min"}:
            raise InvalidInputError("n-grams have no probabilities; p_min needs a file, or mtp")
        return NGramDrafter(n_max=options.get("n_max", 8), n_min=options.get("n_min", 1))
    if name == "mtp":
        return MtpDrafter(SpeculativeContext(context, context.model), **options)
    return load_drafter(context, LoadedModel(name, n_gpu_layers=n_gpu_layers, load_mtp=True), **options)
