"""The folder of fetched models and of cached hashes of model files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """``$LLAMATAP_CACHE``, or ``llamatap`` in the user's cache folder (``$XDG_CACHE_HOME``, else the system's
    usual one)."""
    if chosen := os.environ.get("LLAMATAP_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "llamatap"
    usual = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    return Path.home().joinpath(*usual, "llamatap")
