"""transformers in a process of its own, that computes when it is told to.

    python peer_program.py MODEL.gguf --dtype float32 --threads 2

Reads requests from standard input and answers each on standard output, one JSON object a line::

    {"tokens": [...]}                     all hidden states, computed and dropped; answers {"seconds": s}
    {"tokens": [...], "states": PATH}     and saved: float32 (n_tokens, H_0..H_n and norm(H_n), n_embd)
    {..., "rounded": true}                what enters a matrix is rounded as the engine's kernels do it
    {..., "entering": PATH}               each block is given its input from such a file, not from the block
                                          before it; saved is what the blocks and the norm make of them:
                                          H_1..H_n and norm(H_n)

The weights are those of the file, dequantised by transformers itself. The output head is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

Array = NDArray[np.float32]

# The type to which a matrix kernel converts its other operand, `vec_dot_type` of ggml-cpu/ggml-cpu.c.
EIGHT_BITS = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
}


def rounded(values: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of ``values`` when they meet a matrix of a type.

    F16 and BF16 take them as the same type. Quantised matrices take whole numbers of -127..127, times a
    scale for each 32 (float16) or 256 (float32) of them: quantize_row_q8_0 and _q8_K of
    ggml/src/ggml-quants.c.
    """
    if kind == "F32":
        return values
    if kind == "F16":
        return halved(values)
    if kind == "BF16":
        return values.bfloat16().float()
    width = EIGHT_BITS[kind]
    blocks = values.unflatten(-1, (-1, width))
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, 0)
    scale = halved(most / 127) if width == 32 else torch.where(most > 0, 1 / inverse, 0)
    return ((blocks * inverse).round() * scale).flatten(-2)


def halved(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


def first(output: Any) -> torch.Tensor:
    """The state among what a module returns."""
    state: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return state


def stacked(states: list[torch.Tensor]) -> Array:
    return np.stack([state[0].float().numpy() for state in states], axis=1)


class Peer:
    def __init__(self, path: Path, dtype: torch.dtype, attention: str) -> None:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
        # Newer versions may keep matrices packed, for kernels of their own.
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        causal = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, **options
        )
        self.model: Any = causal.eval().model
        assert all(parameter.dtype == dtype for parameter in self.model.parameters())
        reader = gguf.GGUFReader(path)
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        arch = reader.fields["general.architecture"].contents()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self.names = gguf.get_tensor_name_map(numbers[arch], len(self.model.layers))

    def compute(self, tokens: list[int]) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)

    def states(self, tokens: list[int]) -> Array:
        last: list[torch.Tensor] = []
        with ExitStack() as hooks:
            hooks.callback(self.model.norm.register_forward_pre_hook(lambda _, i: last.append(i[0])).remove)
            found = self.compute(tokens).hidden_states
        with torch.inference_mode():
            assert torch.equal(self.model.norm(last[0]), found[-1]), "its last entry is not norm(H_n)"
        return stacked([*found[:-1], last[0], found[-1]])

    def blocks(self, tokens: list[int], entering: Array) -> Array:
        given = torch.from_numpy(entering)
        results: list[torch.Tensor] = []
        with ExitStack() as hooks:
            for i, module in enumerate([*self.model.layers, self.model.norm]):
                before = partial(lambda state, _, inputs: (state, *inputs[1:]), given[None, :, i])
                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(
                    module.register_forward_hook(lambda _, i, out: results.append(first(out))).remove
                )
            self.compute(tokens)
        return stacked(results)

    def rounding(self) -> ExitStack:
        """While it is open, inputs of matrices are rounded."""
        hooks = ExitStack()
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                kind = self.types[f"{self.names.get_name(f'model.{name}')}.weight"]
                before = partial(lambda kind, _, inputs: (rounded(inputs[0], kind),), kind)
                hooks.callback(module.register_forward_pre_hook(before).remove)
            elif "gelu" in type(module).__name__.lower():
                # The engine reads GELU from a table: float16 in, float16 out.
                hooks.callback(module.register_forward_pre_hook(lambda _, i: (halved(i[0]),)).remove)
                hooks.callback(module.register_forward_hook(lambda _, i, out: halved(out)).remove)
        return hooks

    def answer(self, request: dict[str, Any]) -> None:
        tokens = request["tokens"]
        if "states" not in request:
            self.compute(tokens)
            return
        with self.rounding() if request.get("rounded") else ExitStack():
            if "entering" in request:
                found = self.blocks(tokens, np.load(request["entering"]))
            else:
                found = self.states(tokens)
        np.save(request["states"], found)


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers, that computes when it is told to.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    # Whatever libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(arguments.threads)
    peer = Peer(arguments.model, getattr(torch, arguments.dtype), arguments.attention)
    answer: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        peer.answer(request)
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
