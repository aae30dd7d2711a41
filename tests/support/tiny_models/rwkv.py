"""RWKV: linear attention with a state, and blocks that also read the token before (token shift)."""

from __future__ import annotations

from support.tiny_models import EPS, N_VOCAB, Shapes, Tiny, Value, common, feed_forward, linear, norm

N_LAYER = 2
N_EMBD = 128
HEAD = 64  # what the engine's kernels are made for
N_FF = 96
RANK = 16


def _keys(version: int, **more: Value) -> dict[str, Value]:
    keys = {**common(N_LAYER, N_EMBD, 0, N_FF), "wkv.head_size": HEAD}
    if version == 6:
        keys |= {"time_mix_extra_dim": RANK, "time_decay_extra_dim": RANK}
    else:
        keys |= {
            f"attention.{name}_lora_rank": RANK for name in ("decay", "iclr", "value_residual_mix", "gate")
        }
    return keys | more


def _time_mix_6(block: str) -> Shapes:
    """arXiv:2404.05892."""
    mix = f"{block}time_mix_"
    shapes: Shapes = {
        f"{mix}w1.weight": (5 * RANK, N_EMBD),
        f"{mix}w2.weight": (5, N_EMBD, RANK),
        f"{mix}lerp_x.weight": (1, 1, N_EMBD),
        f"{mix}lerp_fused.weight": (5, 1, 1, N_EMBD),
        f"{mix}decay.weight": (N_EMBD,),
        f"{mix}decay_w1.weight": (RANK, N_EMBD),
        f"{mix}decay_w2.weight": (N_EMBD, RANK),
    }
    for name in ("key", "value", "receptance", "gate", "output"):
        shapes |= linear(mix + name, N_EMBD, N_EMBD)
    return shapes


def _time_mix_7(block: str, *, gate: bool) -> Shapes:
    """arXiv:2503.14456."""
    mix = f"{block}time_mix_"
    shapes: Shapes = {f"{mix}lerp_fused.weight": (6 if gate else 5, 1, 1, N_EMBD)}
    for name in "wav":
        shapes[f"{mix}{name}0.weight"] = (N_EMBD,)
    for name in "wavg" if gate else "wav":
        shapes |= linear(f"{mix}{name}1", RANK, N_EMBD)
        shapes |= linear(f"{mix}{name}2", N_EMBD, RANK)
    for name in ("k_k", "k_a", "r_k"):
        shapes[f"{mix}{name}.weight"] = (N_EMBD,)
    for name in ("key", "value", "receptance", "output"):
        shapes |= linear(mix + name, N_EMBD, N_EMBD)
    return shapes


def _rwkv(version: int) -> Tiny:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    shapes |= norm("token_embd_norm", N_EMBD, bias=True)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            shapes |= norm(block + name, N_EMBD, bias=True)
        shapes |= _time_mix_6(block) if version == 6 else _time_mix_7(block, gate=True)
        mixes = "kr" if version == 6 else "k"
        for name in mixes:
            shapes[f"{block}channel_mix_lerp_{name}.weight"] = (1, 1, N_EMBD)
        shapes |= linear(f"{block}channel_mix_key", N_FF, N_EMBD)
        shapes |= linear(f"{block}channel_mix_value", N_EMBD, N_FF)
        if version == 6:
            shapes[f"{block}time_mix_first.weight"] = (N_EMBD // HEAD, HEAD)
            shapes |= linear(f"{block}channel_mix_receptance", N_EMBD, N_EMBD)
    shapes |= norm("output_norm", N_EMBD, bias=True)
    shapes |= linear("output", N_VOCAB, N_EMBD)
    return Tiny(f"rwkv{version}", _keys(version, **{"attention.layer_norm_epsilon": EPS}), shapes)


def _hybrid(arch: str, version: int) -> Tiny:
    """RWKV's time mixing in the blocks of qwen2, which have one shift each."""
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= _time_mix_6(block) if version == 6 else _time_mix_7(block, gate=False)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    shapes |= norm("output_norm", N_EMBD)
    shapes |= linear("output", N_VOCAB, N_EMBD)
    more: dict[str, Value] = {"attention.layer_norm_rms_epsilon": EPS, "token_shift_count": 1}
    keys = _keys(version, **more)
    if version == 7:
        del keys["attention.gate_lora_rank"]
    return Tiny(arch, keys, shapes)


def rwkv6() -> Tiny:
    return _rwkv(6)


def rwkv7() -> Tiny:
    return _rwkv(7)


def rwkv6qwen2() -> Tiny:
    return _hybrid("rwkv6qwen2", 6)


def arwkv7() -> Tiny:
    return _hybrid("arwkv7", 7)
