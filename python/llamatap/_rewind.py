"""What a target's memory can give up of a sequence, where a part of a draft falls."""

from __future__ import annotations

from collections.abc import Sequence

from llamatap._sequence import Prompt
from llamatap.context import Batch, Context

__all__ = ["Rewind", "rewind_of"]


class Rewind:
    """A memory that gives up the end of a sequence, of any length, at any time."""

    def __init__(self, context: Context) -> None:
        self.context = context
        #: The most rows that the engine computes in one go.
        self.most_rows = min(context.n_ubatch, context.n_outputs_max or context.n_ubatch)

    def longest(self, n: int) -> int:
        """How long drafts may be that shall have ``n`` tokens."""
        return n

    def parts(self, sequences: list[Prompt]) -> list[list[Prompt]]:
        """The sequences of each pass of a round."""
        return [sequences]

    def before(self, sequences: Sequence[Prompt]) -> None:
        """Called before a pass of these sequences."""

    def back(self, sequence: Prompt, n_accepted: int) -> None:
        """Give up what comes from `sequence.position` on, after ``n_accepted`` tokens of the draft."""
        self.context.native.memory_remove(sequence.seq, sequence.position, -1)


class _Windows(Rewind):
    """Sliding windows in one memory for all. A ubatch may take the places of tokens that no window reaches
    any more, of any sequence: what stands of a draft must be known before the next ubatch."""

    def parts(self, sequences: list[Prompt]) -> list[list[Prompt]]:
        parts: list[list[Prompt]] = []
        n_rows = 0
        for one in sorted(sequences, key=lambda one: one.feeding):
            last = parts[-1] if parts else None
            if last is None or one.feeding != last[0].feeding or n_rows + one.n_rows > self.most_rows:
                parts.append([])
                n_rows = 0
            parts[-1].append(one)
            n_rows += one.n_rows
        return parts


class _LastUbatch(Rewind):
    """Recurrent layers that take back a few tokens of the last ubatch, once (``n_rs_seq``). The engine cuts
    sequences of different length, or many of them, into several ubatches."""

    def longest(self, n: int) -> int:
        return min(n, self.context.n_rs_seq, self.most_rows - 1)

    def parts(self, sequences: list[Prompt]) -> list[list[Prompt]]:
        lengths = {len(one.draft.tokens) for one in sequences}
        n_rows = (1 + max(lengths, default=0)) * len(sequences)
        if lengths == {0} or (len(lengths) == 1 and n_rows <= self.most_rows):
            return [sequences]
        return [[one] for one in sequences]


class _Saved(Rewind):
    """Memories that give up nothing: a sequence is saved before its draft, and restored and decoded again."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._saved: dict[int, bytes] = {}

    def before(self, sequences: Sequence[Prompt]) -> None:
        self._saved.clear()
        for one in sequences:
            if len(one.draft.tokens):
                self._saved[one.seq] = self.context.native.save(one.seq)

    def back(self, sequence: Prompt, n_accepted: int) -> None:
        native, seq = self.context.native, sequence.seq
        native.restore(seq, self._saved.pop(seq))
        batch = Batch()
        first = sequence.position - n_accepted - 1
        for i, token in enumerate(sequence.tokens[-n_accepted - 2 : -1]):
            batch.add(token, first + i, seq)
        # Not through a tap: these rows were seen.
        native.decode(batch)


def rewind_of(context: Context) -> Rewind:
    """What the context's memory can do."""
    model = context._loaded
    if model.is_recurrent or model.is_hybrid:
        return _LastUbatch(context) if context.n_rs_seq > 0 else _Saved(context)
    if model.n_swa > 0 and not context.swa_full:
        return _Saved(context)
    return _Windows(context) if model.n_swa > 0 and context.kv_unified else Rewind(context)
