"""Checkpoints of trained heads, which :mod:`llamatap.convert` and other trainers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.convert.checkpoint_files import write_checkpoint
from llamatap.convert.eagle3_config import Eagle3Shape, speculators_config
from llamatap.convert.mtp_block import MtpConfig, write_mtp
from llamatap.convert.rope import Rope
from llamatap.states import DTYPES
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead
from llamatap.train.drafters.target_weights import TargetWeights

with needs("train", "training drafters"):
    import torch

__all__ = ["write_head"]

#: Names of tensors in checkpoints, by their names in a head.
_BLOCK = {
    **{f"block.{one}_proj": f"self_attn.{one}_proj" for one in "qkvo"},
    **{f"block.{one}_proj": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    "block.post_attention_layernorm": "post_attention_layernorm",
    "input_layernorm": "input_layernorm",
}


def write_head(path: Path, head: DraftHead, target: TargetWeights, *, dtype: str = "bfloat16") -> Path:
    """Write a head: EAGLE-3 as a folder in the format of speculators, MTP as an ``mtp.safetensors``.

    :param path: the folder, or the file.
    :param dtype: of the matrices, "float32", "float16" or "bfloat16"; norms are float32.
    :returns: ``path``.
    :raises OSError: it cannot be written.
    """
    found = {name: _array(tensor, dtype) for name, tensor in head.state_dict().items()}
    weights = {
        _BLOCK.get(name.removesuffix(".weight"), name.removesuffix(".weight")): values
        for name, values in found.items()
        if not name.startswith("target_norm")
    }
    if isinstance(head, MtpHead):
        tensors = {
            f"{'shared_head.norm' if name == 'norm' else name}.weight": one for name, one in weights.items()
        }
        return write_mtp(path, tensors, _mtp_config(head, target))
    assert isinstance(head, Eagle3Head)
    block = {"hidden_norm", *_BLOCK.values()}
    tensors = {f"{'layers.0.' if name in block else ''}{name}.weight": one for name, one in weights.items()}
    if head.draft_tokens is not None:
        tokens = head.draft_tokens.cpu().numpy()
        tensors["d2t"] = tokens - np.arange(len(tokens))
        tensors["t2d"] = np.isin(np.arange(target.n_vocab), tokens)
    write_checkpoint(path, _eagle3_config(head, target), tensors)
    return path


def _array(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    values: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return values if values.ndim == 1 else values.astype(DTYPES[dtype])


def _mtp_config(head: MtpHead, target: TargetWeights) -> MtpConfig:
    shape = head.block.shape
    return MtpConfig(
        hidden_size=shape.n_embd,
        vocab_size=target.n_vocab,
        target_architecture=target.arch,
        intermediate_size=shape.n_ff,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.n_head_kv,
        head_dim=shape.head_size,
        rope_theta=shape.rope_base,
        rms_norm_eps=shape.rms_eps,
        max_position_embeddings=target.n_ctx,
        target_num_hidden_layers=target.n_layer,
    )


def _eagle3_config(head: Eagle3Head, target: TargetWeights) -> dict[str, Any]:
    block = head.block.shape
    shape = Eagle3Shape(
        n_embd=block.n_embd,
        n_embd_target=target.n_embd,
        n_ff=block.n_ff,
        n_head=block.n_head,
        n_head_kv=block.n_head_kv,
        head_width=block.head_size,
        n_vocab=target.n_vocab,
        n_draft_vocab=len(head.target_head),
        n_ctx=target.n_ctx,
        eps=block.rms_eps,
        rope=Rope(base=block.rope_base),
        norm_before_residual=False,
        norm_before_fc=False,
        target_layers=head.target_layers,
    )
    return speculators_config(shape, None)
