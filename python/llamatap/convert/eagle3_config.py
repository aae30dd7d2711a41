"""EAGLE-3 blocks: shape and settings, from and to config.json and the keys of GGUF files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from llamatap import layers as layer_ids
from llamatap.convert.block_shape import BlockShape, check_heads
from llamatap.convert.gguf_files import GgufSource, shortest
from llamatap.convert.rope import Rope, read_rope, rope_config
from llamatap.convert.settings import Settings
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = [
    "EAGLE3_FORMATS",
    "Eagle3Format",
    "Eagle3Shape",
    "checkpoint_config",
    "format_of",
    "gguf_keys",
    "gguf_notes",
    "read_config",
    "read_gguf",
    "speculators_config",
]

#: Kinds of EAGLE-3 checkpoints.
Eagle3Format: TypeAlias = Literal["speculators", "eagle3", "angelslim"]
EAGLE3_FORMATS: tuple[Eagle3Format, ...] = ("speculators", "eagle3", "angelslim")

#: Key of a GGUF file with the rope of the checkpoint, as JSON: its tensor alone does not tell.
_ROPE_NOTE = "llamatap.rope"


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(BlockShape):
    """Shape and settings of an EAGLE-3 block.

    :ivar n_embd_target: width of the target's stream.
    """

    n_embd_target: int
    norm_before_residual: bool
    norm_before_fc: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by their names in GGUF without ".weight"."""
        features = 3 * self.n_embd_target
        return {
            "fc": (self.n_embd, features),
            "enc.output_norm": (features,),
            **self.block_shapes(2 * self.n_embd),
            "attn_norm_2": (self.n_embd,),
            "output_norm": (self.n_embd,),
            "output": (self.n_draft_vocab, self.n_embd),
            "token_embd": (self.n_vocab, self.n_embd),
        }


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def format_of(config: Mapping[str, Any]) -> Eagle3Format | None:
    """The format of a checkpoint, by its config.json; None where it is no EAGLE-3 drafter's."""
    if config.get("speculators_model_type") == "eagle3":
        return "speculators"
    if "speculators_model_type" in config or "draft_vocab_size" not in config:
        return None
    name = _architecture(config)
    if name.startswith("Eagle3") and name.endswith("ForCausalLM"):
        return "angelslim"
    # Some of EAGLE's own say that they are a llama, of one block and with a draft vocabulary.
    return "eagle3" if name in ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "") else None


def _named_layers(settings: Settings, kind: Eagle3Format) -> list[tuple[str, list[int], str]]:
    """The target layers that a config.json names: where, the ids, and the system that numbers them."""
    found = [
        ("eagle_aux_hidden_state_layer_ids", settings.integers("eagle_aux_hidden_state_layer_ids"), "vllm")
    ]
    if kind == "angelslim":
        found.append(
            ("aux_hidden_states_layer_ids", settings.integers("aux_hidden_states_layer_ids"), "specforge")
        )
    if kind != "speculators":
        inner = settings.inner("eagle_config")
        ids = inner.integers("eagle_aux_hidden_state_layer_ids")
        found.append(("eagle_config.eagle_aux_hidden_state_layer_ids", ids, "specforge"))
        inner.only("use_aux_hidden_state", True)
        inner.only("use_input_layernorm_in_first_layer", True)
        inner.only("use_last_layernorm", True)
        settings.refused += inner.rest()
    return [(name, ids, system) for name, ids, system in found if ids is not None]


