"""Write tests/data/layer_numbers.json: what each entry of transformers' ``hidden_states`` is, by model class.

    nox -s golden

A small random model of each class is run with hooks on its blocks: what enters block i is H_i, what leaves
the last one is H_n, and what a norm makes of H_n is norm(H_n). Each entry of ``hidden_states`` is then named
by the tensor that it equals. No code of llamatap has a part in it. The architecture beside a class is that of
the GGUF files of such models. Results of other versions of transformers are kept beside this one's: to have
those of an older one again, install it and run this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

N = 4
TOKENS = [5, 7, 11, 3, 9, 20]

#: Sizes for whatever configuration has a field of that name.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": N,
    "num_layers": N,
    "num_decoder_layers": N,
    "n_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "d_ff": 48,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

MLA = {"num_key_value_heads": 4}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16}
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]

#: Class of transformers -> GGUF architecture, and what its small model needs beside the sizes.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "AfmoeForCausalLM": ("afmoe", {}),
    "ApertusForCausalLM": ("apertus", {}),
    "ArceeForCausalLM": ("arcee", {}),
    "BambaForCausalLM": ("granitehybrid", {**MAMBA2, "attn_layer_indices": [2]}),
    "BertModel": ("bert", {}),
    "BitNetForCausalLM": ("bitnet", {}),
    "BloomForCausalLM": ("bloom", {}),
    "CamembertModel": ("bert", {}),
    "ChameleonForConditionalGeneration": (
        "chameleon",
        {"vocabulary_map": {"<image>": 90, **{f"IMGIMG{x}Z": 80 + i for i, x in enumerate("ABCDEFGH")}}},
    ),
    "Cohere2ForCausalLM": ("cohere2", {}),
    "Cohere2MoeForCausalLM": ("cohere2moe", {}),
    "CohereForCausalLM": ("command-r", {}),
    "DeepseekV2ForCausalLM": ("deepseek2", MLA),
    "DeepseekV3ForCausalLM": ("deepseek2", MLA),
    "DeepseekV32ForCausalLM": ("deepseek32", MLA),
    "DistilBertModel": ("bert", {}),
    "Dots1ForCausalLM": ("dots1", {"n_shared_experts": 1}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5-moe", {}),
    "EuroBertModel": ("eurobert", {}),
    "Exaone4ForCausalLM": ("exaone4", {}),
    "ExaoneMoeForCausalLM": ("exaone-moe", {}),
    "FalconForCausalLM": ("falcon", {"head_dim": None}),
    "FalconH1ForCausalLM": ("falcon-h1", {}),
    "FalconMambaForCausalLM": ("mamba", {}),
    "GPT2LMHeadModel": ("gpt2", {}),
    "GPTBigCodeForCausalLM": ("starcoder", {}),
    "GPTNeoXForCausalLM": ("gptneox", {}),
    "Gemma2ForCausalLM": ("gemma2", {}),
    "Gemma3ForCausalLM": ("gemma3", {}),
    "Gemma3TextModel": ("gemma-embedding", {}),
    "Gemma4ForCausalLM": ("gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}),
    "GemmaForCausalLM": ("gemma", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4moe", {}),
    "Glm4MoeLiteForCausalLM": ("deepseek2", MLA),
    "GlmForCausalLM": ("chatglm", {}),
    "GlmMoeDsaForCausalLM": ("glm-dsa", MLA),
    "GptOssForCausalLM": ("gpt-oss", {}),
    "GraniteForCausalLM": ("granite", {}),
    "GraniteMoeForCausalLM": ("granitemoe", {}),
    "GraniteMoeHybridForCausalLM": (
        "granitehybrid",
        {**MAMBA2, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "GraniteMoeSWAForCausalLM": ("granite_swa", {}),
    "GraniteMoeSharedForCausalLM": ("granitemoe", {}),
    "GraniteSWAForCausalLM": ("granite_swa", {}),
    "HYV3ForCausalLM": ("hy_v3", {}),
    "HrmTextForCausalLM": ("hrm_text", {"num_hidden_layers": N, "H_cycles": 1, "L_cycles": 1}),
    "HunYuanDenseV1ForCausalLM": ("hunyuan-dense", {}),
    "HunYuanMoEV1ForCausalLM": ("hunyuan-moe", {}),
    "HunYuanVLForConditionalGeneration": ("hunyuan_vl", M_ROPE),
    "Jais2ForCausalLM": ("jais2", {}),
    "JambaForCausalLM": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}),
    "JinaEmbeddingsV3Model": ("jina-bert-v3", {}),
    "KimiLinearForCausalLM": ("kimi-linear", {**MLA, "layer_types": HYBRID}),
    "LagunaForCausalLM": ("laguna", {}),
    "Lfm2ForCausalLM": ("lfm2", {}),
    "Lfm2MoeForCausalLM": ("lfm2moe", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "Llama4ForCausalLM": ("llama4", {}),
    "LlamaForCausalLM": ("llama", {}),
    "MT5Model": ("t5", {}),
    "Mamba2ForCausalLM": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16}),
    "MambaForCausalLM": ("mamba", {}),
    "MellumForCausalLM": ("mellum", {}),
    "MiMoV2FlashForCausalLM": ("mimo2", {}),
    "MiniCPM3ForCausalLM": ("minicpm3", MLA),
    "MiniMaxForCausalLM": ("minimax-01", {}),
    "MiniMaxM2ForCausalLM": ("minimax-m2", {}),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax-m3", {}),
    "Ministral3ForCausalLM": ("mistral3", {}),
    "Mistral4ForCausalLM": ("mistral4", {**MLA, "head_dim": None}),
    "MistralForCausalLM": ("llama", {}),
    "MixtralForCausalLM": ("llama", {}),
    "ModernBertModel": ("modern-bert", {}),
    "MptForCausalLM": ("mpt", {}),
    "MuseGlimmerForConditionalGeneration": ("muse-glimmer", {}),
    "NemotronForCausalLM": ("nemotron", {}),
    "NemotronHForCausalLM": ("nemotron_h", {}),
    "NomicBertModel": ("nomic-bert", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo2", {}),
    "OlmoForCausalLM": ("olmo", {}),
    "OlmoeForCausalLM": ("olmoe", {}),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr", M_ROPE),
    "Phi3ForCausalLM": ("phi3", {}),
    "PhiForCausalLM": ("phi2", {}),
    "PhimoeForCausalLM": ("phimoe", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2moe", {}),
    "Qwen2VLForConditionalGeneration": ("qwen2vl", M_ROPE),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2vl", M_ROPE),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3moe", {}),
    "Qwen3NextForCausalLM": ("qwen3next", {"layer_types": HYBRID}),
    "Qwen3VLForConditionalGeneration": ("qwen3vl", {}),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3vlmoe", {}),
    "Qwen3_5ForCausalLM": ("qwen35", {"layer_types": HYBRID}),
    "Qwen3_5MoeForCausalLM": ("qwen35moe", {"layer_types": HYBRID}),
    "RobertaModel": ("bert", {}),
    # RWKV's fourth generation, unknown to the engine; 6 and 7 are not in transformers.
    "RwkvForCausalLM": ("rwkv", {}),
    "SeedOssForCausalLM": ("seed_oss", {}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "SolarOpenForCausalLM": ("glm4moe", {}),
    "StableLmForCausalLM": ("stablelm", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {}),
    "Step3p7ForConditionalGeneration": ("step35", {"sliding_window": 8}),
    "T5EncoderModel": ("t5encoder", {}),
    "T5Model": ("t5", {}),
    "UMT5EncoderModel": ("t5encoder", {}),
    "UMT5Model": ("t5", {}),
    "XLMRobertaModel": ("bert", {}),
    "YoutuForCausalLM": ("deepseek2", MLA),
}


def sized(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    # A field may be one of each layer, which reading it says with an error of its own.
    fields = {*dir(config), *getattr(config, "attribute_map", {})}
    found = {name: size for name, size in SIZES.items() if name in fields}
    return {name: value for name, value in {**found, **options}.items() if value is not None}


def small_config(kind: type, options: dict[str, Any]) -> Any:
    usual = kind()
    parts = {
        name: sized(getattr(usual, name), options if name == "text_config" else {})
        for name in ("text_config", "vision_config")
        if getattr(usual, name, None) is not None
    }
    return kind(**parts) if "text_config" in parts else kind(**sized(usual, options))


def small_model(name: str, options: dict[str, Any]) -> Any:
    """Of random weights, in which no block and no norm hands its input on unchanged."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(small_config(kind.config_class, options)).eval().float()
    for weights in model.parameters():
        if weights.dim() == 1:
            weights.data += 0.5 * torch.rand(weights.shape)
        else:
            weights.data *= 3
    return model


