"""Base of objects that a ``with`` block closes: models, contexts, draft contexts, extractors, sessions."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

from llamatap._validate import NotCopied

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closeable"]


class Closeable(NotCopied):
    """Owner of objects of the core until :meth:`close`, or the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release them. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
