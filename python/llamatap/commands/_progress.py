"""Progress bars on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["progress_bar"]


class _Silent:
    """A bar that shows nothing."""

    def update(self, n: float) -> None:
        """Advance it."""

    def set_postfix(self, figures: dict[str, Any]) -> None:
        """Show figures beside it."""


@contextlib.contextmanager
def progress_bar(total: float, unit: str, *, quiet: bool, **options: Any) -> Iterator[Any]:
    """A bar with ``update`` and ``set_postfix``; a silent one if ``quiet``, or without tqdm.

    :param options: those of tqdm. Without a terminal nothing is shown.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        quiet = True
    if quiet:
        yield _Silent()
        return
    with tqdm(total=total, unit=unit, disable=None, smoothing=0.05, **options) as bar:
        yield bar
