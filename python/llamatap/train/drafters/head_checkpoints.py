"""Checkpoints of trained heads, which :mod:`llamatap.convert` and other trainers read."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._extras import needs
from llamatap.convert import to_checkpoint, to_gguf
from llamatap.convert.checkpoint_files import read_checkpoint, write_checkpoint
from llamatap.convert.eagle3_config import Eagle3Shape, speculators_config
from llamatap.convert.gguf_files import GgufSource
from llamatap.convert.mtp_block import MtpConfig, is_mtp_file, read_mtp, write_mtp
from llamatap.convert.rope import Rope
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.states import DTYPES
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead
from llamatap.train.drafters.target_weights import TargetWeights

with needs("train", "training drafters"):
    import torch

__all__ = ["read_draft", "read_head", "write_head"]

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
    state = head.state_dict()
    tensors = {other: _array(state[name], dtype) for name, other in _names(head).items()}
    if isinstance(head, MtpHead):
        return write_mtp(path, tensors, _mtp_config(head, target))
    assert isinstance(head, Eagle3Head)
    if head.draft_tokens is not None:
        tokens = head.draft_tokens.cpu().numpy()
        tensors["d2t"] = tokens - np.arange(len(tokens))
        tensors["t2d"] = np.isin(np.arange(target.n_vocab), tokens)
    write_checkpoint(path, _eagle3_config(head, target), tensors)
    return path


def read_head(path: Path, target: TargetWeights) -> DraftHead:
    """Read a head, to train it further: what :func:`write_head` wrote, or ``llamatap convert`` from a draft.

    :param path: an EAGLE-3 checkpoint in the format of speculators, whose token embedding is taken to be the
        target's; or an ``mtp.safetensors``.
    :returns: the head, in float32.
    :raises UnsupportedError: it computes something else than the heads that are trained here.
    :raises InvalidInputError: it is for another target, or lacks a tensor.
    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: it cannot be read.
    """
    head: DraftHead
    if is_mtp_file(path):
        block = read_mtp(path)
        tensors: Mapping[str, NDArray[Any]] = block.tensors
        head = MtpHead(target, block.config.intermediate_size)
        expected = _mtp_config(head, target)
        _compare(path, dataclasses.asdict(block.config), dataclasses.asdict(expected))
    else:
        found = read_checkpoint(path)
        tensors, config = found.tensors, found.config
        layers = config.get("eagle_aux_hidden_state_layer_ids")
        gate = tensors.get("layers.0.mlp.gate_proj.weight")
        if config.get("speculators_model_type") != "eagle3" or not layers or gate is None:
            raise InvalidInputError(
                f"{path} is no EAGLE-3 checkpoint in the format of speculators that names its layers; "
                "make one with `llamatap convert --to speculators`"
            )
        d2t = tensors.get("d2t")
        tokens = None if d2t is None else np.asarray(d2t, np.int64) + np.arange(len(d2t))
        head = Eagle3Head(target, [int(one) for one in layers], tokens, int(gate.shape[0]))
        _compare(path, config, _eagle3_config(head, target))
    state = head.state_dict()
    for name, other in _names(head).items():
        values = tensors.get(other)
        if values is None or values.shape != tuple(state[name].shape):
            what = "is missing" if values is None else f"has the shape {list(values.shape)}"
            raise InvalidInputError(f"{path}: {other} {what}; expected {list(state[name].shape)}")
        state[name] = torch.from_numpy(np.array(values, np.float32))
    head.load_state_dict(state)
    return head


def read_draft(draft: Path, target: Path, weights: TargetWeights, scratch: Path) -> DraftHead:
    """Read the head of a draft file, or of a checkpoint in any format that becomes one, to train it further.

    :param draft: what ``llamatap train`` wrote, or a folder that ``llamatap convert`` reads.
    :param target: the GGUF file that it drafts for.
    :param weights: the target's.
    :param scratch: a folder that files may be written to.
    :returns: the head, in float32.
    :raises UnsupportedError: it computes something else than the heads that are trained here.
    :raises InvalidInputError: it is for another target, or lacks a tensor.
    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: it cannot be read.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".draft-") as folder:
        return read_head(_as_checkpoint(draft, target, Path(folder)), weights)


def _as_checkpoint(draft: Path, target: Path, scratch: Path) -> Path:
    """The draft as :func:`read_head` takes it."""
    if is_mtp_file(draft):
        return draft
    if draft.is_dir():
        # By way of GGUF, which refuses what the engine does not compute.
        draft = to_gguf(draft, target, scratch / "draft.gguf", type="f32").path
    source = GgufSource(draft)
    if source.arch == "mimo2":
        return to_checkpoint(draft, target, scratch / "mtp.safetensors", format="mtp").path
    if source.arch == "eagle3" and "token_embd.weight" in source.names:
        raise UnsupportedError(
            f"{draft.name} has a token embedding of its own; heads are trained with the target's alone"
        )
    return to_checkpoint(draft, target, scratch / "checkpoint").path


#: Settings of a checkpoint that the heads here share with their target, or do not have.
_SHARED = (
    *("norm_before_residual", "norm_before_fc", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "rope_scaling"),
)


def _compare(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare the settings of a checkpoint with those of the head that would be trained.

    :raises UnsupportedError: one differs.
    """
    inner = "transformer_layer_config"
    ours = {**expected, **expected.get(inner, {})}
    theirs = {**found, **found.get(inner, {})}
    for name in _SHARED:
        a, b = theirs.get(name), ours.get(name)
        if isinstance(b, float) and isinstance(a, (int, float)):
            same = math.isclose(a, b, rel_tol=1e-4)
        else:
            same = (a or None) == (b or None)
        if not same:
            raise UnsupportedError(
                f"{path} has {name} {a!r}; heads are trained with the target's, {b!r}, alone"
            )


def _names(head: DraftHead) -> dict[str, str]:
    """Names of a head's tensors in checkpoints, by their names in its state."""
    block = {"hidden_norm", *_BLOCK.values()}
    found = {}
    for name in head.state_dict():
        if name.startswith("target_norm"):
            continue
        other = _BLOCK.get(name.removesuffix(".weight"), name.removesuffix(".weight"))
        if isinstance(head, MtpHead):
            other = "shared_head.norm" if other == "norm" else other
        elif other in block:
            other = f"layers.0.{other}"
        found[name] = f"{other}.weight"
    return found


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
