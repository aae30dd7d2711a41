"""Our training of an EAGLE-3 head beside speculators' own class, on one batch: `nox -s speculators`.

    python eagle3_training.py PACKAGES FOLDER...

PACKAGES is the folder of the packages of that library's environment, used where this one lacks them.
FOLDER/target.gguf is a TinyLlama, FOLDER/verifier the same as transformers has it, FOLDER/settings.json the
arguments of a head of support/heads.py. FOLDER/found.npz gets what both computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from speculators.losses.eager import kl_div_loss
from speculators.models.eagle3 import Eagle3DraftModel
from support.heads import Sample, head_of, padded

from llamatap.train.drafters.head_checkpoints import write_head
from llamatap.train.drafters.multi_step_loss import multi_step_loss
from llamatap.train.drafters.target_weights import TargetWeights

STEPS = 3
DECAY = 0.7
#: One row less each, they are 128 rows, the block of that library's attention.
LENGTHS = (60, 45, 26)


def samples_of(target: TargetWeights, holes: bool) -> list[Sample]:
    """Random states. The first tokens of a text are not predicted: there the library's later steps take the
    end of a text for the beginning of the next.

    :param holes: of the others, a part is not predicted either.
    """
    rng = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        mask = (rng.random(length) < (0.8 if holes else 1)) & (np.arange(length) > STEPS + 1)
        tokens = rng.integers(3, target.n_vocab, length)
        features = rng.standard_normal((length, 3 * target.n_embd)).astype(np.float32)
        last = rng.standard_normal((length, target.n_embd)).astype(np.float32)
        found.append(Sample(tokens, features, last, mask))
    return found


def theirs(checkpoint: Path, verifier: Path, target: TargetWeights, samples: list[Sample]) -> dict[str, Any]:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["speculators_config"] |= {
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
        "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
    }
    path.write_text(json.dumps(config))
    settings = Eagle3DraftModel.config_class.from_pretrained(checkpoint)
    # FlexAttention, its default, has no gradient on a CPU.
    settings.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(checkpoint, config=settings, dtype=torch.float32)
    # Not in the checkpoint; the library takes the verifier's only if what it finds instead is NaN.
    model.embed_tokens.load_state_dict({"weight": torch.from_numpy(target.embedding)})
    logits: list[Any] = []
    model.lm_head.register_forward_hook(lambda module, given, found: logits.append(found[0].detach()))

    def joined(parts: list[Any]) -> Any:
        return torch.from_numpy(np.concatenate(parts))[None]

    # As its trainer shifts samples, but for the mask, which there says whether the row's own token counts.
    _, loss, metrics = model(
        joined([one.features[:-1] for one in samples]),
        joined([one.tokens[1:] for one in samples]),
        joined([np.full(len(one.tokens) - 1, index) for index, one in enumerate(samples)]),
        joined([np.append(one.mask[2:], False) for one in samples]),
        verifier_last_hidden_states=joined([one.last[1:] for one in samples]),
        ttt_steps=STEPS,
        ttt_step_loss_decay=DECAY,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
    )
    loss.backward()
    gradients = {name: values.grad for name, values in model.named_parameters() if values.grad is not None}
    return {
        "their_logits": torch.stack(logits).numpy(),
        "their_loss": loss.item(),
        "their_predicted": [metrics[f"full_acc_{step}_total"].item() for step in range(STEPS)],
        "their_accepted": [metrics[f"full_acc_{step}_sum"].item() for step in range(STEPS)],
        **{f"their {name}": values.numpy() for name, values in gradients.items()},
    }


#: Names of their parameters, by those of ours.
NAMES = {
    **{f"block.{one}_proj": f"layers.0.self_attn.{one}_proj" for one in "qkvo"},
    **{f"block.{one}_proj": f"layers.0.mlp.{one}_proj" for one in ("gate", "up", "down")},
    "block.post_attention_layernorm": "layers.0.post_attention_layernorm",
    "input_layernorm": "layers.0.input_layernorm",
    "hidden_norm": "layers.0.hidden_norm",
    "fc": "fc",
    "norm": "norm",
    "lm_head": "lm_head",
}


def main(folder: Path) -> None:
    target = TargetWeights.read(folder / "target.gguf")
    settings = json.loads((folder / "settings.json").read_text())
    samples = samples_of(target, settings.pop("holes"))
    head: Any = head_of(**settings, target=target)
    checkpoint = write_head(folder / "checkpoint", head, target, dtype="float32")

    logits: list[Any] = []
    head.lm_head.register_forward_hook(lambda module, given, found: logits.append(found.detach()))
    loss, counts = multi_step_loss(head, padded(samples), STEPS, DECAY)
    loss.backward()
    # Theirs is the distance to the target's distribution: less by the entropy of that.
    last = torch.from_numpy(np.concatenate([one.last for one in samples]))
    wanted = head.target_logits(last).softmax(-1).double()
    np.savez(
        folder / "found.npz",
        our_logits=torch.stack(logits).numpy(),
        our_loss=loss.item(),
        entropy=-(wanted * wanted.log()).sum(-1).numpy(),
        mask=np.concatenate([one.mask for one in samples]),
        our_predicted=counts.predicted.numpy(),
        our_accepted=counts.accepted.numpy(),
        **{
            f"our {NAMES[name.removesuffix('.weight')]}.weight": values.grad.numpy()
            for name, values in head.named_parameters()
            if values.grad is not None
        },
        **theirs(checkpoint, folder / "verifier", target, samples),
    )


if __name__ == "__main__":
    for each in sys.argv[2:]:
        main(Path(each))