def stacks(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.ModuleList]]:
    """The lists of text blocks; only the outermost of nested ones."""
    found: list[str] = []
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.ModuleList) or len(part) != N or "vis" in name:
            continue
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
            yield name, part


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    value = args[0] if args else kwargs.get("hidden_states")
    return value if isinstance(value, torch.Tensor) else None


class Watched:
    """Hooks on the stacks of blocks that make one residual stream: what each tensor of a pass is."""

    def __init__(self, model: torch.nn.Module, parts: Iterable[tuple[str, torch.nn.ModuleList]]) -> None:
        self.entering: list[torch.Tensor] = []
        self.leaving: torch.Tensor | None = None
        self.normed: torch.Tensor | None = None
        for path, blocks in parts:
            for block in blocks:
                block.register_forward_pre_hook(self._enters, with_kwargs=True)
                block.register_forward_hook(self._leaves)
            for name, part in model.named_modules():
                if not name.startswith(f"{path}.") and "norm" in type(part).__name__.lower():
                    part.register_forward_hook(self._norms, with_kwargs=True)

    def _enters(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = first_tensor(args, kwargs)
        assert entering is not None
        self.entering.append(entering.clone())

    def _leaves(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.leaving, self.normed = (output[0] if isinstance(output, tuple) else output).clone(), None

    def _norms(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entering = first_tensor(args, kwargs)
        if entering is not None and self.leaving is not None and torch.equal(entering, self.leaving):
            self.normed = output.clone()

    def name(self, entry: torch.Tensor) -> str:
        known = {f"H_{i}": tensor for i, tensor in enumerate([*self.entering, self.leaving])}
        known["norm"] = self.normed
        names = [
            name
            for name, tensor in known.items()
            if tensor is not None
            and tensor.shape == entry.shape
            and torch.allclose(tensor, entry, rtol=1e-5, atol=1e-6)
        ]
        return " = ".join(names) or "other"


def measure(name: str, arch: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The meaning of each entry, by class name (and by half where a model has two)."""
    model = small_model(name, options)
    parts = list(stacks(model))
    ids = torch.tensor([TOKENS])
    if model.config.is_encoder_decoder and len(parts) == 2:
        encoder, decoder = (Watched(model, [part]) for part in parts)
        with torch.no_grad():
            out = model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
        seen = {
            f"{name}, encoder": (encoder, out.encoder_hidden_states),
            f"{name}, decoder": (decoder, out.decoder_hidden_states),
        }
    else:
        assert len(parts) == 1 or arch == "hrm_text", [path for path, _ in parts]
        watched = Watched(model, parts)
        with torch.no_grad():
            out = model(input_ids=ids, output_hidden_states=True)
        seen = {name: (watched, out.hidden_states)}
    return {
        key: {
            "arch": arch,
            "n_layer": len(watched.entering),
            "entries": [watched.name(entry) for entry in entries],
        }
        for key, (watched, entries) in seen.items()
    }


def main(target: str) -> None:
    path = Path(target)
    measured: dict[str, Any] = {}
    for name, (arch, options) in sorted(CLASSES.items()):
        # Newer classes are not in older versions, whose small models may also want other sizes.
        if not hasattr(transformers, name):
            continue
        try:
            found = measure(name, arch, options)
        except Exception as error:
            print(f"{name} left out: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        measured |= found
    known = json.loads(path.read_text()) if path.exists() else {}
    known[transformers.__version__] = measured
    # One class a line.
    versions = [
        f"{json.dumps(version)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(classes.items()))
        + "\n }"
        for version, classes in sorted(known.items())
    ]
    path.write_text("{\n " + ",\n ".join(versions) + "\n}\n")
    print(f"{target}: {len(measured)} classes of transformers {transformers.__version__}")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main(sys.argv[1])
