"""Decoders that the engine's own program leaves out."""

from __future__ import annotations

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

N_LAYER = 2
N_EMBD = 64
N_HEAD = 4
N_FF = 96
HEAD = N_EMBD // N_HEAD


def _keys(n_layer: int = N_LAYER, /, **more: Value) -> dict[str, Value]:
    return {**common(n_layer, N_EMBD, N_HEAD, N_FF), "attention.layer_norm_rms_epsilon": EPS, **more}


def _ends(*, head: bool = True) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), **norm("output_norm", N_EMBD)}
    if head:
        shapes |= linear("output", N_VOCAB, N_EMBD)
    return shapes


def _gemma_block(block: str) -> Shapes:
    shapes = attention(block, N_EMBD, N_EMBD, N_EMBD)
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        shapes |= norm(block + name, N_EMBD)
    for name in ("attn_q_norm", "attn_k_norm"):
        shapes |= norm(block + name, HEAD)
    return shapes | feed_forward(block, N_EMBD, N_FF)


def _per_layer_inputs(n_layer: int, width: int) -> Shapes:
    """Embeddings of each token for each layer, and what brings them into the block."""
    shapes: Shapes = {
        "per_layer_token_embd.weight": (N_VOCAB, width * n_layer),
        "per_layer_model_proj.weight": (width * n_layer, N_EMBD),
        "per_layer_proj_norm.weight": (width,),
    }
    for i in range(n_layer):
        block = f"blk.{i}."
        shapes |= linear(f"{block}inp_gate", width, N_EMBD)
        shapes |= linear(f"{block}proj", N_EMBD, width)
        shapes |= norm(f"{block}post_norm", N_EMBD)
    return shapes


def _gemma4_experts(block: str, n_expert: int, n_ff: int) -> Shapes:
    """Beside the feed-forward of every token, with norms of their own; the router scales what it reads."""
    shapes: Shapes = {
        f"{block}ffn_gate_inp.weight": (n_expert, N_EMBD),
        f"{block}ffn_gate_inp.scale": (N_EMBD,),
        f"{block}ffn_gate_up_exps.weight": (n_expert, 2 * n_ff, N_EMBD),
        f"{block}ffn_down_exps.weight": (n_expert, N_EMBD, n_ff),
    }
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        shapes |= norm(block + name, N_EMBD)
    return shapes


