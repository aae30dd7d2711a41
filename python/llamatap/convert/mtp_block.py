"""mtp.safetensors: the weights of one block of multi-token prediction, trained for a model born without.

The file has the block's own weights alone; token embedding and output head are the target's. With e the row
of token[p] in the token embedding, before any scaling of the architecture, and h the target's ``H_n`` of
position p-1, before its last norm (zeros for p = 0):

    x = eh_proj [enorm(e), hnorm(h)],    s = block(x),    logits = head(shared_head.norm(s))

which are about token[p+1]; s is the h of the next drafted token (https://arxiv.org/abs/2412.19437, section
2.2). The block is Llama's: RMSNorm, grouped-query attention over all positions with rotary embedding, a gated
feed-forward with SiLU, no biases. Names are those of DeepSeek-V3's layer in transformers:

=========================================  =======================================
``eh_proj.weight``                         [n, 2n]: the half of the token is first
``enorm.weight``, ``hnorm.weight``         [n]
``input_layernorm.weight``                 [n]
``self_attn.q_proj.weight``                [heads * d, n], rotating pairs (j, j + d/2)
``self_attn.k_proj.weight``, ``v_proj``    [kv heads * d, n]
``self_attn.o_proj.weight``                [n, heads * d]
``post_attention_layernorm.weight``        [n]
``mlp.gate_proj.weight``, ``up_proj``      [ffn, n]
``mlp.down_proj.weight``                   [n, ffn]
``shared_head.norm.weight``                [n]
=========================================  =======================================

The metadata of the file has a key ``config``: :class:`MtpConfig` as a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import path as checked_path
from llamatap._validate import shown
from llamatap.convert.block_shape import check_heads
from llamatap.convert.checkpoint_files import read_safetensors
from llamatap.convert.settings import Settings
from llamatap.convert.tensors import Tensors
from llamatap.errors import InvalidInputError, ModelLoadError, ModelNotFoundError, UnsupportedError
from llamatap.storage.atomic_writes import atomic_path

__all__ = ["MtpBlock", "MtpConfig", "is_mtp_file", "read_mtp", "write_mtp"]

#: The value of ``model_type``, by which such a file is known.
_MODEL_TYPE = "llamatap_mtp"


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Shape of an MTP block, and the model that it is for. Names are those of transformers.

    :ivar hidden_size: width of the stream: the target's.
    :ivar vocab_size: number of the target's tokens.
    :ivar target_architecture: the target's architecture, as its GGUF file names it: "llama".
    :ivar intermediate_size: width of the feed-forward; it need not be the target's.
    :ivar num_attention_heads: heads of q; with ``num_key_value_heads`` and ``head_dim`` they need not be the
        target's.
    :ivar target_num_hidden_layers: number of the target's blocks; None leaves it unchecked.
    :ivar hidden_state: the state that it takes: "pre-norm", the target's H_n before its last norm.
    """

    hidden_size: int
    vocab_size: int
    target_architecture: str
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    target_num_hidden_layers: int | None = None
    hidden_state: str = "pre-norm"

    def __post_init__(self) -> None:
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        n, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "eh_proj": (n, 2 * n),
            "enorm": (n,),
            "hnorm": (n,),
            "input_layernorm": (n,),
            "self_attn.q_proj": (q, n),
            "self_attn.k_proj": (kv, n),
            "self_attn.v_proj": (kv, n),
            "self_attn.o_proj": (n, q),
            "post_attention_layernorm": (n,),
            "mlp.gate_proj": (ffn, n),
            "mlp.up_proj": (ffn, n),
            "mlp.down_proj": (n, ffn),
            "shared_head.norm": (n,),
        }
        return {f"{name}.weight": shape for name, shape in found.items()}


@dataclass(frozen=True)
class MtpBlock:
    """An MTP block.

    :ivar tensors: float32, by name.
    :ivar dtype: of the matrices in the file.
    """

    config: MtpConfig
    tensors: dict[str, NDArray[np.float32]]
    dtype: np.dtype[Any]


