"""The drafter of co-training: drafts with a file that is replaced meanwhile, and collects the texts."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llamatap.context import Batch, Context
from llamatap.drafting.drafter import Draft, Drafter, DraftRequest, check_requests
from llamatap.drafting.model_drafters import DraftOptions, SpeculativeDrafter, load_drafter
from llamatap.drafting.speculative_context import SpeculativeContext
from llamatap.errors import ClosedError, Error, InvalidInputError
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.states import States, take_rows
from llamatap.train.cotrain.options import CoTrainOptions
from llamatap.train.cotrain.text_recorder import TextRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CoTrainedDrafter", "Told"]


class Told(Protocol):
    """What a drafter tells of its work; called by the thread that generates, and must not wait."""

    options: CoTrainOptions

    @abstractmethod
    def recorder(self) -> TextRecorder | None:
        """A recorder for a text that begins; None for a text that is not collected."""

    @abstractmethod
    def collect(self, recorder: TextRecorder) -> None:
        """A text ended."""

    @abstractmethod
    def round(self, draft: int, n_before: int, accepted: int) -> None:
        """A round that a draft was asked for, how many its text had before, and the tokens accepted in it."""

    @abstractmethod
    def taken(self, draft: int) -> None:
        """A draft is used for new requests from now on."""

    @abstractmethod
    def not_taken(self, draft: int, error: Exception) -> None:
        """A draft cannot be used."""


@dataclass(eq=False)
class _InUse:
    """A draft with its context, and the sequences that it drafts for."""

    number: int
    model: Model
    drafter: SpeculativeDrafter
    seqs: set[int] = field(default_factory=set)

    def close(self) -> None:
        self.drafter.spec.close()
        self.model.close()


class CoTrainedDrafter(Drafter):
    """Drafter of a :class:`~llamatap.train.CoTrainer`, for one context: made by its ``drafter``.

    A new draft comes between two rounds and drafts for the requests that are admitted from then on. Those in
    flight stay with the draft that they began with; should a third one come, they go on without drafts, so
    that there are never more than two draft contexts.

    :ivar target_layers: those of the draft, and H_n, which is its target in training.
    """

    def __init__(
        self, context: Context, number: int, model: Model, told: Told, **options: Unpack[DraftOptions]
    ) -> None:
        self._context = context
        self._told = told
        self._options = options
        self._current = self._made(number, model)
        self._former: _InUse | None = None
        drafter = self._current.drafter
        if drafter.kind not in ("eagle3", "mtp"):
            self._current.close()
            raise InvalidInputError(
                f"{model.path.name} is of kind {drafter.kind}; co-training is for EAGLE-3 and MTP"
            )
        self.kind = drafter.kind
        self.draft_layers = drafter.target_layers
        n_layer = context.model.n_layer
        if "norm" in self.draft_layers:
            self._current.close()
            raise InvalidInputError(f"{model.path.name} reads norm(H_n), which co-training does not collect")
        own = [layer for layer in self.draft_layers if layer != n_layer]
        self.target_layers: tuple[LayerId, ...] = (*own, n_layer)
        self.draws = drafter.draws
        self._n_max = drafter.n_max
        # The sequences that a draft was asked for in this round, and how many such rounds they had before.
        self._asked: set[int] = set()
        self._n_rounds: Counter[int] = Counter()
        self._recorders: dict[int, TextRecorder | None] = {}
        # What another thread has loaded, to be taken between two rounds.
        self._offer: tuple[int, Model] | None = None
        self._taking = False
        self._offering = threading.Lock()
        self._closed = False

    def _made(self, number: int, model: Model) -> _InUse:
        return _InUse(number, model, load_drafter(self._context, model, **self._options))

    @property
    def n_max(self) -> int | str:  # type: ignore[override]  # fixed when it is made
        """Maximum number of tokens in a draft, or "auto"."""
        return self._n_max

    @property
    def number(self) -> int:
        """Number of the draft in use for new requests; 0 for the first one."""
        return self._current.number

    @property
    def spec(self) -> SpeculativeContext:
        """The draft context in use for new requests."""
        return self._current.drafter.spec

    def offer(self, number: int, model: Model) -> None:
        """Offer a loaded draft, to be taken between two rounds; it is closed when it is not needed any more.
        Can be called from any thread. A second offer replaces one that was not taken."""
        with self._offering:
            replaced, self._offer = self._offer, (number, model)
            if self._closed:
                replaced, self._offer = self._offer, None
        if replaced is not None:
            replaced[1].close()

    @property
    def has_offer(self) -> bool:
        """Whether an offered draft is still to be taken."""
        with self._offering:
            return self._offer is not None or self._taking

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Free the draft contexts; texts in flight are not collected. A second call does nothing."""
        with self._offering:
            self._closed = True
            offered, self._offer = self._offer, None
        if offered is not None:
            offered[1].close()
        for one in (self._current, self._former):
            if one is not None:
                one.close()

    # Called by the scheduler.

    def process(self, batch: Batch, states: States | None = None) -> None:
        if states is None:
            layers = ", ".join(map(repr, self.target_layers))
            raise InvalidInputError(f"the drafter needs states of the target, layers [{layers}]")
        rows: dict[int, list[int]] = {}
        for row, seqs in enumerate(batch.sequences):
            if len(seqs) != 1:
                raise InvalidInputError("co-training takes entries of one sequence each")
            rows.setdefault(seqs[0], []).append(row)
        for seq in rows.keys() - self._recorders.keys():
            self._current.seqs.add(seq)
            self._recorders[seq] = self._told.recorder()
        for one in self._in_use():
            own = [seq for seq in rows if seq in one.seqs]
            if len(own) == len(rows):
                one.drafter.process(batch, states)
            elif own:
                some = sorted(row for seq in own for row in rows[seq])
                one.drafter.process(_part(batch, some), take_rows(states, some))
        recorded = states.select(self.target_layers)
        recorders = [one for one in self._recorders.values() if one is not None]
        room = self._told.options.text_bytes - sum(one.n_bytes for one in recorders)
        for seq, found in rows.items():
            if (recorder := self._recorders[seq]) is not None:
                before = recorder.n_bytes
                recorder.add(recorded, found, room)
                room -= recorder.n_bytes - before

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        check_requests(requests)
        self._take()
        self._asked = set(requests)
        drafts: dict[int, Draft] = {}
        for one in self._in_use():
            own = {seq: request for seq, request in requests.items() if seq in one.seqs}
            if own:
                drafts |= one.drafter.draft(own)
        return drafts

    def accept(self, seq: int, n: int) -> None:
        for one in self._in_use():
            if seq in one.seqs:
                one.drafter.accept(seq, n)
                if seq in self._asked:
                    self._told.round(one.number, self._n_rounds[seq], n)
        self._n_rounds[seq] += seq in self._asked
        self._asked.discard(seq)
        if (recorder := self._recorders.get(seq)) is not None:
            recorder.accept(n)

    def reset(self, seq: int) -> None:
        self._asked.discard(seq)
        self._n_rounds.pop(seq, None)
        recorder = self._recorders.pop(seq, None)
        try:
            for one in self._in_use():
                if seq in one.seqs:
                    one.seqs.discard(seq)
                    one.drafter.reset(seq)
        finally:
            if recorder is not None and not self._closed:
                self._told.collect(recorder)
        if self._former is not None and not self._former.seqs:
            self._former.close()
            self._former = None
        self._take()

    # Replacing the draft.

    def _in_use(self) -> Sequence[_InUse]:
        return [self._current] if self._former is None else [self._current, self._former]

    def _take(self) -> None:
        """Take an offered draft. The one in use stays for its sequences."""
        if self._offer is None:
            return
        with self._offering:
            offered, self._offer = self._offer, None
            self._taking = offered is not None
        if offered is not None:
            try:
                self._replace(*offered)
            finally:
                self._taking = False

    def _replace(self, number: int, model: Model) -> None:
        former = self._former
        if former is not None and former.number == number:
            # Going back while it still drafts for earlier requests.
            self._current, self._former = former, self._current
            model.close()
        else:
            try:
                found = self._fitting(number, model)
            except (Error, OSError, MemoryError) as error:
                model.close()
                self._told.not_taken(number, error)
                return
            if former is not None:
                former.close()
            self._current, self._former = found, self._current
        if not self._former.seqs:
            self._former.close()
            self._former = None
        self._told.taken(number)

    def _fitting(self, number: int, model: Model) -> _InUse:
        """A draft of the same kind for the same layers.

        :raises InvalidInputError: it is another, or does not fit the target.
        """
        if self._context.closed:
            raise ClosedError("the context was closed")
        found = self._made(number, model)
        drafter = found.drafter
        if (drafter.kind, drafter.target_layers) != (self.kind, self.draft_layers):
            found.drafter.spec.close()
            raise InvalidInputError(
                f"expected a draft of kind {self.kind} on the layers {list(self.draft_layers)}, found "
                f"{drafter.kind} on {list(drafter.target_layers)}"
            )
        return found


def _part(batch: Batch, rows: Sequence[int]) -> Batch:
    found = Batch()
    tokens: NDArray[np.int32] = batch.tokens
    positions, sequences, outputs = batch.positions, batch.sequences, batch.outputs
    for row in rows:
        found.add(int(tokens[row]), int(positions[row]), sequences[row], outputs[row])
    return found
