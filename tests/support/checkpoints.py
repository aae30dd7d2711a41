"""Checkpoints of drafters, as trainers write them, with seeded random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the dtype bfloat16
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from support.tiny import TinyLlama

from reference import dflash, mtp_checkpoint
from reference.eagle3_checkpoint import Block

#: A llama3 scaling under which frequencies of a head of 16 are of all three kinds.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = rng.standard_normal((rows, columns), np.float32) / np.float32(
        np.sqrt(columns)
    )
    return values


def _gain(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    return rng.uniform(0.5, 1.5, width).astype(np.float32)


@dataclass
class Eagle3Checkpoint:
    """An EAGLE-3 checkpoint of one of the formats "speculators", "eagle3" (SpecForge) and "angelslim".

    :ivar layers: the i of the H_i that it is for; None: the config names none.
    :ivar n_draft_vocab: rows of the head; None for all of n_vocab.
    :ivar dtype: of the weights.
    :ivar scaling: of rope; None for none.
    :ivar old_rope: write rope as transformers 4 does.
    """

    format: str = "speculators"
    layers: tuple[int, int, int] | None = (1, 2, 3)
    n_embd: int = 64
    n_embd_target: int = 64
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    head_width: int = 16
    n_vocab: int = 259
    n_draft_vocab: int | None = 100
    dtype: str = "float32"
    scaling: Mapping[str, Any] | None = None
    old_rope: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    embedding: bool = True
    rope_base: float = 1e5
    eps: float = 1e-5
    seed: int = 0
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n, q, kv = self.n_embd, self.n_head * self.head_width, self.n_head_kv * self.head_width
        rows = self.n_vocab if self.n_draft_vocab is None else self.n_draft_vocab
        inner = {
            "input_layernorm": _gain(rng, n),
            "hidden_norm": _gain(rng, n),
            "post_attention_layernorm": _gain(rng, n),
            "self_attn.q_proj": _matrix(rng, q, 2 * n),
            "self_attn.k_proj": _matrix(rng, kv, 2 * n),
            "self_attn.v_proj": _matrix(rng, kv, 2 * n),
            "self_attn.o_proj": _matrix(rng, n, q) * 2,
            "mlp.gate_proj": _matrix(rng, self.n_ff, n),
            "mlp.up_proj": _matrix(rng, self.n_ff, n),
            "mlp.down_proj": _matrix(rng, n, self.n_ff),
        }
        for part in "qkv":  # else the state carried on gives the same token again and again
            inner[f"self_attn.{part}_proj"][:, :n] *= 3
        weights = {f"{self.prefix}{name}": values for name, values in inner.items()}
        weights["fc"] = _matrix(rng, n, 3 * self.n_embd_target)
        weights["norm"] = _gain(rng, n)
        weights["lm_head"] = _matrix(rng, rows, n) * 4
        features, tokens = _gain(rng, 3 * self.n_embd_target), _matrix(rng, self.n_vocab, n) * 8
        if self.norm_before_fc:
            weights["input_norm"] = features
        if self.embedding:
            weights["embed_tokens"] = tokens
        self.tensors = {f"{name}.weight": values.astype(self.dtype) for name, values in weights.items()}
        if self.n_draft_vocab is not None:
            ids = np.sort(rng.choice(self.n_vocab, rows, replace=False)).astype(np.int64)
            self.tensors["d2t"] = ids - np.arange(rows)
            self.tensors["t2d"] = np.isin(np.arange(self.n_vocab), ids)
        self.config = self._config()

    @property
    def prefix(self) -> str:
        return "midlayer." if self.format == "eagle3" else "layers.0."

    def _rope(self) -> dict[str, Any]:
        if self.old_rope:
            scaling = self.scaling and {**self.scaling, "type": self.scaling["rope_type"]}
            return {"rope_theta": self.rope_base, "rope_scaling": scaling}
        return {
            "rope_parameters": {"rope_type": "default", **(self.scaling or {}), "rope_theta": self.rope_base}
        }

    def _config(self) -> dict[str, Any]:
        block = {
            "model_type": "llama",
            "vocab_size": self.n_vocab,
            "hidden_size": self.n_embd,
            "intermediate_size": self.n_ff,
            "num_hidden_layers": 1,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_head_kv,
            "head_dim": self.head_width,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "attention_bias": False,
            "initializer_range": 0.02,
            **self._rope(),
        }
        shared: dict[str, Any] = {"draft_vocab_size": self.n_draft_vocab or self.n_vocab}
        ids = None if self.layers is None else list(self.layers)
        after = None if self.layers is None else [one - 1 for one in self.layers]
        if self.format == "speculators":
            return {
                **shared,
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.9.0",
                "speculators_config": {"algorithm": "eagle3"},
                "transformer_layer_config": block,
                "norm_before_residual": self.norm_before_residual,
                "norm_before_fc": self.norm_before_fc,
                "target_hidden_size": None,
                "eagle_aux_hidden_state_layer_ids": ids,
            }
        shared["target_hidden_size"] = self.n_embd_target
        if self.format == "eagle3":
            inner = {"eagle_aux_hidden_state_layer_ids": after}
            layers: dict[str, Any] = {} if after is None else {"eagle_config": inner}
            return {**block, **shared, "architectures": ["LlamaForCausalLMEagle3"], **layers}
        layers = {} if after is None else {"aux_hidden_states_layer_ids": after}
        return {**block, **shared, "architectures": ["Eagle3LlamaForCausalLM"], **layers}

    def write(self, folder: Path) -> Path:
        """Write the checkpoint's folder."""
        return write_checkpoint(folder, self.config, self.tensors)

    def block(self, embedding: NDArray[Any] | None = None) -> Block:
        """The oracle's view of it.

        :param embedding: the target's, where it has none.
        """
        tensors = dict(self.tensors)
        if embedding is not None:
            tensors.setdefault("embed_tokens.weight", embedding)
        return Block(
            tensors,
            self.prefix,
            self.n_head,
            self.n_head_kv,
            self.rope_base,
            self.eps,
            self.n_vocab,
            self.norm_before_residual,
            self.norm_before_fc,
            self.scaling,
        )


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shards(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    """The same in two files of weights with an index."""
    write_checkpoint(folder, config, tensors)
    (folder / "model.safetensors").unlink()
    names: Sequence[str] = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{index:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a checkpoint's folder."""
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it has no iterator


@dataclass
class MtpCheckpoint:
    """An mtp.safetensors for a TinyLlama."""

    tiny: TinyLlama
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    head_width: int = 16
    rope_base: float = 10000.0
    eps: float = 1e-5
    dtype: str = "float32"
    seed: int = 0
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n, q, kv = self.tiny.n_embd, self.n_head * self.head_width, self.n_head_kv * self.head_width
        weights = {
            "eh_proj": _matrix(rng, n, 2 * n),
            "enorm": _gain(rng, n),
            "hnorm": _gain(rng, n),
            "input_layernorm": _gain(rng, n),
            "self_attn.q_proj": _matrix(rng, q, n) * 2,
            "self_attn.k_proj": _matrix(rng, kv, n) * 2,
            "self_attn.v_proj": _matrix(rng, kv, n),
            "self_attn.o_proj": _matrix(rng, n, q) * 2,
            "post_attention_layernorm": _gain(rng, n),
            "mlp.gate_proj": _matrix(rng, self.n_ff, n),
            "mlp.up_proj": _matrix(rng, self.n_ff, n),
            "mlp.down_proj": _matrix(rng, n, self.n_ff),
            "shared_head.norm": _gain(rng, n) * 3,
        }
        self.tensors = {f"{name}.weight": values.astype(self.dtype) for name, values in weights.items()}
        self.config = {
            "model_type": "llamatap_mtp",
            "hidden_size": n,
            "vocab_size": self.tiny.n_vocab,
            "target_architecture": self.tiny.arch,
            "target_num_hidden_layers": self.tiny.n_layer,
            "intermediate_size": self.n_ff,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_head_kv,
            "head_dim": self.head_width,
            "rope_theta": self.rope_base,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": 512,
            "hidden_state": "pre-norm",
        }

    def write(self, path: Path) -> Path:
        """Write the file, as a trainer would."""
        save_file(self.tensors, path, metadata={"format": "pt", "config": json.dumps(self.config)})
        return path

    def block(self) -> mtp_checkpoint.Block:
        """The oracle's view of it, beside its target."""
        weights = self.tiny.weights
        return mtp_checkpoint.Block(
            self.tensors,
            self.n_head,
            self.n_head_kv,
            self.rope_base,
            self.eps,
            weights["token_embd.weight"],
            weights["output.weight"],
        )


@dataclass
class DFlashCheckpoint:
    """A DFlash or DSpark checkpoint of the format "speculators" or "specforge".

    :ivar markov: rank of DSpark's head from token to token; 0: DFlash.
    :ivar confidence: DSpark's confidence head; ``with_markov`` whether it sees the token before.
    :ivar anchor: None for the default of speculators.
    :ivar n_draft_vocab: rows of the head, in the format of speculators; None leaves the head to the target.
    """

    format: str = "specforge"
    layers: tuple[int, ...] = (1, 2, 3)
    n_layer: int = 2
    n_embd: int = 64
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    head_width: int = 16
    n_vocab: int = 259
    n_draft_vocab: int | None = None
    embedding: bool = False
    block_size: int = 6
    markov: int = 0
    confidence: bool = False
    with_markov: bool = True
    anchor: bool | None = None
    rope_base: float = 1e5
    eps: float = 1e-5
    mask: int = 258
    seed: int = 0
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        n, q, kv = self.n_embd, self.n_head * self.head_width, self.n_head_kv * self.head_width
        rows = self.n_draft_vocab or self.n_vocab
        weights = {
            "fc": _matrix(rng, n, n * len(self.layers)),
            "hidden_norm": _gain(rng, n),
            "norm": _gain(rng, n),
        }
        for index in range(self.n_layer):
            inner = {
                "input_layernorm": _gain(rng, n),
                "post_attention_layernorm": _gain(rng, n),
                "self_attn.q_proj": _matrix(rng, q, n),
                "self_attn.k_proj": _matrix(rng, kv, n),
                "self_attn.v_proj": _matrix(rng, kv, n),
                "self_attn.o_proj": _matrix(rng, n, q),
                "self_attn.q_norm": _gain(rng, self.head_width),
                "self_attn.k_norm": _gain(rng, self.head_width),
                "mlp.gate_proj": _matrix(rng, self.n_ff, n),
                "mlp.up_proj": _matrix(rng, self.n_ff, n),
                "mlp.down_proj": _matrix(rng, n, self.n_ff),
            }
            weights |= {f"layers.{index}.{name}": values for name, values in inner.items()}
        if self.n_draft_vocab is not None:
            weights["lm_head"] = _matrix(rng, rows, n) * 4
        if self.embedding:
            weights["embed_tokens"] = _matrix(rng, self.n_vocab, n) * 8
        if self.markov:
            weights["markov_head.markov_w1"] = _matrix(rng, self.n_vocab, self.markov) * 6
            weights["markov_head.markov_w2"] = _matrix(rng, rows, self.markov)
        if self.confidence:
            columns = n + (self.markov if self.with_markov else 0)
            weights["confidence_head.proj"] = _matrix(rng, 1, columns)
        self.tensors = {f"{name}.weight": values for name, values in weights.items()}
        if self.confidence:
            self.tensors["confidence_head.proj.bias"] = rng.standard_normal(1, np.float32)
        if self.n_draft_vocab is not None:
            ids = np.sort(rng.choice(np.arange(3, self.n_vocab), rows, replace=False)).astype(np.int64)
            self.tensors["d2t"] = ids - np.arange(rows)
        self.config = self._config()

    @property
    def first_place(self) -> int:
        """The place of a block that gives its first token."""
        default = self.format == "speculators" and self.markov > 0
        return 0 if (default if self.anchor is None else self.anchor) else 1

    def _config(self) -> dict[str, Any]:
        block = {
            "model_type": "qwen3",
            "vocab_size": self.n_vocab,
            "hidden_size": self.n_embd,
            "intermediate_size": self.n_ff,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_head_kv,
            "head_dim": self.head_width,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": 512,
            "layer_types": ["full_attention"] * self.n_layer,
            "rope_parameters": {"rope_theta": self.rope_base, "rope_type": "default"},
        }
        heads = {
            "markov_rank": self.markov,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.with_markov,
        }
        if self.format == "speculators":
            return {
                "speculators_model_type": "dspark" if self.markov else "dflash",
                "transformer_layer_config": block,
                "draft_vocab_size": self.n_draft_vocab or self.n_vocab,
                "block_size": self.block_size,
                "mask_token_id": self.mask,
                "aux_hidden_state_layer_ids": list(self.layers),
                "sliding_window_non_causal": False,
                **({} if self.anchor is None else {"sample_from_anchor": self.anchor}),
                **(heads if self.markov else {}),
            }
        inner = {
            "target_layer_ids": [one - 1 for one in self.layers],
            "mask_token_id": self.mask,
            **({"projector_type": "dspark", "attention_mode": "gqa", **heads} if self.markov else {}),
        }
        name = "DSparkDraftModel" if self.markov else "DFlashDraftModel"
        return {
            **block,
            "architectures": [name],
            "block_size": self.block_size,
            "num_target_layers": 4,
            "dflash_config": inner,
        }

    def write(self, folder: Path) -> Path:
        """Write the checkpoint's folder."""
        return write_checkpoint(folder, self.config, self.tensors)

    def weights(self, tiny: TinyLlama) -> dflash.Weights:
        """The oracle's view of it, beside its target."""
        names = {
            "fc": "fc",
            "hidden_norm": "enc.output_norm",
            "norm": "output_norm",
            "lm_head": "output",
            "embed_tokens": "token_embd",
            "markov_head.markov_w1": "markov_w1",
            "markov_head.markov_w2": "markov_w2",
            "confidence_head.proj": "conf_proj",
        }
        inner = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "attn_output",
            **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
            **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        }
        for index in range(self.n_layer):
            names |= {f"layers.{index}.{ours}": f"blk.{index}.{theirs}" for ours, theirs in inner.items()}
        tensors: dict[str, NDArray[Any]] = {
            "token_embd.weight": tiny.weights["token_embd.weight"].astype(np.float64),
            "output.weight": tiny.weights["output.weight"].astype(np.float64),
        }
        for name, values in self.tensors.items():
            if name != "d2t":
                stem, _, last = name.rpartition(".")
                tensors[f"{names[stem]}.{last}"] = values.astype(np.float64)
        if "d2t" in self.tensors:
            tensors["d2t"] = np.array([row + offset for row, offset in enumerate(self.tensors["d2t"])])
        if self.confidence and not self.with_markov:
            # Nothing of the token before.
            none = np.zeros((1, self.markov))
            tensors["conf_proj.weight"] = np.concatenate([tensors["conf_proj.weight"], none], axis=1)
        return dflash.Weights(
            tensors,
            self.n_layer,
            self.n_head,
            self.n_head_kv,
            self.rope_base,
            self.eps,
            self.mask,
            False,
            self.first_place,
        )