def is_mtp_file(path: Path) -> bool:
    """Whether a path is that of a safetensors file, by its name."""
    return path.suffix == ".safetensors" and not path.is_dir()


def _config_of(path: Path, metadata: Mapping[str, str]) -> MtpConfig:
    expected = f"expected an MTP block, with its shape as JSON in the metadata's key config ({_MODEL_TYPE})"
    if "config" not in metadata:
        names = ", ".join(sorted(metadata)) or "no metadata"
        raise InvalidInputError(f"{path} says nothing about its shape: {expected}; found {names}")
    try:
        values = json.loads(metadata["config"])
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: the metadata's key config is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("model_type") != _MODEL_TYPE:
        found = values.get("model_type") if isinstance(values, dict) else values
        raise InvalidInputError(f"{path}: {expected}; found {shown(found)}")
    settings = Settings(values)
    layers = settings.integer("target_num_hidden_layers", 0x7FFFFFFF)
    config = MtpConfig(
        hidden_size=settings.integer("hidden_size"),
        vocab_size=settings.integer("vocab_size"),
        target_architecture=settings.text("target_architecture"),
        intermediate_size=settings.integer("intermediate_size"),
        num_attention_heads=settings.integer("num_attention_heads"),
        num_key_value_heads=settings.integer("num_key_value_heads"),
        head_dim=settings.integer("head_dim"),
        rope_theta=settings.number("rope_theta"),
        rms_norm_eps=settings.number("rms_norm_eps"),
        max_position_embeddings=settings.integer("max_position_embeddings", 2048),
        target_num_hidden_layers=layers if "target_num_hidden_layers" in settings else None,
        hidden_state=settings.text("hidden_state"),
    )
    settings.only("hidden_state", "pre-norm", why="the engine's block takes H_n before the norm")
    settings.only("hidden_act", "silu")
    if refused := settings.rest():
        raise UnsupportedError(f"the engine's MTP block does not compute with {', '.join(refused)}")
    return config


def read_mtp(path: Path) -> MtpBlock:
    """Read an mtp.safetensors.

    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: it cannot be read.
    :raises InvalidInputError: it is no MTP block, lacks a tensor, or has one of another shape.
    :raises UnsupportedError: it has tensors or settings that the engine's block does not compute with.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"no such file: {path}")
    tensors, metadata = read_safetensors(path)
    config = _config_of(path, metadata)
    shapes = config.shapes()
    if others := sorted(tensors.keys() - shapes.keys()):
        raise UnsupportedError(f"the engine's MTP block does not compute with {', '.join(others)}")
    taken = Tensors(tensors)
    found = {name: taken.take(name, *shape) for name, shape in shapes.items()}
    taken.check()
    weights = {name: values for name, values in found.items() if values is not None}
    return MtpBlock(config, weights, tensors["eh_proj.weight"].dtype)


def write_mtp(path: str | os.PathLike[str], tensors: Mapping[str, NDArray[Any]], config: MtpConfig) -> Path:
    """Write an mtp.safetensors, atomically.

    :param tensors: the block's weights, as the table of :mod:`llamatap.convert.mtp_block` has them: float32,
        float16 or bfloat16 (of ml_dtypes).
    :raises InvalidInputError: a tensor is missing, unknown, not finite, or of another shape or dtype.
    :raises OSError: it cannot be written.
    """
    from safetensors.numpy import save_file

    target = checked_path("path", path)
    shapes = config.shapes()
    if others := sorted(tensors.keys() - shapes.keys()):
        raise InvalidInputError(f"an MTP block has no {', '.join(others)}")
    taken = Tensors(tensors)
    for name, shape in shapes.items():
        taken.take(name, *shape)
    taken.check()
    said = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    metadata = {"format": "pt", "config": json.dumps({"model_type": _MODEL_TYPE, **said})}
    with atomic_path(target) as scratch:
        save_file({name: np.ascontiguousarray(tensors[name]) for name in shapes}, scratch, metadata=metadata)
    return target
