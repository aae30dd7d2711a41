"""Write tests/data/smollm2_golden.npz: rows of SmolLM2's hidden states, as transformers computes them.

    nox -s golden

The weights are those of the GGUF file, dequantised to float32 by transformers itself. Its
``hidden_states[n]`` is norm(H_n); H_n is taken from a hook on the input of the final norm.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.common import from_gguf, save

PROMPTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "<|im_start|>user\nWrite a haiku about rivers.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "print(fibonacci(10))",
]
# Rows kept of each prompt: the first (its values are huge), some in between, the last.
ROWS = [0, 1, 5, -2, -1]


def main(model_file: str, target: str) -> None:
    path = Path(model_file)
    tokenizer, model = from_gguf(path, transformers.AutoModelForCausalLM)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    arrays: dict[str, Any] = {}
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        last.clear()
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        states = [*out.hidden_states[:-1], last[0], out.hidden_states[-1]]
        rows = [row % ids.shape[1] for row in ROWS]
        arrays[f"tokens_{index}"] = ids[0].numpy().astype(np.int32)
        arrays[f"rows_{index}"] = np.array(rows, np.int32)
        # (rows, H_0..H_n and norm(H_n), width)
        arrays[f"states_{index}"] = np.stack([state[0, rows].numpy() for state in states], axis=1)
        arrays[f"logits_{index}"] = out.logits[0, -1].numpy()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {path.name}"
    save(target, versions, prompts=np.array(PROMPTS), **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
