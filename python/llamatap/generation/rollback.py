"""Rolling back rejected draft tokens, by the kind of the target's memory."""

from __future__ import annotations

from collections.abc import Sequence

from llamatap._engine_context import engine_of
from llamatap.context import Batch, Context
from llamatap.generation.request import Request

__all__ = ["Rollback", "rollback_for"]


class Rollback:
    """Rollback in a memory that can remove any suffix of a sequence at any time.

    :ivar most_rows: maximum number of rows that the engine computes in one ubatch.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = engine_of(context)
        self.most_rows = min(context.n_ubatch, context.n_batch, context.n_outputs_max or context.n_ubatch)

    def cap_draft(self, n: int) -> int:
        """Cut a draft length to what can be rolled back."""
        return n

    def passes(self, requests: list[Request]) -> list[list[Request]]:
        """Split the requests of a round into passes that can be rolled back."""
        return [requests]

    def prepare(self, requests: Sequence[Request]) -> None:
        """Prepare the rollback of these requests, before their pass."""

    def rollback(self, request: Request, n_accepted: int) -> None:
        """Roll back the rejected tokens of the draft: from `request.position` on, after ``n_accepted``
        accepted ones."""
        self._engine.native.memory_remove(request.seq, request.position, -1)


class SlidingWindowRollback(Rollback):
    """Rollback with sliding windows in a unified KV cache. A ubatch may overwrite any sequence's tokens that
    are out of reach of the window, so drafts must be verified before the next ubatch: a pass with drafts is
    one ubatch."""

    def cap_draft(self, n: int) -> int:
        return min(n, self.most_rows - 1)

    def passes(self, requests: list[Request]) -> list[list[Request]]:
        passes: list[list[Request]] = []
        n_rows = 0
        for request in sorted(requests, key=lambda request: request.in_prefill):
            last = passes[-1] if passes else None
            if (
                last is None
                or request.in_prefill != last[0].in_prefill
                or n_rows + request.n_entries > self.most_rows
            ):
                passes.append([])
                n_rows = 0
            passes[-1].append(request)
            n_rows += request.n_entries
        return passes


class RecurrentRollback(Rollback):
    """Rollback with recurrent layers, which can roll back up to ``n_rs_seq`` tokens of the last ubatch, once.
    The engine splits sequences of different length, or many of them, into several ubatches."""

    def cap_draft(self, n: int) -> int:
        return min(n, self._context.n_rs_seq, self.most_rows - 1)

    def passes(self, requests: list[Request]) -> list[list[Request]]:
        lengths = {len(request.draft.tokens) for request in requests}
        n_rows = (1 + max(lengths, default=0)) * len(requests)
        if lengths == {0} or (len(lengths) == 1 and n_rows <= self.most_rows):
            return [requests]
        return [[request] for request in requests]


class SnapshotRollback(Rollback):
    """Rollback in memories that cannot remove a suffix: save a sequence before its draft; then restore it and
    decode the accepted tokens again."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._snapshots: dict[int, bytes] = {}

    def prepare(self, requests: Sequence[Request]) -> None:
        self._snapshots.clear()
        for request in requests:
            if len(request.draft.tokens):
                self._snapshots[request.seq] = self._engine.native.save(request.seq)

    def rollback(self, request: Request, n_accepted: int) -> None:
        native, seq = self._engine.native, request.seq
        native.restore(seq, self._snapshots.pop(seq))
        batch = Batch()
        first = request.position - n_accepted - 1
        for i, token in enumerate(request.tokens[-n_accepted - 2 : -1]):
            batch.add(token, first + i, seq)
        # Not through a tap: the states of these rows were captured before.
        native.decode(batch)


def rollback_for(context: Context) -> Rollback:
    """The kind of rollback that the context's memory allows."""
    model = engine_of(context).model
    if model.is_recurrent or model.is_hybrid:
        return RecurrentRollback(context) if context.n_rs_seq > 0 else SnapshotRollback(context)
    if model.n_swa > 0 and not context.swa_full:
        return SnapshotRollback(context)
    return SlidingWindowRollback(context) if model.n_swa > 0 and context.kv_unified else Rollback(context)
