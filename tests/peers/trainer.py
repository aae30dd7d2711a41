"""What a trainer of drafters does with a verifier, by the speculators library's own code. Runs in its
environment, without llamatap: `make test-peers`.

    python trainer.py requests|dataset|offline URL FOLDER OUT.npz

FOLDER/prompts.json holds lists of token ids; OUT.npz gets what came of them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from datasets import Dataset
from hs_connectors import FileTransfer
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import generate_hidden_states, generate_hidden_states_async
from speculators.train.data import ArrowDataset, CollateFn
from torch.utils.data import DataLoader


def requests(url: str, folder: Path, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Each prompt by one of the two clients; the file is read, checked and deleted."""
    transfer = FileTransfer(folder)
    with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
        model = client.models.list().data[0].id
        answers = [generate_hidden_states(client, model, {"input_ids": one}) for one in prompts[::2]]

    async def together() -> list[tuple[str, dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as client:
            tasks = [generate_hidden_states_async(client, model, {"input_ids": one}) for one in prompts[1::2]]
            return list(await asyncio.gather(*tasks))

    others = asyncio.run(together())
    found = {}
    for i, one in enumerate(prompts):
        handle, parameters = others[i // 2] if i % 2 else answers[i // 2]
        data = transfer.get_generated(parameters)
        assert data is not None
        check_hidden_states(data, one)
        assert data["token_ids"].dtype == torch.int64
        found[f"states_{i}"] = data["hidden_states"]
        transfer.delete(handle)
    return found


def save_prompts(folder: Path, prompts: list[list[int]]) -> Path:
    rows = {
        "input_ids": prompts,
        "loss_mask": [[0, *[1] * (len(one) - 1)] for one in prompts],
        "seq_len": [len(one) for one in prompts],
    }
    dataset = Dataset.from_dict(rows).with_format(
        "torch", columns=["input_ids", "loss_mask"], output_all_columns=True
    )
    dataset.save_to_disk(folder / "prompts")
    return folder / "prompts"


def dataset(url: str, folder: Path, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Its data set, which asks for what is missing, through a loader with two workers."""
    found: dict[str, torch.Tensor] = {}
    path = save_prompts(folder, prompts)
    sample = ArrowDataset(4096, path, vllm_endpoint=url, on_missing="generate")[0]
    width = sample["verifier_last_hidden_states"].shape[1]
    n_layers = sample["hidden_states"].shape[1] // width
    # Another one: the workers would share the connection that this one has opened.
    data = ArrowDataset(4096, path, vllm_endpoint=url, on_missing="generate")
    collate = CollateFn(4096, width, n_layers, dtype=torch.float32)
    for i, batch in enumerate(DataLoader(data, batch_size=1, collate_fn=collate, num_workers=2)):
        rows = len(prompts[i])
        assert batch["input_ids"][0, :rows].tolist() == prompts[i]
        assert batch["error_records"] == 0
        fused = batch["hidden_states"][0, :rows].reshape(rows, n_layers, width)
        last = batch["verifier_last_hidden_states"][0, :rows]
        found[f"states_{i}"] = torch.cat([fused, last[:, None]], 1)
    return found


def offline(url: str, folder: Path, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Its command that writes a data set of states."""
    command = [sys.executable, "-m", "speculators", "generate-offline-data", "--endpoint", url]
    command += ["--preprocessed-data", str(save_prompts(folder, prompts)), "--concurrency", "8"]
    subprocess.run([*command, "--validate-outputs", "--output", str(folder / "states")], check=True)
    files = [load_file(folder / "states" / f"hs_{i}.safetensors") for i in range(len(prompts))]
    for one, file in zip(prompts, files, strict=True):
        check_hidden_states(file, one)
    return {f"states_{i}": file["hidden_states"] for i, file in enumerate(files)}


def main() -> None:
    way, url, folder, out = sys.argv[1:]
    prompts = json.loads((Path(folder) / "prompts.json").read_text())
    work = {"requests": requests, "dataset": dataset, "offline": offline}[way]
    found = work(f"{url}/v1", Path(folder), prompts)
    dtypes = {str(one.dtype) for one in found.values()}
    np.savez(out, dtypes=sorted(dtypes), **{name: one.float().numpy() for name, one in found.items()})


if __name__ == "__main__":
    main()
