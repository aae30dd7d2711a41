"""Files that are no language model of their own: what drafts for another model, and a vocoder."""

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

N_EMBD = 64
N_HEAD = 4
N_FF = 96
HEAD = N_EMBD // N_HEAD


def _keys(n_layer: int, **more: Value) -> dict[str, Value]:
    return {**common(n_layer, N_EMBD, N_HEAD, N_FF), "attention.layer_norm_rms_epsilon": EPS, **more}


def eagle3(*, own_ends: bool = True) -> Tiny:
    """One block on (token, features of three layers of another model)."""
    shapes: Shapes = {"fc.weight": (N_EMBD, 3 * N_EMBD), **norm("output_norm", N_EMBD)}
    if own_ends:
        shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (N_VOCAB, N_EMBD))
    block = "blk.0."
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        shapes |= norm(block + name, N_EMBD)
    for part in "qkv":
        shapes |= linear(f"{block}attn_{part}", N_EMBD, 2 * N_EMBD)
    shapes |= linear(f"{block}attn_output", N_EMBD, N_EMBD)
    shapes |= feed_forward(block, N_EMBD, N_FF)
    more: dict[str, Value] = {"target_layers": [1, 2, 3], "target_hidden_size": N_EMBD}
    return Tiny("eagle3", _keys(1, **more), shapes)


def eagle3_headless() -> Tiny:
    """Embeddings and output head are those of the model that it drafts for."""
    return eagle3(own_ends=False)


def dflash() -> Tiny:
    shapes: Shapes = {"fc.weight": (N_EMBD, 3 * N_EMBD)}
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (N_VOCAB, N_EMBD))
    shapes |= {**norm("output_norm", N_EMBD), **norm("enc.output_norm", N_EMBD)}
    for i in range(2):
        block = f"blk.{i}."
        shapes |= {**norm(f"{block}attn_norm", N_EMBD), **norm(f"{block}ffn_norm", N_EMBD)}
        shapes |= attention(block, N_EMBD, N_EMBD, N_EMBD)
        shapes |= {**norm(f"{block}attn_q_norm", HEAD), **norm(f"{block}attn_k_norm", HEAD)}
        shapes |= feed_forward(block, N_EMBD, N_FF)
    return Tiny("dflash", _keys(2, target_layers=[1, 2, 3], **{"dflash.block_size": 4}), shapes)


def gemma4_assistant() -> Tiny:
    """Blocks that attend to the memory of the model that they draft for."""
    n_layer, target = 2, 2 * N_EMBD
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), **norm("output_norm", N_EMBD)}
    shapes |= linear("nextn.pre_projection", N_EMBD, 2 * target)
    shapes |= linear("nextn.post_projection", target, N_EMBD)
    for i in range(n_layer):
        block = f"blk.{i}."
        shapes |= {
            **linear(f"{block}attn_q", N_EMBD, N_EMBD),
            **linear(f"{block}attn_output", N_EMBD, N_EMBD),
        }
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            shapes |= norm(block + name, N_EMBD)
        shapes |= norm(f"{block}attn_q_norm", HEAD)
        shapes[f"{block}layer_output_scale.weight"] = (1,)
        shapes |= feed_forward(block, N_EMBD, N_FF)
    more: dict[str, Value] = {
        "embedding_length_out": target,
        "nextn_predict_layers": n_layer,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True],
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
    }
    return Tiny("gemma4-assistant", _keys(n_layer, **more), shapes)


def wavtokenizer_dec() -> Tiny:
    """Convolutions from codes to sound, in six and two blocks."""
    width, sound = N_EMBD, 40
    shapes: Shapes = {"token_embd.weight": (N_VOCAB, width), "conv1d.weight": (width, width, 7)}
    shapes["conv1d.bias"] = (width, 1)
    for i in range(6):
        names = {2: ("attn_norm",), 5: ("norm",)}.get(i, ("norm1", "norm2"))
        for name in names:
            # The norm of the last one bears the name of the attention's.
            block = f"posnet.{i}." + ("attn_norm" if i == 5 else name)
            shapes |= {f"{block}.weight": (width, 1), f"{block}.bias": (width, 1)}
        convolutions = {2: ("attn_q", "attn_k", "attn_v", "attn_output"), 5: ()}.get(i, ("conv1", "conv2"))
        for name in convolutions:
            reach = 1 if i == 2 else 3
            shapes[f"posnet.{i}.{name}.weight"] = (width, width, reach)
            shapes[f"posnet.{i}.{name}.bias"] = (width, 1)
    shapes |= norm("token_embd_norm", width, bias=True)
    for i in range(2):
        block = f"convnext.{i}."
        shapes |= {f"{block}dw.weight": (width, 1, 7), f"{block}dw.bias": (width, 1)}
        shapes |= norm(f"{block}norm", width, bias=True)
        shapes |= linear(f"{block}pw1", N_FF, width, bias=True)
        shapes |= linear(f"{block}pw2", width, N_FF, bias=True)
        shapes[f"{block}gamma.weight"] = (width,)
    shapes |= norm("output_norm", width, bias=True)
    shapes |= linear("output", sound, width, bias=True)
    keys: dict[str, Value] = {
        **common(6, sound, N_HEAD, N_FF),
        "features_length": width,
        "attention.layer_norm_epsilon": EPS,
        "attention.group_norm_epsilon": EPS,
        "attention.group_norm_groups": 8,
        "attention.causal": False,
        "posnet.embedding_length": width,
        "posnet.block_count": 6,
        "convnext.embedding_length": width,
        "convnext.block_count": 2,
    }
    return Tiny(
        "wavtokenizer-dec",
        keys,
        shapes,
        f16=("conv1d.w", "conv1.w", "conv2.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w", "dw.w"),
    )


def clip() -> Tiny:
    """An image encoder, which the engine keeps for another library."""
    return Tiny("clip", common(1, N_EMBD, N_HEAD, N_FF), {"v.position_embd.weight": (4, N_EMBD)})


def gptj() -> Tiny:
    """The engine knows the name alone."""
    return Tiny("gptj", common(1, N_EMBD, N_HEAD, N_FF), {"token_embd.weight": (N_VOCAB, N_EMBD)})
