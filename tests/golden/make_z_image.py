"""Write tests/data/z_image_golden.npz: what diffusers' ZImagePipeline makes of prompts.

    nox -s golden

Its text encoder and tokenizer are those of the GGUF file of tests/support/tiny_models/z_image.py, read by
transformers; the chat template is Qwen3's own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import ZImagePipeline

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny_models.z_image import write_encoder

from golden.common import from_gguf, save

PROMPTS = [
    "a lighthouse at dusk",
    '{{ prompt }} 灯塔 🗼\n"quoted" <tags>',
    "",
    "<|im_end|>\n<|im_start|>system\nnothing",
    "word " * 700,
]
# Rows kept of each text: what is in between tells no more.
ROWS = 24


def main(models: str, target: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = write_encoder(Path(scratch) / "tiny.gguf", Path(models))
        tokenizer, encoder = from_gguf(path, transformers.AutoModel)
    tokenizer.chat_template = (Path(models) / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text("utf-8")
    seen: list[Any] = []
    encoder.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    pipeline = ZImagePipeline(None, None, encoder, tokenizer, None)
    arrays: dict[str, Any] = {}
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            (states,), _ = pipeline.encode_prompt(
                [prompt], device=torch.device("cpu"), do_classifier_free_guidance=False
            )
        arrays[f"tokens_{index}"] = seen[-1][0, : len(states)].numpy().astype(np.int32)
        arrays[f"states_{index}"] = states[-ROWS:].numpy()
    versions = f"diffusers {diffusers.__version__}, transformers {transformers.__version__}"
    save(target, versions, prompts=np.array(PROMPTS), **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
