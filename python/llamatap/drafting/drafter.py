"""Drafters guess the next tokens of sequences for a target to verify. The ones here need no model."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap._native import NativeOwner, _core, flush_log, native_of
from llamatap._validate import instance, integer, shown
from llamatap.context import Batch
from llamatap.drafting.draft_length import DraftLength
from llamatap.errors import ClosedError, InvalidInputError
from llamatap.layers import LayerId
from llamatap.tokenizer import token_array

if TYPE_CHECKING:
    from llamatap.drafting.speculative_context import SpeculativeContext

__all__ = [
    "AnyDrafter",
    "CallableDrafter",
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterChain",
    "NGramDrafter",
    "TextDrafter",
]

#: The longest draft that ``n_max="auto"`` considers.
AUTO_LONGEST = 8


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for a draft of one sequence.

    :ivar last_token: the newest token, which the target has not decoded yet.
    :ivar position: its position; the draft is for those after it.
    :ivar n_max: the most tokens that can be used.
    :ivar seed: the sequence's own seed, for drafters that draw their tokens.
    """

    last_token: int
    position: int
    n_max: int
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens to verify.

    :ivar tokens: int32 ``(n,)``; may be empty.
    :ivar probs: float32 ``(n,)``: the drafter's probability of each; None where it has none.
    :ivar distributions: float32 ``(n, n_vocab)``: what each token was drawn from, for rejection sampling;
        None when tokens were not drawn.
    """

    tokens: NDArray[np.int32]
    probs: NDArray[np.float32] | None = None
    distributions: NDArray[np.float32] | None = None


class Drafter(ABC):
    """Guesses the next tokens of sequences. Subclass it to draft by a way of your own; :meth:`draft` is all
    that a subclass must have. One that needs the text alone is shorter as a :class:`TextDrafter`.

    :func:`llamatap.generate` and sessions call these methods, :meth:`draft` and :meth:`process` once for all
    in-flight requests:

    1. :meth:`reset`, for a sequence before its first batch.
    2. :meth:`process`, once after each decode of the target that brings new entries: of a prompt, all or a
       piece; of a text, its newest token and the draft. Not after decodes that only repeat accepted entries
       (rollback in memories that cannot remove a suffix), nor after the decode of a text's final token for
       its states.
    3. :meth:`accept`, after such a batch, for each sequence that had its newest token in it, also when there
       was no draft. Not for prompts, whose tokens all stay.
    4. :meth:`draft`, for the sequences that go on and have room for a draft.
    5. :meth:`reset`, for a sequence that has ended, in whatever way. Its id then serves another text.
    """

    #: The target's states that it needs of every token: each pass is tapped for them, and
    #: ``context.tapped`` has them when :meth:`process` is called.
    target_layers: tuple[LayerId, ...] = ()
    #: The most tokens that are asked for; None for all that there is room for. "auto" measures which length
    #: (of 0 to 8) gives the most tokens per second.
    n_max: int | Literal["auto"] | None = None
    #: Whether its tokens may be drawn, and drafts come with the distributions that they were drawn from
    #: (:attr:`Draft.distributions`). False lets ``generate(..., rejection=True)`` refuse it at once.
    draws: bool = True
    #: The draft context that it drafts with.
    _spec: SpeculativeContext | None = None

    def process(self, batch: Batch) -> None:  # noqa: B027  a drafter may need none of it
        """Follow a batch that the target has decoded. Drafted tokens in it may still be rejected.

        :raises InvalidInputError: the drafter needs states that no open tap gives, or a batch is missing.
        """

    @abstractmethod
    def draft(self, requests: Mapping[int, DraftRequest]) -> Mapping[int, Draft]:
        """Drafts by sequence id. A sequence that is left out has none.

        :raises InvalidInputError: a request does not follow what was processed.
        """

    def accept(self, seq: int, n: int) -> None:  # noqa: B027
        """Keep ``n`` drafted tokens of the sequence's last batch, and the token before the draft; discard the
        rest.

        :raises InvalidInputError: the batch had fewer.
        """

    def reset(self, seq: int) -> None:  # noqa: B027
        """Forget a sequence, known or not."""


_Function: TypeAlias = Callable[[NDArray[np.int32]], Any]
#: The ``drafter`` argument of :func:`llamatap.generate`. Several are asked in turn; a function takes token
#: ids and returns those that may follow.
AnyDrafter: TypeAlias = Drafter | _Function | Sequence[Drafter | _Function] | None


def longest_draft(n_max: object) -> int:
    """The option ``n_max`` as a number: the longest draft."""
    if isinstance(n_max, str) and n_max == "auto":
        return AUTO_LONGEST
    if isinstance(n_max, str):
        raise InvalidInputError(f'n_max must be an integer or "auto", not {shown(n_max)}')
    return integer("n_max", n_max, 1, 1024)


def check_shortest(n_min: object, n_max: int, why: str = "") -> int:
    """An option ``n_min``, beside the most tokens that a draft can have."""
    found = integer("n_min", n_min, 0)
    if found > n_max:
        raise InvalidInputError(
            f"n_min must be at most n_max, {n_max}{why}, not {found}: all drafts would be given up"
        )
    return found


def most_tokens(drafter: Drafter) -> int:
    """The most tokens that are asked of a drafter: its ``n_max``, or 2**31 - 1 where that is None or "auto".

    :raises InvalidInputError: its n_max is no number.
    """
    if drafter.n_max is None or drafter.n_max == "auto":
        return 2**31 - 1
    return integer("the drafter's n_max", drafter.n_max, 0)


def check_requests(requests: object) -> None:
    """Check that the requests are a dict of DraftRequest by sequence id.

    :raises InvalidInputError: they are not.
    """
    if isinstance(requests, Mapping) and all(isinstance(one, DraftRequest) for one in requests.values()):
        return
    raise InvalidInputError(f"requests must be a dict of DraftRequest by sequence id, not {shown(requests)}")


def checked_drafts(drafter: Drafter, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
    """The drafts of a drafter for these requests, checked: of the right types, cut to the request's and the
    drafter's ``n_max``, none of them empty.

    :raises InvalidInputError: the drafter returned something else.
    """
    n_max = most_tokens(drafter)
    asked = {seq: replace(one, n_max=min(one.n_max, n_max)) for seq, one in requests.items()}
    asked = {seq: one for seq, one in asked.items() if one.n_max > 0}
    if not asked:
        return {}
    found = drafter.draft(asked)
    if not isinstance(found, Mapping):
        raise InvalidInputError(
            f"a drafter gives a dict of drafts by sequence id, not {type(found).__name__}"
        )
    drafts: dict[int, Draft] = {}
    for seq, request in asked.items():
        draft = found.get(seq)
        if draft is None:
            continue
        if not isinstance(draft, Draft):
            raise InvalidInputError(f"a drafter gives llamatap.Draft objects, not {type(draft).__name__}")
        tokens = token_array(draft.tokens)
        # Cut only where the draft is too long: otherwise arrays of a wrong length must be found.
        cut = slice(request.n_max if len(tokens) > request.n_max else None)
        if len(tokens) > 0:
            probs = _floats("probs", draft.probs, cut)
            if probs is not None and probs.shape != tokens[cut].shape:
                raise InvalidInputError(
                    f"a draft has a prob for each of its {len(tokens)} tokens; found the shape {probs.shape}"
                )
            drafts[seq] = Draft(tokens[cut], probs, _floats("distributions", draft.distributions, cut))
    return drafts


def _floats(name: str, values: object, rows: slice) -> NDArray[np.float32] | None:
    if values is None:
        return None
    try:
        return np.ascontiguousarray(values, np.float32)[rows]
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a draft's {name} must be a float32 array: {error}") from None


class NativeDrafter(Drafter, NativeOwner[_core.Drafter]):
    """Base of drafters that are implemented in the core (C++)."""

    def __init__(self, core: _core.Drafter, n_max: int | Literal["auto"]) -> None:
        self._core: _core.Drafter | None = core
        self._n_max = n_max

    @property
    def n_max(self) -> int | Literal["auto"]:  # type: ignore[override]  # fixed when it is made
        """The most tokens of a draft, or "auto"."""
        return self._n_max

    def _get_native(self) -> _core.Drafter:
        if self._core is None:
            raise ClosedError("the draft context of this drafter was closed; make both anew")
        return self._core

    def drop(self) -> None:
        """Let go of the core's object, as its draft context is closed. Private to the package."""
        self._core = None

    def process(self, batch: Batch) -> None:
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
        # After the context was closed there is nothing left to forget.
        if self._core is not None:
            self._core.reset(seq)


