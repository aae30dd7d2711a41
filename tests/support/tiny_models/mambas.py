"""Mamba's family, and hybrids of it: state spaces with a convolution before them.

The engine's own program writes most of these, with keys of its own choice. These are shaped so that
transformers computes the same; tests/golden/make_states.py knows its names for their tensors.
"""

from __future__ import annotations

import numpy as np
from support.tiny_models import (
    EPS,
    N_VOCAB,
    Shapes,
    Tiny,
    Value,
    attention,
    common,
    feed_forward,
    linear,
    norm,
)

N_LAYER = 3
N_EMBD = 32
INNER = 2 * N_EMBD
STATE = 16
CONV = 4
RANK = 2
# Mamba 2.
N_HEAD = 8
N_GROUP = 2
# Attention and the feed-forward after it, in hybrids.
N_QUERY, N_KV, HEAD = 2, 1, 16
N_FF = 48


def _keys(n_head: int, n_ff: int, **more: Value) -> dict[str, Value]:
    return {
        **common(N_LAYER, N_EMBD, n_head, n_ff),
        "attention.layer_norm_rms_epsilon": EPS,
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        **more,
    }


def _decaying(tiny: Tiny) -> Tiny:
    """The same, with states that fade: A is negative."""
    for name, values in tiny.weights.items():
        if name.endswith("ssm_a"):
            tiny.weights[name] = -np.exp(np.float32(0.5) * values)
    return tiny


def mamba(*, falcon: bool = False) -> Tiny:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= linear(f"{block}ssm_in", 2 * INNER, N_EMBD)
        shapes |= linear(f"{block}ssm_conv1d", INNER, CONV, bias=True)
        shapes |= linear(f"{block}ssm_x", RANK + 2 * STATE, INNER)
        shapes |= linear(f"{block}ssm_dt", INNER, RANK, bias=True)
        shapes |= {f"{block}ssm_a": (INNER, STATE), f"{block}ssm_d": (INNER,)}
        shapes |= linear(f"{block}ssm_out", N_EMBD, INNER)
    shapes |= norm("output_norm", N_EMBD)
    keys = _keys(0, 0, **{"ssm.time_step_rank": RANK, "ssm.dt_b_c_rms": falcon})
    return _decaying(Tiny("mamba", keys, shapes))


def falcon_mamba() -> Tiny:
    """Files of Falcon-Mamba are of the same architecture, and norm B, C and the step besides."""
    return mamba(falcon=True)


def _mamba2_mixer(block: str, n_group: int) -> Shapes:
    convolved = INNER + 2 * n_group * STATE
    return {
        **linear(f"{block}ssm_in", INNER + convolved + N_HEAD, N_EMBD),
        **linear(f"{block}ssm_conv1d", convolved, CONV, bias=True),
        f"{block}ssm_dt.bias": (N_HEAD,),
        f"{block}ssm_a": (N_HEAD, 1),
        f"{block}ssm_d": (N_HEAD, 1),
        f"{block}ssm_norm.weight": (n_group, INNER // n_group),
        **linear(f"{block}ssm_out", N_EMBD, INNER),
    }


def mamba2() -> Tiny:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        shapes |= norm(f"blk.{i}.attn_norm", N_EMBD)
        shapes |= _mamba2_mixer(f"blk.{i}.", N_GROUP)
    shapes |= norm("output_norm", N_EMBD)
    keys = _keys(0, 0, **{"ssm.time_step_rank": N_HEAD, "ssm.group_count": N_GROUP})
    return _decaying(Tiny("mamba2", keys, shapes))


def bamba() -> Tiny:
    """Mamba 2 but for block 1, which attends; half of each of its heads turns with the position.

    The weights of q and k lie as the engine reads them: the two numbers of a pair side by side.
    """
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        if i == 1:
            shapes |= attention(block, N_EMBD, N_QUERY * HEAD, N_KV * HEAD)
        else:
            shapes |= _mamba2_mixer(block, 1)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    shapes |= norm("output_norm", N_EMBD)
    shapes |= linear("output", N_VOCAB, N_EMBD)
    more: dict[str, Value] = {
        "ssm.time_step_rank": N_HEAD,
        "ssm.group_count": 1,
        "attention.head_count_kv": [N_KV if i == 1 else 0 for i in range(N_LAYER)],
        "rope.dimension_count": HEAD // 2,
        "rope.scaling.finetuned": True,
    }
    tiny = _decaying(Tiny("granitehybrid", _keys(N_QUERY, N_FF, **more), shapes))
    for name in ("attn_q", "attn_k"):  # so that who looks where depends on the position
        tiny.weights[f"blk.1.{name}.weight"] *= 2
    return tiny
