"""Progress bars on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["StageBars", "progress_bar"]


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


class StageBars:
    """A progress bar for each stage of some work, one after the other.

    It is called with the stage's name, how far it is, how far it goes (1: a share) and figures to show.
    What was done when a stage begins does not count for its speed.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._stage: str | None = None
        self._done = 0.0
        self._bar: Any = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> StageBars:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __call__(
        self, stage: str, done: float, total: float, figures: Mapping[str, Any] | None = None
    ) -> None:
        if stage != self._stage:
            self._open.close()
            shape: dict[str, Any] = {"unit_scale": True}
            if total == 1:
                shape = {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"}
            bar = progress_bar(total, " tokens", quiet=self._quiet, desc=stage or None, initial=done, **shape)
            self._stage, self._done, self._bar = stage, done, self._open.enter_context(bar)
        self._bar.update(done - self._done)
        self._done = done
        if figures:
            self._bar.set_postfix({k: f"{v:.2f}" if isinstance(v, float) else v for k, v in figures.items()})
