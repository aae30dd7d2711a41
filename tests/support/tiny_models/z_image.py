"""A text encoder like that of Z-Image, small: Qwen3 with the real vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.tiny import TinyQwen3


@dataclass
class Encoder(TinyQwen3):
    # The size of Qwen2's vocabulary, whose special tokens and merges are Qwen3's.
    n_vocab: int = 151936
    n_embd: int = 32
    n_head: int = 2
    n_head_kv: int = 1

    # transformers takes no other width from a GGUF file of this architecture.
    head_width = 128


def write_encoder(path: Path, models: Path) -> Path:
    """Write the model.

    :param models: the engine's folder of that name, which has vocabularies.
    """
    return Encoder().write(path, vocabulary=models / "ggml-vocab-qwen2.gguf")
