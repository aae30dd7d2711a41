"""The cache folder: fetched models and the remembered hashes of model files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$LLAMATAP_CACHE``, or ``llamatap`` in the user's cache folder."""
    chosen = os.environ.get("LLAMATAP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamatap"
