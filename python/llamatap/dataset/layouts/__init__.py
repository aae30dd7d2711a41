"""Layouts: how a data set lies on disk, one module each."""

from __future__ import annotations

from llamatap.dataset.layouts._layout import Layout
from llamatap.dataset.layouts.npy import NpyLayout
from llamatap.dataset.layouts.specforge import SpecForgeLayout
from llamatap.dataset.layouts.speculators import SpeculatorsLayout

__all__ = ["LAYOUTS", "Layout"]

#: By the name of ``--layout``.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (SpeculatorsLayout, SpecForgeLayout, NpyLayout)
}
