"""A tiny model as transformers has it, for trainers that ask for their verifier's folder."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file
from support.tiny import TinyLlama


def write_verifier(folder: Path, tiny: TinyLlama) -> None:
    """Write a configuration, a tokenizer, and the weights that speculators reads: embeddings, norm, head."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tiny.n_vocab,
        "hidden_size": tiny.n_embd,
        "intermediate_size": tiny.n_ff,
        "num_hidden_layers": tiny.n_layer,
        "num_attention_heads": tiny.n_head,
        "num_key_value_heads": tiny.n_head_kv,
        "head_dim": tiny.head_width,
        "rms_norm_eps": tiny.eps,
        "rope_theta": tiny.rope_base,
        "max_position_embeddings": tiny.n_ctx,
        "tie_word_embeddings": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{i}": i for i in range(tiny.n_vocab)},
            "unk_token": "t0",
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2", "unk_token": "t0"}
    for name, content in {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }.items():
        (folder / name).write_text(json.dumps(content))
    weights = {
        "model.embed_tokens.weight": tiny.weights["token_embd.weight"],
        "model.norm.weight": tiny.weights["output_norm.weight"],
        "lm_head.weight": tiny.weights["output.weight"],
    }
    save_file(weights, folder / "model.safetensors")
