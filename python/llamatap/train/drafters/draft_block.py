"""The transformer block of a drafter in PyTorch, with the attention of several drafting steps."""

from __future__ import annotations

from dataclasses import dataclass

from llamatap._extras import needs

with needs("train", "training drafters"):
    import torch
    import torch.nn.functional as functional
    from torch import Tensor, nn

__all__ = ["BlockShape", "DraftBlock", "RMSNorm", "StepCache"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The sizes of a block.

    :ivar n_embd: features of a state.
    :ivar n_input: features that the attention reads: ``n_embd``, or twice as many in EAGLE-3.
    """

    n_embd: int
    n_input: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    rms_eps: float
    rope_base: float


class RMSNorm(nn.Module):  # type: ignore[misc]  # PyTorch may be absent where types are checked
    """Root mean square norm (https://arxiv.org/abs/1910.07467), computed in float32."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class StepCache:
    """Keys and values of the steps so far, each ``(batch, n_head_kv, n, head_size)``."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class DraftBlock(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward network of the llama architecture.

    In step k, entry p stands for the k-th drafted token after the entry p-k, whose state was the target's
    own. It attends to what an engine's memory then holds: the entries up to p-k of step 0, and the entries
    p-k+1, ..., p of the steps 1, ..., k. This is the training-time test of EAGLE-3
    (https://arxiv.org/abs/2503.01840).
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
        self.q_proj = nn.Linear(shape.n_input, q, bias=False)
        self.k_proj = nn.Linear(shape.n_input, kv, bias=False)
        self.v_proj = nn.Linear(shape.n_input, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.n_embd, bias=False)
        self.post_attention_layernorm = RMSNorm(shape.n_embd, shape.rms_eps)
        self.gate_proj = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.up_proj = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.down_proj = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """One step for all entries.

        :param x: normed input of the attention, ``(batch, n, n_input)``.
        :param residual: the residual stream, ``(batch, n, n_embd)``.
        :param positions: int64 ``(n,)``.
        :param cache: the steps before; gets this one.
        :returns: the residual stream after the block, ``(batch, n, n_embd)``.
        """
        h = residual + self.o_proj(self._attention(x, positions, cache))
        y = self.post_attention_layernorm(h)
        return h + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))

    def _attention(self, x: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        shape = self.shape
        q = self._rotated(self._heads(self.q_proj(x)), positions)
        k = self._rotated(self._heads(self.k_proj(x)), positions)
        v = self._heads(self.v_proj(x))
        step = len(cache.keys)
        cache.keys.append(k)
        cache.values.append(v)
        n, size = q.shape[2:]
        # (batch, n_head_kv, queries of a key's head, n, size)
        q = q.unflatten(1, (shape.n_head_kv, -1)) * size**-0.5
        scores = q @ cache.keys[0].transpose(-1, -2)[:, :, None]
        rows = torch.arange(n, device=x.device)
        scores = scores.masked_fill(rows[None, :] > rows[:, None] - step, -torch.inf)
        later = []
        for j in range(1, step + 1):
            # The entry p-k+j of step j, for each p.
            key = _shifted(cache.keys[j], step - j)
            later.append((q * key[:, :, None]).sum(-1, keepdim=True))
        weights = torch.cat([scores, *later], -1).float().softmax(-1).to(v.dtype)
        found = weights[..., :n] @ cache.values[0][:, :, None]
        for j in range(1, step + 1):
            found = found + weights[..., n + j - 1, None] * _shifted(cache.values[j], step - j)[:, :, None]
        return found.flatten(1, 2).transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding with halves (https://arxiv.org/abs/2104.09864)."""
        half = self.shape.head_size // 2
        rates = self.shape.rope_base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = positions.float()[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Rows moved ``by`` places towards the end of dimension -2; the first ones are zeros."""
    return functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x
