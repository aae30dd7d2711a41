"""Rolling back rejected draft tokens, by what the target's memory can remove."""

from __future__ import annotations

from collections.abc import Sequence

from llamatap._engine_context import engine_of
from llamatap._native import native_of
from llamatap.context import Batch, Context
from llamatap.generation.request import Request

__all__ = ["Rollback", "rollback_of"]


class Rollback:
    """Rollback in a memory that can remove any suffix of a sequence at any time."""

    def __init__(self, context: Context) -> None:
        self.context = context
        #: The most rows that the engine computes in one go.
        self.most_rows = min(context.n_ubatch, context.n_batch, context.n_outputs_max or context.n_ubatch)

    def longest(self, n: int) -> int:
        """The most tokens of a draft that can be rolled back, ``n`` or fewer."""
        return n

    def parts(self, sequences: list[Request]) -> list[list[Request]]:
        """The sequences of each pass of a round."""
        return [sequences]

    def before(self, sequences: Sequence[Request]) -> None:
        """Prepare rollback of these sequences, before their pass."""

    def back(self, sequence: Request, n_accepted: int) -> None:
        """Roll back the rejected tokens of the draft: those from `sequence.position` on, after ``n_accepted``
        accepted ones."""
        native_of(self.context).memory_remove(sequence.seq, sequence.position, -1)


class _Windows(Rollback):
    """Rollback with sliding windows in a unified KV cache. A ubatch may overwrite tokens of any sequence that
    no window reaches any more, so drafts must be verified before the next ubatch: a pass with drafts is one
    ubatch."""

    def longest(self, n: int) -> int:
        return min(n, self.most_rows - 1)

    def parts(self, sequences: list[Request]) -> list[list[Request]]:
        parts: list[list[Request]] = []
        n_rows = 0
        for one in sorted(sequences, key=lambda one: one.feeding):
            last = parts[-1] if parts else None
            if last is None or one.feeding != last[0].feeding or n_rows + one.n_rows > self.most_rows:
                parts.append([])
                n_rows = 0
            parts[-1].append(one)
            n_rows += one.n_rows
        return parts


class _LastUbatch(Rollback):
    """Rollback with recurrent layers, which can take back up to ``n_rs_seq`` tokens of the last ubatch, once.
    The engine splits sequences of different length, or many of them, into several ubatches."""

    def longest(self, n: int) -> int:
        return min(n, self.context.n_rs_seq, self.most_rows - 1)

    def parts(self, sequences: list[Request]) -> list[list[Request]]:
        lengths = {len(one.draft.tokens) for one in sequences}
        n_rows = (1 + max(lengths, default=0)) * len(sequences)
        if lengths == {0} or (len(lengths) == 1 and n_rows <= self.most_rows):
            return [sequences]
        return [[one] for one in sequences]


class _Saved(Rollback):
    """Rollback in memories that can remove nothing: save a sequence before its draft; then restore it and
    decode the accepted tokens again."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._saved: dict[int, bytes] = {}

    def before(self, sequences: Sequence[Request]) -> None:
        self._saved.clear()
        for one in sequences:
            if len(one.draft.tokens):
                self._saved[one.seq] = native_of(self.context).save(one.seq)

    def back(self, sequence: Request, n_accepted: int) -> None:
        native, seq = native_of(self.context), sequence.seq
        native.restore(seq, self._saved.pop(seq))
        batch = Batch()
        first = sequence.position - n_accepted - 1
        for i, token in enumerate(sequence.tokens[-n_accepted - 2 : -1]):
            batch.add(token, first + i, seq)
        # Not through a tap: the states of these rows were captured before.
        native.decode(batch)


def rollback_of(context: Context) -> Rollback:
    """The kind of rollback that the context's memory allows."""
    model = engine_of(context).model
    if model.is_recurrent or model.is_hybrid:
        return _LastUbatch(context) if context.n_rs_seq > 0 else _Saved(context)
    if model.n_swa > 0 and not context.swa_full:
        return _Saved(context)
    return _Windows(context) if model.n_swa > 0 and context.kv_unified else Rollback(context)