def _target_layers(settings: Settings, kind: Eagle3Format, target: GgufSource) -> tuple[int, ...]:
    """The target's layers, as llamatap counts them.

    :raises InvalidInputError: an id is out of range, or two entries name other layers.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for name, ids, system in _named_layers(settings, kind):
        translated = layer_ids.translate(ids, source=system, n_layer=target.n_layer, arch=target.arch)
        chosen[name] = tuple(int(one) for one in translated)
    if len(set(chosen.values())) > 1:
        said = "; ".join(f"{name}: H of {list(ids)}" for name, ids in chosen.items())
        raise InvalidInputError(f"config.json names different layers of the target: {said}")
    if not chosen:
        return tuple(layer_ids.default_eagle3_layers(target.n_layer))
    return next(iter(chosen.values()))


def read_config(
    config: Mapping[str, Any],
    kind: Eagle3Format,
    target: GgufSource,
    given_layers: Sequence[int] | None,
    ignored: Collection[str],
) -> tuple[Eagle3Shape, list[str]]:
    """The shape, and all entries of the config that the engine's graph does not compute with."""
    top = Settings(config, ignored=ignored)
    block = top.inner("transformer_layer_config") if kind == "speculators" else top
    model_type = block.text("model_type", "qwen3" if kind == "speculators" else "llama")
    if model_type != "llama":
        block.refuse("model_type", "the engine's block is llama's")

    # Defaults are those of transformers' LlamaConfig: it leaves out what equals them.
    n_embd = block.integer("hidden_size", 4096)
    n_head = block.integer("num_attention_heads", 32)
    n_vocab = block.integer("vocab_size", 32000)
    rope = read_rope(block)
    block.only("num_hidden_layers", 1, why="the engine has one block")
    if kind == "speculators" and "num_hidden_layers" not in block:
        block.refuse("num_hidden_layers", "left out, it is 32; the engine has one block")
    block.only("hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias"):
        block.only(bias, False)
    if block.flag("use_sliding_window", "sliding_window" in block):
        block.only("sliding_window", why="the engine's block sees everything")
    block.skip("sliding_window")
    block.only("layer_types", ["full_attention"])
    if kind == "speculators":
        # Of the target's config, from which trainers make it; the head is not tied here.
        block.skip("tie_word_embeddings")
        top.skip("speculators_config", "speculators_version", "speculators_model_type", "embed_requires_grad")
    top.only("tie_word_embeddings", False)
    top.only("eagle_aux_injection_mode", "fused_fc")
    top.only("fc_norm", False, why="EAGLE-3.1 norms each layer before fc")
    if kind == "eagle3":
        if "norm_output" in top:
            top.refuse(
                "norm_output", "vLLM and SpecForge read it differently, and their defaults are the engine's"
            )
    else:
        top.only("norm_output", False, why="EAGLE-3.1 feeds the normed state back")

    layers = tuple(given_layers) if given_layers is not None else _target_layers(top, kind, target)
    if given_layers is not None:
        _named_layers(top, kind)
    if len(layers) != 3:
        top.refused.append(f"{len(layers)} target layers ({list(layers)}); the engine takes 3")
    shape = Eagle3Shape(
        n_embd=n_embd,
        n_embd_target=top.integer("target_hidden_size", target.n_embd),
        n_ff=block.integer("intermediate_size", 11008),
        n_head=n_head,
        n_head_kv=block.integer("num_key_value_heads", n_head),
        head_width=block.integer("head_dim", max(n_embd // n_head, 1)),
        n_vocab=n_vocab,
        n_draft_vocab=top.integer("draft_vocab_size", n_vocab),
        n_ctx=block.integer("max_position_embeddings", 2048),
        eps=block.number("rms_norm_eps", 1e-6),
        rope=rope,
        norm_before_residual=top.flag("norm_before_residual", False),
        norm_before_fc=top.flag("norm_before_fc", False),
        target_layers=layers,
    )
    refused = top.rest() if block is top else [*block.rest(), *top.rest()]
    _check_shape(shape, target)
    return shape, refused


def _check_shape(shape: Eagle3Shape, target: GgufSource) -> None:
    """Check that the block fits itself and the target.

    :raises InvalidInputError: the block does not fit itself or the target.
    """
    check_heads(shape.n_head, shape.n_head_kv, shape.head_width)
    for what, ours, theirs in (
        ("features of width", shape.n_embd_target, target.n_embd),
        ("a vocabulary of", shape.n_vocab, target.n_vocab),
    ):
        if ours != theirs:
            raise InvalidInputError(
                f"the checkpoint is for {what} {ours}, but {target.path.name} has {theirs}; give the target "
                "that it was trained for"
            )


def gguf_keys(shape: Eagle3Shape) -> dict[str, Any]:
    """The keys of architecture ``eagle3``, without its name in front."""
    return shape.gguf_keys(1) | {
        "target_hidden_size": shape.n_embd_target,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
    }


def gguf_notes(shape: Eagle3Shape, target: GgufSource) -> dict[str, Any]:
    """Other keys of the GGUF file."""
    notes: dict[str, Any] = {"general.name": f"EAGLE-3 for {target.name}"}
    if shape.rope.kind == "llama3":
        notes[_ROPE_NOTE] = json.dumps(asdict(shape.rope))
    return notes


def _rope_of(draft: GgufSource) -> Rope:
    """The rope of a GGUF file.

    :raises UnsupportedError: the file scales frequencies in a way that no checkpoint tells.
    """
    base = shortest(draft.key(".rope.freq_base", 10000.0))
    if (note := draft.key(_ROPE_NOTE, None)) is not None:
        try:
            return Rope(**json.loads(note))
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"{draft.path.name}: {_ROPE_NOTE} is not a rope: {error}") from error
    if "rope_freqs.weight" in draft.names:
        raise UnsupportedError(
            f"{draft.path.name} scales rope by rope_freqs.weight and does not say how it was made"
        )
    kind = draft.key(".rope.scaling.type", "linear")
    factor = shortest(draft.key(".rope.scaling.factor", 0.0))
    if kind == "linear" and factor not in (0.0, 1.0):
        return Rope(base, "linear", factor)
    if kind not in ("linear", "none") and factor not in (0.0, 1.0):
        raise UnsupportedError(
            f"{draft.path.name} has rope.scaling.type {kind}; default, linear and llama3 are known"
        )
    return Rope(base)


def read_gguf(draft: GgufSource, target: GgufSource) -> Eagle3Shape:
    """The shape and settings of a GGUF file of architecture ``eagle3``.

    :raises UnsupportedError: its frequencies are scaled in a way that no checkpoint tells.
    :raises InvalidInputError: it does not fit the target.
    """
    n_head = int(draft.key(".attention.head_count"))
    n_embd = draft.n_embd
    width = int(draft.key(".attention.key_length", n_embd // n_head))
    shape = Eagle3Shape(
        n_embd=n_embd,
        n_embd_target=int(draft.key(".target_hidden_size")),
        n_ff=int(draft.key(".feed_forward_length")),
        n_head=n_head,
        n_head_kv=int(draft.key(".attention.head_count_kv", n_head)),
        head_width=width,
        n_vocab=draft.n_vocab,
        n_draft_vocab=len(draft.values("d2t")) if "d2t" in draft.names else draft.n_vocab,
        n_ctx=int(draft.key(".context_length")),
        eps=shortest(draft.key(".attention.layer_norm_rms_epsilon")),
        rope=_rope_of(draft),
        norm_before_residual=bool(draft.key(".norm_before_residual", False)),
        norm_before_fc=bool(draft.key(".norm_before_fc", False)),
        target_layers=tuple(int(one) for one in draft.key(".target_layers")),
    )
    _check_shape(shape, target)
    return shape


def _block_config(shape: Eagle3Shape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": shape.n_vocab,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": shape.n_ctx,
        "rms_norm_eps": shape.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope_config(shape.rope),
    }


def speculators_config(shape: Eagle3Shape, verifier: str | None) -> dict[str, Any]:
    """The config.json of a checkpoint of speculators.

    :param verifier: name or folder of the target as transformers has it, if known.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _block_config(shape),
        "eagle_aux_hidden_state_layer_ids": list(shape.target_layers),
        "target_hidden_size": shape.n_embd_target,
        "norm_before_fc": shape.norm_before_fc,
        "tie_word_embeddings": False,
        "draft_vocab_size": shape.n_draft_vocab,
        "norm_before_residual": shape.norm_before_residual,
    }


def checkpoint_config(
    shape: Eagle3Shape, form: Eagle3Format, target: GgufSource, verifier: str | None
) -> dict[str, Any]:
    """The config.json of a checkpoint.

    :raises UnsupportedError: the format has no entry for a setting.
    """
    if form == "speculators":
        return speculators_config(shape, verifier)
    block, ids = _block_config(shape), list(shape.target_layers)
    shared = {"draft_vocab_size": shape.n_draft_vocab, "norm_before_residual": shape.norm_before_residual}
    named = layer_ids.translate(ids, target="specforge", n_layer=target.n_layer, arch=target.arch)
    if form == "eagle3":
        if shape.norm_before_residual or shape.norm_before_fc:
            raise UnsupportedError("SpecForge's EAGLE-3 has neither norm_before_residual nor norm_before_fc")
        layers: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": named}}
        name = "LlamaForCausalLMEagle3"
    else:
        layers = {"aux_hidden_states_layer_ids": named, "eagle_aux_hidden_state_layer_ids": ids}
        name = "Eagle3LlamaForCausalLM"
    extra = {"norm_before_fc": True} if shape.norm_before_fc else {}
    return {
        "architectures": [name],
        **block,
        "target_hidden_size": shape.n_embd_target,
        **layers,
        **shared,
        **extra,
    }