class NGramDrafter(NativeDrafter):
    """Drafts what followed the last occurrence of the newest n-gram in the sequence. Needs no model: good
    for texts that repeat themselves or their prompt (code that is edited, summaries, translations).

    :param n_longest: the longest n-gram that is looked for; the longest one found decides.
    :param n_shortest: the shortest.
    :param n_max: the most tokens of a draft, or "auto".
    :param n_min: shorter drafts are given up.
    :raises InvalidInputError: a number is out of range.
    """

    draws = False

    def __init__(
        self,
        n_longest: int = 4,
        n_shortest: int = 2,
        *,
        n_max: int | Literal["auto"] = 8,
        n_min: int = 1,
    ) -> None:
        most = longest_draft(n_max)
        core = _core.ngram_drafter(
            n_longest=integer("n_longest", n_longest, 1, 64),
            n_shortest=integer("n_shortest", n_shortest, 1, 64),
            n_max=most,
            n_min=check_shortest(n_min, most),
        )
        super().__init__(core, n_max)


class DrafterChain(Drafter):
    """Asks drafters in turn: a sequence for which the first has no draft gets the second's, and so on.
    Each is asked for its own ``n_max`` tokens at most.

    :param drafters: e.g. an :class:`NGramDrafter`, which costs nothing, before one with a model. For
        ``generate(..., rejection=True)`` all of them must draw their tokens.
    :raises InvalidInputError: none is given, or one is no drafter.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise InvalidInputError("a chain needs at least one drafter")
        for drafter in drafters:
            instance("a drafter", drafter, Drafter)
            most_tokens(drafter)
        self.drafters = drafters
        self.target_layers = tuple(dict.fromkeys(layer for one in drafters for layer in one.target_layers))
        self.draws = all(one.draws for one in drafters)

    @property
    def n_max(self) -> int | Literal["auto"] | None:  # type: ignore[override]  # the longest of them
        """The largest ``n_max`` of the drafters; "auto" if one is "auto", else None if one is None."""
        lengths = [one.n_max for one in self.drafters]
        if "auto" in lengths:
            return "auto"
        return None if None in lengths else max(map(most_tokens, self.drafters))

    def process(self, batch: Batch) -> None:
        for drafter in self.drafters:
            drafter.process(batch)

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


class _Text:
    """The tokens of a sequence, in an array with room to grow."""

    def __init__(self) -> None:
        self.n = 0
        self.start = 0  # of the last batch
        self._room = np.zeros(256, np.int32)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Write tokens from ``start`` on; the text ends after them."""
        end = start + len(tokens)
        if end > len(self._room):
            self._room = np.concatenate([self._room[:start], np.zeros(2 * end - start, np.int32)])
        self._room[start:end] = tokens
        self.start, self.n = start, end

    def then(self, token: int) -> NDArray[np.int32]:
        """A copy, with one more token."""
        return np.append(self._room[: self.n], np.int32(token))


