"""Several drafters that are asked in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llamatap._validate import instance
from llamatap.context import Batch
from llamatap.drafting.draft_length import MaxTokens, request_limit
from llamatap.drafting.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    check_drafter,
    check_requests,
    checked_drafts,
    reset_all,
)
from llamatap.errors import InvalidInputError
from llamatap.states import States

__all__ = ["DrafterChain", "members"]


class DrafterChain(Drafter):
    """Asks drafters in turn: a sequence for which the first has no draft gets the second's, and so on.
    Each is asked for at most its own ``n_max`` tokens.

    :param drafters: e.g. an :class:`NGramDrafter`, which costs nothing, before one with a model. For
        ``generate(..., rejection=True)`` all of them must sample their tokens.
    :raises InvalidInputError: none is given, or one is not a drafter.
    :raises TypeError: the ``process`` of one does not take the target's states.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise InvalidInputError("a chain needs at least one drafter")
        for drafter in drafters:
            instance("a drafter", drafter, Drafter)
            check_drafter(drafter)
        self.drafters = drafters
        self.target_layers = tuple(dict.fromkeys(layer for one in drafters for layer in one.target_layers))
        self.draws = all(one.draws for one in drafters)

    @property
    def n_max(self) -> MaxTokens | None:  # type: ignore[override]  # the longest of them
        """The largest ``n_max`` of the drafters; "auto" if one is "auto", else None if one is None."""
        lengths = [one.n_max for one in self.drafters]
        if "auto" in lengths:
            return "auto"
        return None if None in lengths else max(map(request_limit, lengths))

    def process(self, batch: Batch, states: States | None = None) -> None:
        for drafter in self.drafters:
            layers = drafter.target_layers
            drafter.process(batch, None if states is None or not layers else states.select(layers))

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        check_requests(requests)
        drafts: dict[int, Draft] = {}
        for drafter in self.drafters:
            left = {seq: request for seq, request in requests.items() if seq not in drafts}
            drafts |= checked_drafts(drafter, left)
        return drafts

    def accept(self, seq: int, n: int) -> None:
        for drafter in self.drafters:
            drafter.accept(seq, n)

    def reset(self, seq: int) -> None:
        reset_all(self.drafters, [seq])


def members(drafter: Drafter) -> Iterator[Drafter]:
    """The drafters in a chain and in nested chains; for any other drafter, only itself."""
    if isinstance(drafter, DrafterChain):
        for one in drafter.drafters:
            yield from members(one)
    else:
        yield drafter
