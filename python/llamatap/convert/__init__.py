"""Conversion of drafters between the checkpoints of trainers and GGUF files, given only a GGUF target."""

from __future__ import annotations

from llamatap.convert.api import Conversion, to_checkpoint, to_gguf
from llamatap.convert.joined_drafts import joined_draft
from llamatap.convert.mtp_block import MtpBlock, MtpConfig, read_mtp, write_mtp

__all__ = [
    "Conversion",
    "MtpBlock",
    "MtpConfig",
    "joined_draft",
    "read_mtp",
    "to_checkpoint",
    "to_gguf",
    "write_mtp",
]
