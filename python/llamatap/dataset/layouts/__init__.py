"""Layouts: the files of a data set on disk, one module per layout."""

from __future__ import annotations

import importlib.util

from llamatap._extras import missing
from llamatap._validate import shown
from llamatap.dataset.layouts.layout import Layout
from llamatap.dataset.layouts.npy import NpyLayout
from llamatap.dataset.layouts.specforge import SpecForgeLayout
from llamatap.dataset.layouts.speculators import SpeculatorsLayout
from llamatap.errors import InvalidInputError

__all__ = ["LAYOUTS", "Layout", "layout_class"]

#: The layouts by their names, as ``--layout`` takes them.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (SpeculatorsLayout, SpecForgeLayout, NpyLayout)
}


def layout_class(name: str) -> type[Layout]:
    """The layout with this name.

    :raises InvalidInputError: there is none.
    :raises UnsupportedError: a package that it needs is missing.
    """
    found = LAYOUTS.get(name)
    if found is None:
        raise InvalidInputError(f"unknown layout {shown(name)}; known are {', '.join(LAYOUTS)}")
    absent = [package for package in found.needs if importlib.util.find_spec(package) is None]
    if absent:
        raise missing(*absent, what=f"the layout {name}")
    return found