class TextDrafter(Drafter):
    """Drafts from the text of a sequence alone: a subclass has a :meth:`guess`, and calls this class's
    ``__init__`` if it has one of its own. The texts are kept here; what was not accepted is not in them.
    """

    draws = False

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    @abstractmethod
    def guess(self, tokens: NDArray[np.int32], n_max: int) -> ArrayLike | None:
        """The token ids that may follow a text; none or None for no draft.

        :param tokens: int32 ``(n,)``: all of it, prompt and newest token included; yours to keep or change.
        :param n_max: how many can be used; what is beyond is cut off.
        """

    def process(self, batch: Batch) -> None:
        instance("batch", batch, Batch)
        if batch.n_embd > 0:
            raise InvalidInputError("the drafter needs token ids; this batch holds embeddings")
        entries: dict[int, list[tuple[int, int]]] = {}
        for position, token, seqs in zip(
            batch.positions.tolist(), batch.tokens.tolist(), batch.sequences, strict=True
        ):
            for seq in seqs:
                entries.setdefault(seq, []).append((position, token))
        for seq, found in entries.items():
            found.sort()
            known = self._texts.get(seq)
            expected = min(found[0][0], 0 if known is None else known.n)
            for position, _ in found:
                if position != expected:
                    raise InvalidInputError(
                        f"sequence {seq} goes on at position {expected}, not {position}; a drafter must "
                        "process every batch"
                    )
                expected += 1
        for seq, found in entries.items():
            text = self._texts.setdefault(seq, _Text())
            text.write(found[0][0], [token for _, token in found])

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        check_requests(requests)
        drafts = {}
        n_own = most_tokens(self)
        for seq, request in requests.items():
            text = self._texts.get(seq) or _Text()
            if request.position != text.n:
                raise InvalidInputError(
                    f"sequence {seq}: the last token must be at position {text.n}, not {request.position}"
                )
            n_max = max(min(n_own, request.n_max), 0)
            found = self.guess(text.then(request.last_token), n_max)
            try:
                tokens = token_array([] if found is None else found)
            except InvalidInputError as error:
                raise InvalidInputError(f"what {type(self).__name__} guessed is no draft: {error}") from None
            drafts[seq] = Draft(tokens[:n_max])
        return drafts

    def accept(self, seq: int, n: int) -> None:
        text = self._texts.get(seq) or _Text()
        n_entries = text.n - text.start
        if not 0 <= integer("n", n) < n_entries:
            raise InvalidInputError(
                f"sequence {seq} had {n_entries} entries in the last batch; the first and {n} more cannot "
                "stand"
            )
        text.n = text.start + n + 1

    def reset(self, seq: int) -> None:
        self._texts.pop(seq, None)


