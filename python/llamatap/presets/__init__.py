"""Presets: encode a prompt to the states that the pipeline of an image model computes from it.

>>> from llamatap.presets import load_preset
>>> preset = load_preset("z-image")                                    # or the path of a TOML file
>>> preset.encode(model, "a lighthouse at dusk")[-2].shape             # doctest: +SKIP
(14, 2560)

A preset fills a template, truncates the text, names layers in the numbering of its source, and selects rows.
docs/presets.md describes how to write one.
"""

from __future__ import annotations

from llamatap.presets.preset import Preset
from llamatap.presets.preset_files import load_preset, preset_names

__all__ = ["Preset", "load_preset", "preset_names"]
