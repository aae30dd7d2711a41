"""The loss of several drafting steps, and the acceptance that the steps would have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamatap._extras import needs
from llamatap.train.drafters.draft_block import StepCache
from llamatap.train.drafters.heads import DraftHead

with needs("train", "training drafters"):
    import torch
    import torch.nn.functional as functional
    from torch import Tensor

__all__ = ["PaddedBatch", "StepCounts", "multi_step_loss"]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    """Samples side by side, padded on the right.

    :ivar tokens: int64 ``(batch, n)``.
    :ivar features: the target's states that the head reads, ``(batch, n, n_features)``.
    :ivar last: H_n, ``(batch, n, n_embd)``.
    :ivar loss_mask: bool ``(batch, n)``, unshifted: True where the token is to be predicted, False in
        padding.
    """

    tokens: Tensor
    features: Tensor
    last: Tensor
    loss_mask: Tensor


@dataclass(slots=True, eq=False)
class StepCounts:
    """Counts by step; those of several batches add up.

    :ivar loss: float64 ``(n_steps,)``: sum of the loss over the predicted tokens.
    :ivar predicted: float64 ``(n_steps,)``: the number of these tokens.
    :ivar agreed: float64 ``(n_steps,)``: where the head's most likely token is the target's.
    :ivar accepted: float64 ``(n_steps,)``: where it is, and in all earlier steps of the draft.
    :ivar drafted: float64 ``(n_steps,)``: where all earlier steps of the draft predict such a token, too:
        only there can a token be accepted.
    """

    loss: Tensor
    predicted: Tensor
    agreed: Tensor
    accepted: Tensor
    drafted: Tensor

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.loss + other.loss,
            self.predicted + other.predicted,
            self.agreed + other.agreed,
            self.accepted + other.accepted,
            self.drafted + other.drafted,
        )

    @property
    def tokens_per_round(self) -> float:
        """1 and the share of accepted tokens of each step: what greedy drafting gives on these texts, if the
        target continues as they do, and if a draft is as likely to begin at one token as at another."""
        return 1 + float((self.accepted / self.drafted.clamp(min=1)).sum())

    def figures(self) -> dict[str, Any]:
        """Loss (nats) and acceptance by step, tokens per round and predicted tokens, as JSON values."""
        predicted = self.predicted.clamp(min=1)
        return {
            "loss": [round(x, 4) for x in (self.loss / predicted).tolist()],
            "by_position": [round(x, 4) for x in (self.accepted / self.drafted.clamp(min=1)).tolist()],
            "tokens_per_round": round(self.tokens_per_round, 4),
            "tokens": int(self.predicted[0]),
        }


def multi_step_loss(
    head: DraftHead,
    batch: PaddedBatch,
    n_steps: int,
    decay: float = 0.8,
    target_argmax: Tensor | None = None,
) -> tuple[Tensor, StepCounts]:
    """Cross-entropy between the target's distribution and the head's, over ``n_steps`` drafting steps.

    An entry reads the token t and the target's state of t-1, and predicts the token t+1. In step k it reads
    the state that the head itself gave k times since the target's state of t-1-k. The distributions are those
    of the draft vocabulary.

    :param decay: weight of a step relative to the step before it.
    :param target_argmax: int64 ``(batch, n)``: the target's most likely token after each token, of its whole
        vocabulary; None for that of the draft vocabulary. Only the counts depend on it.
    :returns: the loss, a float32 scalar, and the counts.
    """
    first = head.first_token
    tokens = batch.tokens[:, first:]
    features = batch.features[:, : batch.features.shape[1] - 1]
    state = head.first_state(features)
    if first == 0:
        state = functional.pad(state, (0, 0, 1, 0))
    # Of the token after an entry's own.
    counts = functional.pad(batch.loss_mask[:, first + 1 :], (0, 1))
    last = batch.last[:, first:]
    n = tokens.shape[1]
    positions = torch.arange(n, device=tokens.device)
    with torch.no_grad():
        rows = counts.nonzero(as_tuple=True)
        wanted = head.target_logits(last[rows]).float()
        best = wanted.argmax(-1) if target_argmax is None else target_argmax[:, first:][rows]
        wanted = wanted.softmax(-1)
    cache = StepCache()
    loss = torch.zeros((), device=tokens.device)
    accepted = drafted = torch.ones_like(counts)
    sums = []
    for step in range(n_steps):
        state = head.step(tokens, state, positions, cache)
        logits = head.logits(state[rows]).float()
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
        valid = rows[1] >= step
        n_valid = valid.sum()
        loss = loss + decay**step * (entropy * valid).sum() / n_valid.clamp(min=1)
        with torch.no_grad():
            found = logits.argmax(-1)
            if target_argmax is not None and head.draft_tokens is not None:
                found = head.draft_tokens[found]
            agreed = torch.zeros_like(counts)
            agreed[rows] = (found == best) & valid
            if step:
                accepted, drafted = _next(accepted), _next(drafted)
            accepted, drafted = agreed & accepted, counts & drafted
            found_here = ((entropy * valid).sum(), n_valid, agreed.sum(), accepted.sum(), drafted.sum())
            sums.append(torch.stack(found_here).double())
        state = _next(state)
    return loss, StepCounts(*torch.stack(sums, 1))


def _next(x: Tensor) -> Tensor:
    """Values of entries, each moved to the entry after it; the first ones are zeros."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
