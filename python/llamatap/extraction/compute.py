"""Computing an extraction request in a context: prompts are packed into batches, and states are captured
directly into the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamatap._engine_context import engine_of
from llamatap._native import flush_log, native_of
from llamatap.context import Context
from llamatap.errors import CancelledError
from llamatap.extraction.packing import pack_prompts
from llamatap.extraction.request import ExtractionRequest, PromptJob
from llamatap.loaded_model import LoadedModel
from llamatap.states import States

__all__ = ["compute", "needs_all_outputs"]


def compute(request: ExtractionRequest, context: Context, indices: Sequence[int]) -> dict[int, States]:
    """Compute the states of some prompts of a request in one context. Returns them by index.

    :raises CancelledError: the request's ``cancelled`` returned True.
    """
    n_seq_max = context.n_seq_max if context.kv_unified else 1
    room = min(context.n_ubatch, context.n_ctx)
    lengths = [len(request.jobs[i].prompt) for i in indices]
    try:
        for pack in pack_prompts(lengths, room, n_seq_max):
            together = [request.jobs[indices[k]] for k in pack]
            if not _capture(request, context, together) and len(together) > 1:
                # NaN or infinity in one prompt may have reached the others in the batch.
                for job in together:
                    _capture(request, context, [job])
    finally:
        flush_log()
    return {i: _states(request, context, request.jobs[i]) for i in indices}


def _capture(request: ExtractionRequest, context: Context, jobs: Sequence[PromptJob]) -> bool:
    """Compute prompts in one batch. Returns whether all captured values are finite."""
    if needs_all_outputs(context.model, request.slots):
        n_rows = min(sum(len(job.prompt) for job in jobs), context.n_ubatch)
        engine_of(context).require_outputs(n_rows, computed=False)
    if request.cancelled is not None and request.cancelled():
        raise CancelledError("cancelled before the engine was called")
    return native_of(context).extract(
        context.model.layer_map,
        request.slots,
        request.dtype,
        [
            (
                job.prompt.tokens,
                job.begin,
                job.end,
                request.pool or "none",
                job.out.reshape(-1).view(np.uint8),
            )
            for job in jobs
        ],
        request.cancelled,
    )


def _states(request: ExtractionRequest, context: Context, job: PromptJob) -> States:
    array = job.out.view()
    array.flags.writeable = False
    details = {
        "window": [job.begin, job.end],
        "pooling": request.pool,
        "max_length": request.max_length,
        "prompt_tokens": job.prompt.n_uncut,
        "truncated": job.prompt.n_uncut > len(job.prompt),
    }
    return engine_of(context).states(array, job.prompt.tokens[job.begin : job.end], request.layers, details)


def needs_all_outputs(model: LoadedModel, slots: Sequence[int]) -> bool:
    """Whether the engine must treat all rows as outputs for these layers."""
    nodes = model.layer_map.nodes
    # A model without memory computes a whole prompt at once, all of it as outputs.
    return any(nodes[slot][1] for slot in slots) or not model.layer_map.has_memory
