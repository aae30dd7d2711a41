"""All files of this folder by name. Not all are whole models: some must only raise an error."""

from __future__ import annotations

from collections.abc import Callable

from support.tiny_models import Tiny, components, decoders, encoders, rwkv

FILES: dict[str, Callable[[], Tiny]] = {
    "apertus": decoders.apertus,
    "arwkv7": rwkv.arwkv7,
    "bert": encoders.bert,
    "bitnet": decoders.bitnet,
    "chameleon": decoders.chameleon,
    "clip": components.clip,
    "deepseek2-ocr": decoders.deepseek2_ocr,
    "dflash": components.dflash,
    "eagle3": components.eagle3,
    "eagle3-headless": components.eagle3_headless,
    "eurobert": encoders.eurobert,
    "gemma-embedding": encoders.gemma_embedding,
    "gemma3n": decoders.gemma3n,
    "gemma4": decoders.gemma4,
    "gemma4-moe": decoders.gemma4_moe,
    "gemma4-plain": decoders.gemma4_plain,
    "gemma4-assistant": components.gemma4_assistant,
    "gptj": components.gptj,
    "graniteswitch": decoders.granite_switch,
    "jina-bert-v2": encoders.jina_bert_v2,
    "jina-bert-v3": encoders.jina_bert_v3,
    "llama-embed": encoders.llama_embed,
    "modern-bert": encoders.modern_bert,
    "neo-bert": encoders.neo_bert,
    "nomic-bert": encoders.nomic_bert,
    "nomic-bert-moe": encoders.nomic_bert_moe,
    "plm": decoders.plm,
    "rwkv6": rwkv.rwkv6,
    "rwkv6qwen2": rwkv.rwkv6qwen2,
    "rwkv7": rwkv.rwkv7,
    "step35": decoders.step35,
    "t5": encoders.t5,
    "t5encoder": encoders.t5encoder,
    "wavtokenizer-dec": components.wavtokenizer_dec,
}
