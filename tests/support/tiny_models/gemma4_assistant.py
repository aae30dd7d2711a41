"""A seeded random gemma4-assistant file: blocks that attend to the memory of a ``tiny.TinyGemma3``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.tiny_models import EPS, Shapes, Value, _random, common, feed_forward, linear, norm
from support.tiny_models.drafters import Tensors, write_file

N_VOCAB = 259
N_EMBD = 48


def write_assistant(
    path: Path,
    *,
    n_embd_target: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_width: int = 24,
    window: int = 8,
    local: tuple[bool, ...] = (True, False),
    seed: int = 0,
) -> Path:
    """
    :param local: of each block, whether it sees a window.
    """
    rng = np.random.default_rng(seed)
    q = n_head * head_width
    shapes: Shapes = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        **norm("output_norm", N_EMBD),
        **linear("nextn.pre_projection", N_EMBD, 2 * n_embd_target),
        **linear("nextn.post_projection", n_embd_target, N_EMBD),
    }
    for i, is_local in enumerate(local):
        block = f"blk.{i}."
        shapes |= linear(f"{block}attn_q", q, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, q)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            shapes |= norm(block + name, N_EMBD)
        shapes |= norm(f"{block}attn_q_norm", head_width)
        shapes[f"{block}layer_output_scale.weight"] = (1,)
        shapes |= feed_forward(block, N_EMBD, 96)
        if not is_local and "rope_freqs.weight" not in shapes:
            shapes["rope_freqs.weight"] = (head_width // 2,)
    tensors: Tensors = {name: _random(rng, name, shape) for name, shape in shapes.items()}
    tensors["token_embd.weight"] = tensors["token_embd.weight"] * np.float32(0.6)
    if "rope_freqs.weight" in tensors:
        tensors["rope_freqs.weight"] = np.ones(head_width // 2, np.float32)
    keys: dict[str, Value] = {
        **common(len(local), N_EMBD, n_head, 96),
        "context_length": 4096,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.key_length": head_width,
        "attention.value_length": head_width,
        "attention.key_length_swa": head_width,
        "attention.value_length_swa": head_width,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": head_width,
        "rope.dimension_count_swa": head_width,
        "embedding_length_out": n_embd_target,
        "nextn_predict_layers": len(local),
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": list(local),
    }
    return write_file(path, "gemma4-assistant", keys, tensors)
