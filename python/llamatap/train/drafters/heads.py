"""Drafting heads in PyTorch: EAGLE-3 and multi-token prediction (MTP).

Both are one block that reads a token and a state, and gives the state of the next step. They compute what the
engine computes with the files that they become (:mod:`llamatap.convert`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.errors import InvalidInputError
from llamatap.train.drafters.draft_block import BlockShape, DraftBlock, RMSNorm, StepCache
from llamatap.train.drafters.target_weights import TargetWeights

with needs("train", "training drafters"):
    import torch
    from torch import Tensor, nn

__all__ = ["DraftHead", "Eagle3Head", "MtpHead"]


def _block_shape(target: TargetWeights, n_input: int, n_ff: int | None) -> BlockShape:
    return BlockShape(
        target.n_embd,
        n_input,
        target.n_head,
        target.n_head_kv,
        target.head_size,
        target.n_ff if n_ff is None else n_ff,
        target.rms_eps,
        target.rope_base,
    )


def _checked(draft_tokens: NDArray[np.int64], n_vocab: int) -> NDArray[np.int64]:
    found = np.array(draft_tokens, np.int64)
    if (
        found.ndim != 1
        or len(found) == 0
        or found[0] < 0
        or found[-1] >= n_vocab
        or (np.diff(found) <= 0).any()
    ):
        raise InvalidInputError(
            f"draft_tokens must be ascending token ids from 0 to {n_vocab - 1}, each once; found {found}"
        )
    return found


class DraftHead(nn.Module):  # type: ignore[misc]  # PyTorch may be absent where types are checked
    """A drafting head.

    :ivar kind: "eagle3" or "mtp".
    :ivar first_token: the token of the first entry of the engine's memory: EAGLE-3 begins with the second
        token and the state of the first, MTP with the first token and a state of zeros.
    :ivar draft_tokens: int64 ``(n_draft_vocab,)``: token ids of the draft vocabulary, ascending, which other
        trainers take for granted; None for the target's.
    :raises InvalidInputError: ``draft_tokens`` are not ascending, or not in the target's vocabulary.
    """

    kind: ClassVar[str]
    first_token: ClassVar[int]

    def __init__(self, target: TargetWeights, draft_tokens: NDArray[np.int64] | None) -> None:
        super().__init__()
        if draft_tokens is not None:
            draft_tokens = _checked(draft_tokens, target.n_vocab)
        tokens = None if draft_tokens is None else torch.from_numpy(draft_tokens)
        self.register_buffer("draft_tokens", tokens, persistent=False)
        # The target's own weights are not trained, and not part of what is saved.
        self.register_buffer("embedding", torch.from_numpy(target.embedding), persistent=False)
        head = target.head if draft_tokens is None else target.head[draft_tokens]
        self.register_buffer("target_head", torch.from_numpy(np.ascontiguousarray(head)), persistent=False)
        self.target_norm = RMSNorm(target.n_embd, target.rms_eps).requires_grad_(False)
        self.target_norm.weight.data = torch.from_numpy(target.norm.copy())

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Features of the target's states that the head reads for a token."""

    @abstractmethod
    def first_state(self, features: Tensor) -> Tensor:
        """The state of step 0, from the target's states ``(..., n_features)`` of any dtype."""

    @abstractmethod
    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """One step for all entries.

        :param tokens: int64 ``(batch, n)``.
        :param state: ``(batch, n, n_embd)``: of step 0, or what the step before gave.
        :returns: the state of the next step, ``(batch, n, n_embd)``.
        """

    @abstractmethod
    def logits(self, state: Tensor) -> Tensor:
        """Logits of the draft vocabulary, from what :meth:`step` gave."""

    def target_logits(self, last_state: Tensor) -> Tensor:
        """The target's logits of the draft vocabulary, from H_n ``(..., n_embd)``."""
        normed = self.target_norm(last_state.to(self.target_head.dtype))
        return normed @ self.target_head.to(normed.dtype).T

    def token_embeddings(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Rows of the target's embedding, in the dtype of ``like``."""
        return self.embedding[tokens].to(like.dtype)


class Eagle3Head(DraftHead):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840): three of the target's layers fused into a state, and one
    block whose attention reads the normed token embedding beside the normed state.

    :param target_layers: the layers of the target that are fused.
    :param draft_tokens: as in :class:`DraftHead`; the head of its own starts as these rows of the target's.
    :param n_ff: width of the feed-forward network; None for the target's.
    """

    kind = "eagle3"
    first_token = 1

    def __init__(
        self,
        target: TargetWeights,
        target_layers: Sequence[int],
        draft_tokens: NDArray[np.int64] | None = None,
        n_ff: int | None = None,
    ) -> None:
        super().__init__(target, draft_tokens)
        n = target.n_embd
        self.target_layers = tuple(target_layers)
        self.fc = nn.Linear(len(self.target_layers) * n, n, bias=False)
        self.input_layernorm = RMSNorm(n, target.rms_eps)
        self.hidden_norm = RMSNorm(n, target.rms_eps)
        self.block = DraftBlock(_block_shape(target, 2 * n, n_ff))
        self.norm = RMSNorm(n, target.rms_eps)
        self.norm.weight.data = torch.from_numpy(target.norm.copy())
        self.lm_head = nn.Linear(n, len(self.target_head), bias=False)
        self.lm_head.weight.data = self.target_head.clone()

    @property
    def n_features(self) -> int:
        return int(self.fc.in_features)

    def first_state(self, features: Tensor) -> Tensor:
        return self.fc(features.to(self.fc.weight.dtype))

    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        embedded = self.input_layernorm(self.token_embeddings(tokens, state))
        x = torch.cat([embedded, self.hidden_norm(state)], -1)
        return self.block(x, state, positions, cache)

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(self.norm(state))


class MtpHead(DraftHead):
    """Multi-token prediction as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437): one block on a projection
    of the normed token embedding and the normed state; embedding and output head are the target's.

    :param n_ff: width of the feed-forward network; None for the target's.
    """

    kind = "mtp"
    first_token = 0

    def __init__(self, target: TargetWeights, n_ff: int | None = None) -> None:
        super().__init__(target, None)
        n = target.n_embd
        self.enorm = RMSNorm(n, target.rms_eps)
        self.hnorm = RMSNorm(n, target.rms_eps)
        self.eh_proj = nn.Linear(2 * n, n, bias=False)
        self.input_layernorm = RMSNorm(n, target.rms_eps)
        self.block = DraftBlock(_block_shape(target, n, n_ff))
        self.norm = RMSNorm(n, target.rms_eps)
        self.norm.weight.data = torch.from_numpy(target.norm.copy())

    @property
    def n_features(self) -> int:
        return int(self.eh_proj.out_features)

    def first_state(self, features: Tensor) -> Tensor:
        return features.to(self.eh_proj.weight.dtype)

    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        embedded = self.enorm(self.token_embeddings(tokens, state))
        x = self.eh_proj(torch.cat([embedded, self.hnorm(state)], -1))
        return self.block(self.input_layernorm(x), x, positions, cache)

    def logits(self, state: Tensor) -> Tensor:
        normed = self.norm(state)
        return normed @ self.target_head.to(normed.dtype).T
