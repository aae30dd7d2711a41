"""Base of the drafters that are implemented in the core."""

from __future__ import annotations

from collections.abc import Mapping

from llamatap._native import NativeOwner, _core, flush_log, native_of
from llamatap._validate import instance, integer
from llamatap.context import Batch
from llamatap.drafting.draft_length import MaxTokens
from llamatap.drafting.drafter import Draft, Drafter, DraftRequest, check_requests
from llamatap.errors import ClosedError
from llamatap.states import States

__all__ = ["NativeDrafter"]


class NativeDrafter(Drafter, NativeOwner[_core.Drafter]):
    """Base of drafters that are implemented in the core (C++)."""

    def __init__(self, core: _core.Drafter, n_max: MaxTokens) -> None:
        self._core: _core.Drafter | None = core
        self._n_max = n_max

    @property
    def n_max(self) -> MaxTokens:  # type: ignore[override]  # fixed when it is made
        """Maximum number of tokens in a draft, or "auto"."""
        return self._n_max

    def _get_native(self) -> _core.Drafter:
        if self._core is None:
            raise ClosedError("the draft context of this drafter was closed; create both again")
        return self._core

    def _release(self) -> None:
        """Release the core's object, which holds a part of its draft context."""
        self._core = None

    def process(self, batch: Batch, states: States | None = None) -> None:
        instance("batch", batch, Batch)
        native_of(self).process(batch)

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        core = native_of(self)
        check_requests(requests)
        asked = [
            (
                integer("a sequence id", seq),
                integer("last_token", request.last_token),
                integer("position", request.position),
                integer("n_max", request.n_max),
                integer("seed", request.seed, 0, 2**32 - 1),
            )
            for seq, request in requests.items()
        ]
        try:
            drafts = core.draft(asked)
        finally:
            flush_log()
        return {
            seq: Draft(*found) for (seq, *_), found in zip(asked, drafts, strict=True) if found[0].size > 0
        }

    def accept(self, seq: int, n: int) -> None:
        native_of(self).accept(integer("a sequence id", seq), integer("n", n))

    def reset(self, seq: int) -> None:
        seq = integer("a sequence id", seq)
        # Once the context is closed there is nothing left to forget.
        if self._core is not None:
            self._core.reset(seq)
