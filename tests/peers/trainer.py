"""A trainer of drafters with a verifier, by the speculators library's own code.

Runs in that library's environment, without llamatap: `nox -s speculators`.

    python trainer.py states|train URL FOLDER

FOLDER/prompts.jsonl holds rows of token ids and loss masks, FOLDER/verifier the model as transformers has it.
What came of them is left in FOLDER/found.npz and FOLDER/losses.json.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from datasets import load_from_disk
from hs_connectors import FileTransfer
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import generate_hidden_states, generate_hidden_states_async
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch.utils.data import DataLoader

#: The same as in FOLDER/verifier and on the server's command line.
LAYERS = [1, 2, 3]
WIDTH = 64
N_VOCAB = 259

Found = Iterator[tuple[list[int], torch.Tensor]]


def speculators(*arguments: str | Path) -> None:
    """Run the library's command."""
    subprocess.run([Path(sys.executable).parent / "speculators", *map(str, arguments)], check=True)


def prepared(folder: Path) -> Path:
    """Make the library's data set of the rows."""
    data = folder / "data"
    if not data.exists():
        speculators(
            *("prepare-data", "--model", folder / "verifier", "--data", folder / "prompts.jsonl"),
            *("--output", data),
        )
    return data


def requests(url: str, folder: Path) -> Found:
    """Send each prompt by one of the library's two clients; files are read, checked and deleted."""
    transfer = FileTransfer(folder)
    prompts = [row["input_ids"].tolist() for row in load_from_disk(prepared(folder))]
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
        model = client.models.list().data[0].id
        answers = [generate_hidden_states(client, model, {"input_ids": one}) for one in prompts[::2]]

    async def together() -> list[tuple[str, dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            tasks = [generate_hidden_states_async(client, model, {"input_ids": one}) for one in prompts[1::2]]
            return list(await asyncio.gather(*tasks))

    answers += asyncio.run(together())
    for tokens, (handle, parameters) in zip(prompts[::2] + prompts[1::2], answers, strict=True):
        data = transfer.get_generated(parameters)
        assert data is not None
        check_hidden_states(data, tokens)
        transfer.delete(handle)
        yield tokens, data["hidden_states"]


def dataset(url: str, folder: Path) -> Found:
    """Load the library's data set, which requests missing states, with two workers."""
    rows = load_from_disk(prepared(folder))
    # The layers, and the last one for the targets.
    collate = CollateFn(256, WIDTH, len(LAYERS), dtype=torch.float32)
    data = ArrowDataset(256, prepared(folder), vllm_endpoint=url, on_missing="generate")
    for row, batch in zip(
        rows, DataLoader(data, batch_size=1, collate_fn=collate, num_workers=2), strict=True
    ):
        tokens = row["input_ids"].tolist()
        n = len(tokens)
        assert batch["error_records"] == 0
        assert batch["input_ids"][0, :n].tolist() == tokens
        fused = batch["hidden_states"][0, :n].reshape(n, len(LAYERS), WIDTH)
        yield tokens, torch.cat([fused, batch["verifier_last_hidden_states"][0, :n, None]], 1)


def offline(url: str, folder: Path) -> Found:
    """Run the library's command that writes a data set of states."""
    speculators(
        *("generate-offline-data", "--endpoint", url, "--preprocessed-data", prepared(folder)),
        *("--concurrency", "8", "--validate-outputs", "--output", folder / "hidden_states"),
    )
    for i, row in enumerate(load_from_disk(prepared(folder))):
        file = load_file(folder / "hidden_states" / f"hs_{i}.safetensors")
        yield row["input_ids"].tolist(), file["hidden_states"]


def states(url: str, folder: Path) -> None:
    found: dict[str, Any] = {}
    for way in (requests, dataset, offline):
        for i, (tokens, rows) in enumerate(way(url, folder)):
            found[f"{way.__name__} {rows.dtype} tokens {i}"] = tokens
            found[f"{way.__name__} {rows.dtype} states {i}"] = rows.float().numpy()
    np.savez(folder / "found.npz", **found)


def train(url: str, folder: Path) -> None:
    """An EAGLE-3 drafter of its own, on its own data set, whose states are made when they are asked for: its
    trainer's steps, without the accelerator that its Trainer wants."""
    torch.manual_seed(0)
    verifier = str(folder / "verifier")
    layer = create_transformer_layer_config(verifier, 1, "llama", None, 2048, [0])
    kwargs = {"ttt_steps": 2, "ttt_step_loss_decay": 1.0, "loss_fn": "kl_div", "loss_implementation": "eager"}
    drafter = Eagle3DraftModel.from_training_args(
        layer,
        draft_vocab_size=N_VOCAB,
        norm_before_residual=True,
        verifier_name_or_path=verifier,
        target_layer_ids=LAYERS,
        draft_attn_impl="eager",
        **kwargs,
    )
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**kwargs)
    (optimizer,) = build_optimizers(drafter, TrainerConfig(lr=3e-3, num_epochs=1, save_path=str(folder)))
    before = {name: one.detach().clone() for name, one in drafter.named_parameters() if one.requires_grad}
    data = ArrowDataset(
        1024,
        prepared(folder),
        transfer=FileTransfer(folder / "none"),
        vllm_endpoint=url,
        on_missing="generate",
        # Its trainer asks for the model by the verifier's name.
        model=verifier,
    )
    collate = CollateFn(1024, WIDTH, len(LAYERS), dtype=torch.float32, preprocess=shift_batch)
    loader = DataLoader(data, batch_size=8, collate_fn=collate, num_workers=2)
    losses = []
    drafter.train()
    for _ in range(6):
        for batch in loader:
            assert batch["error_records"] == 0
            _, loss, _ = drafter(**batch, **call)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    changed = {
        name: not torch.equal(one, before[name]) for name, one in drafter.named_parameters() if name in before
    }
    (folder / "losses.json").write_text(json.dumps({"losses": losses, "changed": changed}))


if __name__ == "__main__":
    what, url, folder = sys.argv[1:]
    {"states": states, "train": train}[what](f"{url}/v1", Path(folder))
