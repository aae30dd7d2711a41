"""Contexts of a served model: tried at startup, created for texts."""

from __future__ import annotations

from llamatap._native import native_of
from llamatap.context import Context
from llamatap.context_options import ContextOptions
from llamatap.drafting.drafter import Drafter
from llamatap.drafting.model_drafters import DraftOptions, named_drafter
from llamatap.generation.session import Session
from llamatap.model import Model
from llamatap.serve.options import ModelOptions
from llamatap.train.cotrain.cotrainer import CoTrainer

__all__ = ["new_session", "try_contexts"]


def try_contexts(
    model: Model, options: ModelOptions, n_ctx: int, cotrainer: CoTrainer | None = None
) -> Session | None:
    """Create the contexts once, so that unusable options, an unusable drafter or too little memory fail at
    startup.

    :param n_ctx: tokens of all texts together.
    :returns: with a drafter, the session; without one its context is freed again, because many servers only
        extract states.
    :raises Error: one of them cannot be created.
    """
    # A drafter file cannot have its own context, so this refuses one.
    small: ContextOptions = {**options.context, "n_ctx": 256, "n_batch": 1, "n_ubatch": 1}
    with Context(model, **small) as context:
        generates = native_of(context).has_memory and native_of(context).causal
    if options.drafter is not None:
        return new_session(model, options, n_ctx, cotrainer)
    if generates:
        _text_context(model, options, n_ctx).close()
    return None


def new_session(
    model: Model, options: ModelOptions, n_ctx: int, cotrainer: CoTrainer | None = None
) -> Session:
    """Create a session for the texts of a model, with its drafter.

    :param n_ctx: tokens of all texts together.
    :param cotrainer: gives the drafter, if it is to be retrained.
    """
    context = _text_context(model, options, n_ctx)
    drafter: Drafter | None = None
    if options.drafter is not None:
        draft_options: DraftOptions = {} if options.n_max is None else {"n_max": options.n_max}
        if cotrainer is not None:
            drafter = cotrainer.drafter(context, **draft_options)
        else:
            n_gpu_layers = options.n_gpu_layers
            drafter = named_drafter(context, options.drafter, n_gpu_layers=n_gpu_layers, **draft_options)
    return Session(context, drafter)


def _text_context(model: Model, options: ModelOptions, n_ctx: int) -> Context:
    parallel = options.parallel if native_of(model).batches_sequences else 1
    sizes: ContextOptions = {**options.context, "n_ctx": n_ctx, "n_seq_max": parallel}
    return Context(model, **sizes)
