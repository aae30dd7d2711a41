"""Encoders: all tokens see each other, nothing is kept between batches, and there is no output head."""

from __future__ import annotations

from support.tiny_models import (
    EPS,
    N_CTX,
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
N_EMBD = 64
N_HEAD = 4
N_FF = 96
N_TYPES = 2
N_BUCKETS = 8  # of distances (T5)


def _keys(**more: Value) -> dict[str, Value]:
    return {**common(N_LAYER, N_EMBD, N_HEAD, N_FF), "attention.causal": False, "pooling_type": 1, **more}


def _post_norm(arch: str, *, positions: bool, gate: bool, bias: bool, experts: int = 0) -> Tiny:
    """The family of BERT: each block ends in a norm, and there is none after the last."""
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), "token_types.weight": (N_TYPES, N_EMBD)}
    if positions:
        shapes["position_embd.weight"] = (N_CTX, N_EMBD)
    shapes |= norm("token_embd_norm", N_EMBD, bias=True)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD, bias=bias)
        shapes |= norm(f"{block}attn_output_norm", N_EMBD, bias=True)
        if experts and i % 2 == 1:
            shapes[f"{block}ffn_gate_inp.weight"] = (experts, N_EMBD)
            shapes[f"{block}ffn_up_exps.weight"] = (experts, N_FF, N_EMBD)
            shapes[f"{block}ffn_down_exps.weight"] = (experts, N_EMBD, N_FF)
        else:
            shapes |= feed_forward(block, N_EMBD, N_FF, gate=gate, bias=bias)
        shapes |= norm(f"{block}layer_output_norm", N_EMBD, bias=True)
    keys = _keys(**{"attention.layer_norm_epsilon": EPS})
    if experts:
        keys |= {"moe_every_n_layers": 2, "expert_count": experts, "expert_used_count": 2}
    return Tiny(arch, keys, shapes, other_keys={"tokenizer.ggml.token_type_count": N_TYPES})


def bert() -> Tiny:
    return _post_norm("bert", positions=True, gate=False, bias=True)


def nomic_bert() -> Tiny:
    return _post_norm("nomic-bert", positions=False, gate=True, bias=False)


def nomic_bert_moe() -> Tiny:
    return _post_norm("nomic-bert-moe", positions=False, gate=False, bias=True, experts=4)


def jina_bert_v2() -> Tiny:
    """ALiBi in the place of positions; the engine wants the bias of what leads out of a gate."""
    tiny = _post_norm("jina-bert-v2", positions=False, gate=False, bias=True)
    for i in range(N_LAYER):
        tiny.shapes |= linear(f"blk.{i}.ffn_gate", N_FF, N_EMBD)
        # The first projection of a gated feed-forward has no bias.
        del tiny.shapes[f"blk.{i}.ffn_up.bias"]
    return Tiny(tiny.arch, tiny.keys, tiny.shapes, other_keys=tiny.other_keys)


def jina_bert_v3() -> Tiny:
    return _post_norm("jina-bert-v3", positions=False, gate=False, bias=True)


def modern_bert() -> Tiny:
    """Pre-norm; the first block has no norm before its attention, and blocks 1, 2 see a window."""
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    shapes |= norm("token_embd_norm", N_EMBD)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        if i > 0:
            shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= linear(f"{block}attn_qkv", 3 * N_EMBD, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, N_EMBD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= linear(f"{block}ffn_up", 2 * N_FF, N_EMBD)
        shapes |= linear(f"{block}ffn_down", N_EMBD, N_FF)
    shapes |= norm("output_norm", N_EMBD)
    more: dict[str, Value] = {
        "attention.layer_norm_epsilon": EPS,
        "attention.sliding_window": 8,
        "rope.freq_base": 160000.0,
        "rope.freq_base_swa": 10000.0,
    }
    return Tiny("modern-bert", _keys(**more), shapes)


def neo_bert() -> Tiny:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= linear(f"{block}attn_qkv", 3 * N_EMBD, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, N_EMBD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= linear(f"{block}ffn_up", 2 * N_FF, N_EMBD)
        shapes |= linear(f"{block}ffn_down", N_EMBD, N_FF)
    shapes |= norm("enc.output_norm", N_EMBD)
    return Tiny("neo-bert", _keys(**{"attention.layer_norm_rms_epsilon": EPS}), shapes)


def _llama_like(arch: str, n_layer: int, **more: Value) -> Tiny:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(n_layer):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD // 2)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    shapes |= norm("output_norm", N_EMBD)
    keys = _keys(**{"attention.layer_norm_rms_epsilon": EPS, "attention.head_count_kv": N_HEAD // 2, **more})
    keys["block_count"] = n_layer
    return Tiny(arch, keys, shapes)


def eurobert() -> Tiny:
    return _llama_like("eurobert", N_LAYER)


def llama_embed() -> Tiny:
    """Files of it do not say that tokens see later ones: the name does."""
    tiny = _llama_like("llama-embed", N_LAYER)
    keys = {key: value for key, value in tiny.keys.items() if key != "attention.causal"}
    return Tiny(tiny.arch, keys, tiny.shapes)


def gemma_embedding() -> Tiny:
    """Seven blocks: 5 sees all, the others a window."""
    tiny = _llama_like("gemma-embedding", 7, **{"attention.sliding_window": 8})
    for i in range(7):
        block = f"blk.{i}."
        for name in ("post_attention_norm", "post_ffw_norm"):
            tiny.shapes |= norm(block + name, N_EMBD)
        for name in ("attn_q_norm", "attn_k_norm"):
            tiny.shapes |= norm(block + name, N_EMBD // N_HEAD)
    return Tiny(tiny.arch, tiny.keys, tiny.shapes)


def _t5_stack(prefix: str, *, cross: bool) -> Shapes:
    shapes: Shapes = {}
    for i in range(N_LAYER):
        block = f"{prefix}.blk.{i}."
        for name in ("attn", "cross_attn") if cross else ("attn",):
            shapes |= norm(f"{block}{name}_norm", N_EMBD)
            for part in "qkvo":
                shapes |= linear(f"{block}{name}_{part}", N_EMBD, N_EMBD)
        if i == 0:
            shapes[f"{block}attn_rel_b.weight"] = (N_BUCKETS, N_HEAD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    return shapes | norm(f"{prefix}.output_norm", N_EMBD)


def _t5(arch: str, *, decoder: bool) -> Tiny:
    keys: dict[str, Value] = {
        **common(N_LAYER, N_EMBD, N_HEAD, N_FF),
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.relative_buckets_count": N_BUCKETS,
    }
    if decoder:
        keys["decoder_start_token_id"] = 0
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), **_t5_stack("enc", cross=False)}
    if decoder:
        shapes |= _t5_stack("dec", cross=True)
    return Tiny(arch, keys, shapes)


def t5encoder() -> Tiny:
    return _t5("t5encoder", decoder=False)


def t5() -> Tiny:
    """An encoder-decoder: the engine has no single stream of it."""
    return _t5("t5", decoder=True)
