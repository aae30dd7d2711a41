"""Lengths that a served model allows."""

from __future__ import annotations

from llamatap.model import Model
from llamatap.serve.options import ModelOptions

__all__ = ["LengthLimits"]


class LengthLimits:
    """Maximum numbers of tokens of prompts and texts.

    :ivar prompt: for a prompt whose states are extracted; 0 for no limit.
    :ivar n_ctx: for all texts together: the size of their context, which the engine makes a multiple of 256.
    :ivar text: for one text with its prompt, limited by the context and the trained length.
    :ivar text_share: for one text if all texts take equally many.
    """

    def __init__(self, model: Model, options: ModelOptions) -> None:
        wanted = options.n_ctx or options.parallel * min(model.n_ctx_train, 4096)
        self.prompt = model.n_ctx_train
        self.n_ctx = -(-wanted // 256) * 256
        self.text = min(self.n_ctx, model.n_ctx_train or self.n_ctx)
        self.text_share = self.n_ctx // options.parallel
