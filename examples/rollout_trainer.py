"""Rollouts whose drafter learns from them, as in verl's co-training of a policy and its EAGLE drafter.

python examples/rollout_trainer.py TARGET.gguf FOLDER

Each step generates rollouts with the newest drafter. The states of their tokens, which the target computes
anyway, go through shared memory to the trainer, a process of its own. It makes some optimizer steps on an
EAGLE-3 head and writes a draft file, which drafts the next rollouts. Rewards and the update of the policy are
left out: they come after the rollouts, and the states of an updated policy are those of its new GGUF file.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import llamatap as lt
from llamatap.connectors import SharedMemoryConnector
from llamatap.connectors.connector import Transfer

QUESTIONS = (
    "Why is the sky blue? What do plants need? How does a bicycle stay upright? Why do we sleep? "
    "What is a fraction? How is bread made? What causes the seasons? Why is the sea salty? "
)
PROMPTS = [f"Question: {one}?\nAnswer:" for one in QUESTIONS.split("? ")[:-1]]
N_STEPS, N_TOKENS, N_DRAFT = 5, 48, 3
# Optimizer steps after each step of rollouts, on the samples of so many steps.
N_UPDATES, N_KEPT = 12, 3


def layers_of(n_layer: int) -> list[int]:
    """EAGLE-3's three layers of the target, and H_n, which is predicted."""
    return [2, n_layer // 2, n_layer - 3, n_layer]


def train(target: Path, folder: Path, name: str, pipe: Connection) -> None:
    """The trainer's process: for each list of samples that comes, a draft file."""
    import torch

    from llamatap.convert import to_gguf
    from llamatap.train.drafters.head_checkpoints import write_head
    from llamatap.train.drafters.heads import Eagle3Head
    from llamatap.train.drafters.multi_step_loss import multi_step_loss
    from llamatap.train.drafters.sample_split import draft_vocabulary
    from llamatap.train.drafters.sample_tensors import SampleTensors
    from llamatap.train.drafters.target_weights import TargetWeights

    weights = TargetWeights.read(target)
    connector = SharedMemoryConnector(name)
    kept: list[list[Any]] = []
    head: Any = None
    for step in range(N_STEPS):
        transfers: list[Transfer] = pipe.recv()
        kept = [*kept, [connector.get_generated(one) for one in transfers]][-N_KEPT:]
        for one in transfers:
            # The arrays stay until the last one of them is gone.
            connector.delete(one["handle"])
        texts = [text for some in kept for text in some]
        samples = SampleTensors.empty(sum(len(text["token_ids"]) for text in texts), 4, weights.n_embd)
        for text in texts:
            samples.add(text["token_ids"].astype(np.int32), text["loss_mask"], text["hidden_states"])
        if head is None:
            # What can be drafted: the tokens of these rollouts, and then any others.
            counts = np.bincount(samples.tokens.numpy(), minlength=weights.n_vocab)
            tokens, _ = draft_vocabulary(counts, min(2048, weights.n_vocab))
            head = Eagle3Head(weights, layers_of(weights.n_layer)[:3], tokens, n_ff=weights.n_embd)
            learning = [one for one in head.parameters() if one.requires_grad]
            optimizer = torch.optim.AdamW(learning, 1e-3, betas=(0.9, 0.95))
        rng = np.random.default_rng(step)
        losses: list[float] = []
        while len(losses) < N_UPDATES:
            for batch in samples.batches(range(len(samples)), 1024, rng)[: N_UPDATES - len(losses)]:
                loss, _ = multi_step_loss(head, samples.batch(batch), N_DRAFT)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learning, 1.0)
                optimizer.step()
                losses.append(loss.item())
        draft = folder / f"drafter-{step}.gguf"
        to_gguf(write_head(folder / "checkpoint", head, weights), target, draft, type="q8_0")
        pipe.send((draft, float(np.mean(losses))))


def rollouts(context: lt.Context, draft: Path | None, step: int, put: Any) -> float:
    """Generate a rollout for each prompt, and put their states. Returns tokens per round."""
    drafter = None if draft is None else lt.load_drafter(context, draft, n_max=N_DRAFT)
    layers = layers_of(context.model.n_layer)
    sampling: Any = {"max_tokens": N_TOKENS, "temperature": 0.7, "seed": step}
    states: Any = {"states": "full", "prompt_states": True, "layers": layers, "on_states": put}
    found: list[lt.Generation] = list(lt.generate(context, PROMPTS, drafter, **sampling, **states))
    if drafter is not None:
        drafter.spec.close()
    # The first token of each text comes from the pass over its prompt.
    return sum(one.stats.tokens - 1 for one in found) / max(sum(one.stats.rounds for one in found), 1)


if __name__ == "__main__":
    target, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), f"rollouts-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    connector, draft = SharedMemoryConnector(name), None
    pipe, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=train, args=(target, folder, name, theirs), daemon=True).start()
    theirs.close()
    with lt.Model(target) as model, model.context(n_ctx=1024, n_seq_max=len(PROMPTS)) as context:
        for step in range(N_STEPS):
            put: list[Any] = []
            per_round = rollouts(
                context, draft, step, lambda one, to=put: to.append(connector.put_generation(one))
            )
            pipe.send(put)
            draft, loss = pipe.recv()
            print(f"step {step}: {per_round:.2f} tokens per round; then trained to a loss of {loss:.2f}")
    print(draft)
