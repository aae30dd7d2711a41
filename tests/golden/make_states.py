"""Write tests/data/states_golden.npz: ``hidden_states`` of transformers for models of support/tiny_models.

    nox -s golden

Of architectures whose states transformers counts unlike Llama's, and of some where the converted files of
others were seen to differ. The weights are those of the GGUF files, under transformers' names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny_models import EPS, N_VOCAB, Tiny, decoders, mambas

from golden.common import save

N_TOKENS = 24

Array = NDArray[np.float32]
Weights = dict[str, Array]

#: Names of GGUF tensors of a block -> transformers' names of its parts.
MIXER = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_x.weight": "x_proj.weight",
    "ssm_dt.weight": "dt_proj.weight",
    "ssm_out.weight": "out_proj.weight",
}
ATTENTION = {f"attn_{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkv"}
ATTENTION["attn_output.weight"] = "self_attn.o_proj.weight"


def mixer(prefix: str, name: str, values: Array, *, heads: bool) -> tuple[str, Array]:
    """A tensor of a state space. Mamba 2 has one step and one decay a head."""
    if name == "ssm_a":
        return f"{prefix}A_log", np.log(-values).reshape(-1 if heads else values.shape)
    if name == "ssm_d":
        return f"{prefix}D", values.reshape(-1)
    if name == "ssm_conv1d.weight":
        return f"{prefix}conv1d.weight", values[:, None, :]
    if name == "ssm_dt.bias":
        return prefix + ("dt_bias" if heads else "dt_proj.bias"), values
    if name == "ssm_norm.weight":
        return f"{prefix}norm.weight", values.reshape(-1)
    return prefix + MIXER[name], values


def of_mamba(name: str, values: Array, *, heads: bool) -> tuple[str, Array]:
    whole = {"token_embd.weight": "embeddings.weight", "output_norm.weight": "norm_f.weight"}
    if name in whole:
        return f"backbone.{whole[name]}", values
    _, index, part = name.split(".", 2)
    block = f"backbone.layers.{index}."
    if part == "attn_norm.weight":
        return f"{block}norm.weight", values
    return mixer(f"{block}mixer.", part, values, heads=heads)


def halves(values: Array, n_head: int) -> Array:
    """Rows of q or k with the numbers of a pair in the two halves of what turns, rather than side by side."""
    head = values.reshape(n_head, mambas.HEAD, -1)
    turns = mambas.HEAD // 2
    front = head[:, :turns].reshape(n_head, turns // 2, 2, -1).swapaxes(1, 2).reshape(n_head, turns, -1)
    return np.concatenate([front, head[:, turns:]], axis=1).reshape(values.shape)


def outside_blocks(norm: str) -> dict[str, str]:
    """Names of the tensors outside of blocks, in models that differ in the name of the last norm."""
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": f"model.{norm}.weight",
        "output.weight": "lm_head.weight",
    }


def of_bamba(name: str, values: Array) -> tuple[str, Array]:
    if name in (outside := outside_blocks("final_layernorm")):
        return outside[name], values
    _, index, part = name.split(".", 2)
    block = f"model.layers.{index}."
    if part in ("attn_q.weight", "attn_k.weight"):
        values = halves(values, mambas.N_QUERY if part == "attn_q.weight" else mambas.N_KV)
    if part in ATTENTION:
        return block + ATTENTION[part], values
    if part.startswith("ssm_"):
        return mixer(f"{block}mamba.", part, values, heads=True)
    parts = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "pre_ff_layernorm.weight"}
    parts |= {f"ffn_{kind}.weight": f"feed_forward.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    return block + parts[part], values


def of_afmoe(name: str, values: Array) -> tuple[str, Array]:
    if name in (outside := outside_blocks("norm")):
        return outside[name], values
    _, index, part = name.split(".", 2)
    parts = {
        **ATTENTION,
        "attn_gate.weight": "self_attn.gate_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_mlp_layernorm.weight",
        "post_ffw_norm.weight": "post_mlp_layernorm.weight",
        "ffn_gate_inp.weight": "mlp.router.gate.weight",
        "exp_probs_b.bias": "mlp.expert_bias",
        "ffn_gate_exps.weight": "gate",  # see below
        "ffn_up_exps.weight": "up",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
    }
    for kind in ("gate", "up", "down"):
        parts[f"ffn_{kind}.weight"] = f"mlp.{kind}_proj.weight"
        parts[f"ffn_{kind}_shexp.weight"] = f"mlp.shared_experts.{kind}_proj.weight"
    return f"model.layers.{index}.{parts[part]}", values


def joined_experts(weights: Weights) -> Weights:
    """transformers holds the gates of all experts and what they gate in one tensor."""
    for name in [name for name in weights if name.endswith(".gate")]:
        gate, up = weights.pop(name), weights.pop(f"{name.removesuffix('gate')}up")
        weights[f"{name.removesuffix('gate')}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    return weights


SHARED: dict[str, Any] = {"vocab_size": N_VOCAB, "pad_token_id": 0}
MAMBA: dict[str, Any] = {
    **SHARED,
    "hidden_size": mambas.N_EMBD,
    "num_hidden_layers": mambas.N_LAYER,
    "state_size": mambas.STATE,
    "conv_kernel": mambas.CONV,
    "expand": 2,
    "layer_norm_epsilon": EPS,
}
ONE: dict[str, Any] = {**MAMBA, "intermediate_size": mambas.INNER, "time_step_rank": mambas.RANK}
TWO: dict[str, Any] = {
    **MAMBA,
    "num_heads": mambas.N_HEAD,
    "head_dim": mambas.INNER // mambas.N_HEAD,
    "n_groups": mambas.N_GROUP,
    "rms_norm": True,
}
BAMBA: dict[str, Any] = {
    **SHARED,
    "hidden_size": mambas.N_EMBD,
    "num_hidden_layers": mambas.N_LAYER,
    "num_attention_heads": mambas.N_QUERY,
    "num_key_value_heads": mambas.N_KV,
    "intermediate_size": mambas.N_FF,
    "attn_layer_indices": [1],
    "mamba_n_heads": mambas.N_HEAD,
    "mamba_d_head": mambas.INNER // mambas.N_HEAD,
    "mamba_d_state": mambas.STATE,
    "mamba_d_conv": mambas.CONV,
    "rms_norm_eps": EPS,
}
AFMOE: dict[str, Any] = {
    **SHARED,
    "hidden_size": decoders.N_EMBD,
    "num_hidden_layers": 4,
    "num_attention_heads": decoders.N_HEAD,
    "num_key_value_heads": 2,
    "head_dim": decoders.HEAD,
    "intermediate_size": decoders.N_FF,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "route_scale": 2.5,
    "sliding_window": 8,
    "rms_norm_eps": EPS,
    # The engine always scales the embeddings; False is the default.
    "mup_enabled": True,
}

Rename = Callable[[str, Array], tuple[str, Array]]
MODELS: dict[str, tuple[Callable[[], Tiny], str, dict[str, Any], Rename]] = {
    "mamba": (mambas.mamba, "Mamba", ONE, lambda n, v: of_mamba(n, v, heads=False)),
    # The engine knows one epsilon, transformers two.
    "falcon_mamba": (
        mambas.falcon_mamba,
        "FalconMamba",
        {**ONE, "mixer_rms_eps": EPS},
        lambda n, v: of_mamba(n, v, heads=False),
    ),
    "mamba2": (mambas.mamba2, "Mamba2", TWO, lambda n, v: of_mamba(n, v, heads=True)),
    "bamba": (mambas.bamba, "Bamba", BAMBA, of_bamba),
    "afmoe": (decoders.afmoe, "Afmoe", AFMOE, of_afmoe),
}


def hidden_states(name: str, tokens: NDArray[np.int32]) -> tuple[Tiny, Array]:
    """(n_tokens, entries, n_embd), as transformers hands them out."""
    make, prefix, options, rename = MODELS[name]
    tiny = make()
    weights = joined_experts(dict(rename(key, values) for key, values in tiny.weights.items()))
    config = getattr(transformers, f"{prefix}Config")(**options)
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
    loaded = (
        model.eval()
        .float()
        .load_state_dict(
            {key: torch.from_numpy(np.ascontiguousarray(values)) for key, values in weights.items()},
            strict=False,
        )
    )
    # Heads are not looked at; where they are the embeddings, the file has none.
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, loaded.missing_keys
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    with torch.no_grad():
        out = model(torch.from_numpy(tokens[None].astype(np.int64)), output_hidden_states=True)
    return tiny, np.stack([entry[0].numpy() for entry in out.hidden_states], axis=1)


def main(target: str) -> None:
    transformers.utils.logging.set_verbosity_error()
    tokens = np.random.default_rng(0).integers(1, N_VOCAB, N_TOKENS, np.int32)
    arrays: dict[str, Any] = {"tokens": tokens}
    for name in MODELS:
        tiny, arrays[name] = hidden_states(name, tokens)
        # Other weights would be another model's: the generator of random numbers changed.
        arrays[f"{name}_embeddings"] = tiny.weights["token_embd.weight"][:4]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    save(target, versions, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
