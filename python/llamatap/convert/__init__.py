"""Conversion of drafters between the checkpoints of trainers and GGUF files, given only a GGUF target."""

from __future__ import annotations

from llamatap.convert.api import Conversion, to_checkpoint, to_gguf

__all__ = ["Conversion", "to_checkpoint", "to_gguf"]
