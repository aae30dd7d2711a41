"""A user's preset, as TOML."""

from __future__ import annotations

PRESET = """
name = "mine"
[prompt]
template = "<{{ prompt }}>"
max_length = 8
[states]
convention = "transformers"
layers = LAYERS
rows = "2:"
"""
