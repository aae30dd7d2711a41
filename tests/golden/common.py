"""Models of transformers from GGUF files, and files of golden rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def from_gguf(path: Path, model_class: Any) -> tuple[Any, Any]:
    """The tokenizer and the model of a GGUF file, which transformers dequantises to float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = model_class.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return tokenizer, model.eval()


def save(target: str, made_with: str, **arrays: Any) -> None:
    np.savez_compressed(target, made_with=np.array(made_with), **arrays)
    print(f"{target}: {made_with}")