def gemma4(*, per_layer: bool = True, scaled: bool = True, n_expert: int = 0) -> Tiny:
    """Six blocks, of which 3 and 5 see all; 4 and 5 use the keys and values of 2 and 3."""
    n_layer, width, shared = 6, 32, 2
    shapes = _ends(head=False)
    for i in range(n_layer):
        block = _gemma_block(f"blk.{i}.")
        if i >= n_layer - shared:
            for name in ("attn_k", "attn_v", "attn_k_norm"):
                del block[f"blk.{i}.{name}.weight"]
        shapes |= block
        if n_expert:
            shapes |= _gemma4_experts(f"blk.{i}.", n_expert, 32)
        if scaled:
            shapes[f"blk.{i}.layer_output_scale.weight"] = (1,)
    shapes["rope_freqs.weight"] = (HEAD // 2,)
    if per_layer:
        shapes |= _per_layer_inputs(n_layer, width)
    more: dict[str, Value] = {
        "embedding_length_per_layer_input": width if per_layer else 0,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [i not in (3, 5) for i in range(n_layer)],
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
        "final_logit_softcapping": 30.0,
    }
    if n_expert:
        more |= {"expert_count": n_expert, "expert_used_count": 2, "expert_feed_forward_length": 32}
    return Tiny("gemma4", _keys(n_layer, **more), shapes)


def gemma4_plain() -> Tiny:
    """Without inputs per layer and without a scale, as the larger models."""
    return gemma4(per_layer=False, scaled=False)


def gemma4_moe() -> Tiny:
    return gemma4(per_layer=False, n_expert=4)


def gemma3n() -> Tiny:
    """Four streams (AltUp); the engine fixes the widths of what mixes them, and which blocks have a cache."""
    n_layer, n_altup, width, rank = 22, 4, 256, 64
    shapes = _ends(head=False)
    shapes |= {f"altup_{name}.weight": (n_altup - 1, N_EMBD, N_EMBD) for name in ("proj", "unembd_proj")}
    shapes |= _per_layer_inputs(n_layer, width)
    for i in range(n_layer):
        block = f"blk.{i}."
        shapes |= _gemma_block(block)
        shapes |= linear(f"{block}altup_correct_coef", n_altup, n_altup)
        shapes |= linear(f"{block}altup_predict_coef", n_altup * n_altup, n_altup)
        shapes |= linear(f"{block}altup_router", n_altup, N_EMBD)
        shapes[f"{block}altup_correct_scale.weight"] = (N_EMBD,)
        shapes |= norm(f"{block}altup_router_norm", N_EMBD)
        shapes |= linear(f"{block}laurel_l", rank, N_EMBD)
        shapes |= linear(f"{block}laurel_r", N_EMBD, rank)
        shapes |= norm(f"{block}laurel_post_norm", N_EMBD)
    return Tiny("gemma3n", _keys(n_layer, **{"attention.sliding_window": 8}), shapes)


def apertus() -> Tiny:
    shapes = _ends()
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        shapes |= norm(f"{block}attn_q_norm", HEAD)
        shapes |= norm(f"{block}attn_k_norm", HEAD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF, gate=False)
    activation = {"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.9, "xielu.beta": 0.5, "xielu.eps": 1e-6}
    return Tiny("apertus", _keys(), shapes, other_keys=activation)


def bitnet() -> Tiny:
    shapes = _ends(head=False)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        for name in ("attn_norm", "attn_sub_norm", "ffn_norm"):
            shapes |= norm(block + name, N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        shapes |= norm(f"{block}ffn_sub_norm", N_FF)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    return Tiny("bitnet", _keys(), shapes)


def chameleon() -> Tiny:
    """The engine hides the logits of image tokens, which end at id 8,196."""
    n_vocab = 8320
    shapes = _ends()
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        for name in ("attn_q_norm", "attn_k_norm"):
            shapes[f"{block}{name}.weight"] = (N_HEAD, HEAD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (n_vocab, N_EMBD))
    return Tiny("chameleon", _keys(), shapes, n_vocab=n_vocab)


def plm() -> Tiny:
    """Latent attention: keys and values of a low rank, and a rotated part of the keys that heads share."""
    rank, rotated, nope = 24, 8, 16
    shapes = _ends(head=False)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= linear(f"{block}attn_q", N_HEAD * (nope + rotated), N_EMBD)
        shapes |= linear(f"{block}attn_kv_a_mqa", rank + rotated, N_EMBD)
        shapes |= norm(f"{block}attn_kv_a_norm", rank)
        shapes |= linear(f"{block}attn_kv_b", N_HEAD * (nope + HEAD), rank)
        shapes |= linear(f"{block}attn_output", N_EMBD, N_HEAD * HEAD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF, gate=False)
    more: dict[str, Value] = {
        "attention.kv_lora_rank": rank,
        "attention.key_length": nope + rotated,
        "attention.value_length": HEAD,
        "rope.dimension_count": rotated,
    }
    return Tiny("plm", _keys(**more), shapes)


def _experts(block: str, n_expert: int, n_ff: int) -> Shapes:
    shapes: Shapes = {f"{block}ffn_gate_inp.weight": (n_expert, N_EMBD)}
    for name in ("gate", "up"):
        shapes[f"{block}ffn_{name}_exps.weight"] = (n_expert, n_ff, N_EMBD)
        shapes |= linear(f"{block}ffn_{name}_shexp", n_ff, N_EMBD)
    shapes[f"{block}ffn_down_exps.weight"] = (n_expert, N_EMBD, n_ff)
    return shapes | linear(f"{block}ffn_down_shexp", N_EMBD, n_ff)


def deepseek2_ocr() -> Tiny:
    """A dense block, then one of experts."""
    n_expert, n_ff = 4, 32
    shapes = _ends()
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF) if i == 0 else _experts(block, n_expert, n_ff)
    more: dict[str, Value] = {
        "leading_dense_block_count": 1,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n_ff,
    }
    return Tiny("deepseek2-ocr", _keys(**more), shapes)


def step35() -> Tiny:
    """Attention of every head is gated; block 0 sees all, block 1 a window."""
    n_expert, n_ff = 4, 32
    shapes = _ends()
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        shapes |= norm(f"{block}attn_q_norm", HEAD)
        shapes |= norm(f"{block}attn_k_norm", HEAD)
        shapes |= linear(f"{block}attn_gate", N_HEAD, N_EMBD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF) if i == 0 else _experts(block, n_expert, n_ff)
    more: dict[str, Value] = {
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_feed_forward_length": n_ff,
        "expert_shared_feed_forward_length": n_ff,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [False, True],
    }
    return Tiny("step35", _keys(**more), shapes)


def granite_switch() -> Tiny:
    """Tokens 5 and 6 turn on adapters in all layers for what follows."""
    rank, slots = 4, 3
    shapes = _ends()
    for i in range(N_LAYER):
        block = f"blk.{i}."
        shapes |= norm(f"{block}attn_norm", N_EMBD)
        shapes |= linear(f"{block}attn_qkv", 3 * N_EMBD, N_EMBD)
        shapes |= linear(f"{block}attn_output", N_EMBD, N_EMBD)
        shapes |= norm(f"{block}ffn_norm", N_EMBD)
        shapes |= feed_forward(block, N_EMBD, N_FF)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            inputs = N_FF if name == "ffn_down" else N_EMBD
            outputs = N_FF if name in ("ffn_gate", "ffn_up") else N_EMBD
            shapes[f"{block}{name}.lora_a"] = (slots, rank, inputs)
            shapes[f"{block}{name}.lora_b"] = (slots, outputs, rank)
    more: dict[str, Value] = {
        "logit_scale": 4.0,
        "adapters.count": slots - 1,
        "adapters.lora_rank": rank,
        "adapters.token_ids_activate": [5, 6],
        "adapters.token_ids_substitute": [7, 8],
    }
    return Tiny("graniteswitch", _keys(**more), shapes)


def afmoe(n_kv: int = 2, n_expert: int = 4, n_ff: int = 32) -> Tiny:
    """Blocks 0 to 2 see a window and know positions, 3 sees all and knows none; all but 0 have experts."""
    n_layer = 4
    shapes = _ends()
    for i in range(n_layer):
        block = f"blk.{i}."
        shapes |= attention(block, N_EMBD, N_EMBD, n_kv * HEAD) | linear(f"{block}attn_gate", N_EMBD, N_EMBD)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            shapes |= norm(block + name, N_EMBD)
        for name in ("attn_q_norm", "attn_k_norm"):
            shapes |= norm(block + name, HEAD)
        if i == 0:
            shapes |= feed_forward(block, N_EMBD, N_FF)
            continue
        shapes |= linear(f"{block}ffn_gate_inp", n_expert, N_EMBD)
        shapes[f"{block}exp_probs_b.bias"] = (n_expert,)
        for kind, experts in (("exps", (n_expert,)), ("shexp", ())):
            shapes[f"{block}ffn_gate_{kind}.weight"] = (*experts, n_ff, N_EMBD)
            shapes[f"{block}ffn_up_{kind}.weight"] = (*experts, n_ff, N_EMBD)
            shapes[f"{block}ffn_down_{kind}.weight"] = (*experts, N_EMBD, n_ff)
    more: dict[str, Value] = {
        "attention.head_count_kv": n_kv,
        "attention.sliding_window": 8,
        "leading_dense_block_count": 1,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n_ff,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return Tiny("afmoe", _keys(n_layer, **more), shapes)