class CallableDrafter(TextDrafter):
    """Drafts with a function of the whole text, such as llama-cpp-python's ``LlamaDraftModel`` objects.

    :param function: called with the token ids so far, int32 ``(n,)``; returns those that may follow, or None.
    :param n_max: the most tokens of a draft, or "auto".
    :raises InvalidInputError: no function, or ``n_max`` is out of range.
    """

    def __init__(
        self, function: Callable[[NDArray[np.int32]], Any], *, n_max: int | Literal["auto"] = 10
    ) -> None:
        super().__init__()
        if not callable(function):
            raise InvalidInputError(f"function must be callable, not {type(function).__name__}")
        longest_draft(n_max)
        self.n_max = n_max
        self._function = function

    def guess(self, tokens: NDArray[np.int32], n_max: int) -> Any:
        return self._function(tokens)


def as_drafter(drafter: object) -> Drafter | None:
    """`drafter` as a Drafter: a plain callable of token ids is wrapped.

    :raises InvalidInputError: it is neither, nor None.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, Sequence) and not isinstance(drafter, (str, bytes)):
        return DrafterChain(*[one for one in map(as_drafter, drafter) if one is not None])
    if isinstance(drafter, type) or not callable(drafter):
        raise InvalidInputError(
            f"drafter must be a Drafter, a list of them, or a function of token ids, not {shown(drafter)}; "
            "load_drafter(context, ...) makes one of a file, with the context that generate() is given"
        )
    return CallableDrafter(drafter)


def reset_all(drafters: Iterable[Drafter], seqs: Iterable[int]) -> None:
    """Reset all sequences in all drafters. An exception is raised after all of them were called."""
    with contextlib.ExitStack() as all_of_them:
        for seq in seqs:
            for drafter in drafters:
                all_of_them.callback(drafter.reset, seq)


def leaves(drafter: Drafter) -> Iterator[Drafter]:
    """The drafter itself, or those in a chain."""
    if isinstance(drafter, DrafterChain):
        for one in drafter.drafters:
            yield from leaves(one)
    else:
        yield drafter


def specs_of(drafter: Drafter) -> list[SpeculativeContext]:
    """The draft contexts of a drafter, or of those in a chain."""
    return [one._spec for one in leaves(drafter) if one._spec is not None]


def new_length(drafter: Drafter) -> DraftLength | None:
    """The controller of the draft length for ``n_max="auto"``; None for other drafters."""
    return DraftLength(AUTO_LONGEST) if drafter.n_max == "auto" else None
