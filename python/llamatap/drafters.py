"""Drafters: what guesses the next tokens of sequences for a target to verify."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamatap._check import NotCopied, instance, integer, number
from llamatap._native import _core, flush_log
from llamatap.context import Batch, Context
from llamatap.draft_length import DraftLength
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.model import Model, token_array
from llamatap.speculative import SpeculativeContext

__all__ = [
    "AnyDrafter",
    "CallableDrafter",
    "DFlashDrafter",
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterChain",
    "Eagle3Drafter",
    "ModelDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "load_drafter",
]

#: The longest draft that ``n_max="auto"`` considers.
AUTO_LONGEST = 8


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a sequence wants drafted.

    :ivar last_token: the newest token, which the target has not decoded yet.
    :ivar position: its position; the draft is for those after it.
    :ivar n_max: the most tokens that can be used.
    :ivar seed: for drafters that draw: what is the sequence's own.
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
    that a subclass must have.

    The loop around it: :meth:`reset` when a sequence begins; after every decode of the target,
    :meth:`process` with the same batch, then :meth:`accept` for each sequence that had more in it than its
    prompt; before the next decode, :meth:`draft` for all sequences that go on, at once; :meth:`reset` when
    one ends.
    """

    #: The target's states that it needs of every token: :func:`llamatap.generate` opens a tap for them, and
    #: ``context.tapped`` has them when :meth:`process` is called.
    target_layers: tuple[LayerId, ...] = ()
    #: The most tokens that are asked for, by default all that there is room for; "auto" lets
    #: :class:`llamatap.DraftLength` choose, 0 included.
    n_max: int | Literal["auto"] = 2**31 - 1
    #: Whether its drafts may have distributions (:attr:`Draft.distributions`). False lets
    #: ``generate(..., rejection=True)`` refuse it at once.
    draws: bool = True

    def process(self, batch: Batch) -> None:  # noqa: B027  a drafter may need none of it
        """Take note of a batch that the target has decoded: of prompts, or of a piece of one; of the newest
        token of a sequence, and its draft. Not of a last token whose state alone is wanted, nor of what is
        decoded once more after a draft that fell.

        :raises InvalidInputError: the drafter needs states that no open tap gives, or a batch is missing.
        """

    @abstractmethod
    def draft(self, requests: Mapping[int, DraftRequest]) -> Mapping[int, Draft]:
        """Drafts by sequence id. A sequence that is left out has none.

        :raises InvalidInputError: a request does not follow what was processed.
        """

    def accept(self, seq: int, n: int) -> None:  # noqa: B027
        """Of the sequence's entries in the last batch, the first and ``n`` more stand (the token before the
        draft, and the drafted ones that were accepted); the rest never was. Called after each batch that held
        a newest token of the sequence, with a draft or without; not after those of its prompt.

        :raises InvalidInputError: there were not so many.
        """

    def reset(self, seq: int) -> None:  # noqa: B027
        """Forget a sequence, known or not."""


_Function: TypeAlias = Callable[[NDArray[np.intc]], Any]
#: What :func:`llamatap.generate` takes for a drafter: several are asked in turn; a function is given token
#: ids and gives those that may follow.
AnyDrafter: TypeAlias = Drafter | _Function | Sequence[Drafter | _Function] | None


def _longest(n_max: object) -> int:
    if n_max == "auto":
        return AUTO_LONGEST
    return integer("n_max", n_max, 1, 1024)


class _Native(Drafter, NotCopied):
    """What the core drafts."""

    def __init__(self, core: _core.Drafter, n_max: int | Literal["auto"]) -> None:
        self._core = core
        self.n_max = n_max

    def process(self, batch: Batch) -> None:
        instance("batch", batch, Batch)
        self._core.process(batch)

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
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
            drafts = self._core.draft(asked)
        finally:
            flush_log()
        return {
            seq: Draft(*found) for (seq, *_), found in zip(asked, drafts, strict=True) if found[0].size > 0
        }

    def accept(self, seq: int, n: int) -> None:
        self._core.accept(integer("a sequence id", seq), integer("n", n))

    def reset(self, seq: int) -> None:
        self._core.reset(integer("a sequence id", seq))


class NGramDrafter(_Native):
    """Drafts what followed the last time that the same tokens came by in the sequence. Needs no model: good
    for texts that repeat themselves or their prompt (code that is edited, summaries, translations).

    :param n_longest: the longest n-gram that is looked for; the longest one found decides.
    :param n_shortest: the shortest.
    :param n_max: the most tokens of a draft, or "auto".
    :param n_min: shorter drafts are given up.
    :raises InvalidInputError: a number is out of range.
    """

    def __init__(
        self,
        n_longest: int = 4,
        n_shortest: int = 2,
        *,
        n_max: int | Literal["auto"] = 8,
        n_min: int = 1,
    ) -> None:
        core = _core.ngram_drafter(
            n_longest=integer("n_longest", n_longest, 1, 64),
            n_shortest=integer("n_shortest", n_shortest, 1, 64),
            n_max=_longest(n_max),
            n_min=integer("n_min", n_min, 0),
        )
        super().__init__(core, n_max)
        self.draws = False


class _Speculative(_Native):
    """Drafts with a draft context.

    :ivar spec: the draft context.
    """

    _kinds: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        spec: SpeculativeContext,
        *,
        n_max: int | Literal["auto"] = 4,
        n_min: int = 0,
        p_min: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        instance("spec", spec, SpeculativeContext)
        if spec.kind not in self._kinds:
            raise InvalidInputError(
                f"{type(self).__name__} drafts with a file of the kind {' or '.join(self._kinds)}; "
                f"{spec.model.path.name} is of the kind {spec.kind}"
                + (" (or was loaded without load_mtp=True)" if "mtp" in self._kinds else "")
            )
        probability = number("p_min", p_min)
        if not 0 <= probability <= 1:
            raise InvalidInputError(f"p_min must be in 0..1, not {p_min}")
        heat = number("temperature", temperature)
        if not 0 <= heat < float("inf"):
            raise InvalidInputError(f"temperature must be finite and not negative, not {temperature}")
        core = _core.speculative_drafter(
            spec.core,
            n_max=_longest(n_max),
            n_min=integer("n_min", n_min, 0),
            p_min=probability,
            temperature=heat,
            seed=integer("seed", seed, 0, 2**32 - 1),
        )
        # Several MTP blocks give a token each; the places of a DFlash block, one less than there are or all.
        most = spec.n_heads if spec.n_heads > 1 else spec.longest_block
        super().__init__(core, n_max if n_max == "auto" or most is None else min(n_max, most))
        self.spec = spec
        self.target_layers = spec.target_layers
        self.draws = heat > 0

    def process(self, batch: Batch) -> None:
        instance("batch", batch, Batch)
        features = self.spec.features() if self.target_layers else None
        if features is not None and len(features) != len(batch):
            raise InvalidInputError(
                f"the open tap holds the states of {len(features)} tokens, the batch has {len(batch)}; "
                "process each batch right after it was decoded"
            )
        try:
            self._core.process(batch, features)
        finally:
            flush_log()


class Eagle3Drafter(_Speculative):
    """Drafts with an EAGLE-3 block: one decoder layer on the token and features of three of the target's
    layers (https://arxiv.org/abs/2503.01840).

    :param spec: a draft context of an ``eagle3`` file.
    :param n_max: the most tokens of a draft, or "auto".
    :param n_min: shorter drafts are given up, unless they were drawn.
    :param p_min: a draft ends where the drafter finds no token as likely as this.
    :param temperature: 0 drafts the most likely tokens. Above, tokens are drawn from softmax(logits /
        temperature) and drafts carry their distributions, for ``generate(..., rejection=True)``.
    :param seed: of the draws.
    :raises InvalidInputError: a number is out of range, or a file of another kind.
    """

    _kinds = ("eagle3",)


class MtpDrafter(_Speculative):
    """Drafts with the multi-token-prediction blocks of a model, or of a file of their own. Of several, the
    k-th drafts the k-th token, so that a draft has as many tokens at most.

    :param spec: a draft context of a file with MTP blocks.
    :param n_max: the most tokens of a draft, or "auto".
    :param n_min: shorter drafts are given up, unless they were drawn.
    :param p_min: a draft ends where the drafter finds no token as likely as this.
    :param temperature: as of :class:`Eagle3Drafter`.
    :param seed: of the draws.
    :raises InvalidInputError: a number is out of range, or a file of another kind.
    """

    _kinds = ("mtp",)


class DFlashDrafter(_Speculative):
    """Drafts with a DFlash or DSpark file: a block of tokens in one decode, that sees features of the target
    (https://arxiv.org/abs/2602.06036).

    :param spec: a draft context of a ``dflash`` file.
    :param n_max: the most tokens of a draft, or "auto"; the file's block holds ``spec.block_size`` places.
    :param n_min: shorter drafts are given up, unless they were drawn.
    :param p_min: a draft ends where the drafter finds no token as likely as this; with DSpark, where its
        confidence head is less sure.
    :param temperature: as of :class:`Eagle3Drafter`.
    :param seed: of the draws.
    :raises InvalidInputError: a number is out of range, or a file of another kind.
    """

    _kinds = ("dflash",)


class ModelDrafter(_Speculative):
    """Drafts with a smaller language model that has the target's vocabulary.

    :param context: the target's.
    :param draft: the model's file, a loaded model, or a draft context made of one.
    :param n_max: the most tokens of a draft, or "auto".
    :param n_min: shorter drafts are given up, unless they were drawn.
    :param p_min: a draft ends where the drafter finds no token as likely as this.
    :param temperature: as of :class:`Eagle3Drafter`.
    :param seed: of the draws.
    :raises InvalidInputError: a number is out of range, or another vocabulary.
    :raises UnsupportedError: a recurrent model, which cannot take tokens back.
    """

    _kinds = ("model",)

    def __init__(
        self,
        context: Context,
        draft: str | os.PathLike[str] | Model | SpeculativeContext,
        *,
        n_max: int | Literal["auto"] = 4,
        n_min: int = 0,
        p_min: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not isinstance(draft, SpeculativeContext):
            draft = SpeculativeContext(context, draft, as_model=True)
        super().__init__(draft, n_max=n_max, n_min=n_min, p_min=p_min, temperature=temperature, seed=seed)


class DrafterChain(Drafter):
    """Asks drafters in turn: a sequence for which the first has no draft gets the second's, and so on.

    :param drafters: e.g. an :class:`NGramDrafter`, which costs nothing, before one with a model. For
        ``generate(..., rejection=True)`` all of them must draw their tokens.
    :raises InvalidInputError: none is given, or one is no drafter.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise InvalidInputError("a chain needs at least one drafter")
        for drafter in drafters:
            instance("a drafter", drafter, Drafter)
        self.drafters = drafters
        self.target_layers = tuple(dict.fromkeys(layer for one in drafters for layer in one.target_layers))
        self.draws = all(one.draws for one in drafters)
        lengths = [one.n_max for one in drafters]
        self.n_max = "auto" if "auto" in lengths else max(n for n in lengths if n != "auto")

    def process(self, batch: Batch) -> None:
        for drafter in self.drafters:
            drafter.process(batch)

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        drafts: dict[int, Draft] = {}
        for drafter in self.drafters:
            left = {seq: request for seq, request in requests.items() if seq not in drafts}
            if left:
                found = drafter.draft(left)
                drafts.update({seq: draft for seq, draft in found.items() if len(draft.tokens) > 0})
        return drafts

    def accept(self, seq: int, n: int) -> None:
        for drafter in self.drafters:
            drafter.accept(seq, n)

    def reset(self, seq: int) -> None:
        reset_all(self.drafters, [seq])


class CallableDrafter(Drafter):
    """Drafts with a function of the whole text, such as llama-cpp-python's ``LlamaDraftModel`` objects.

    :param function: called with the token ids so far, an integer array ``(n,)``; returns those that may
        follow.
    :param n_max: the most tokens of a draft, or "auto".
    :raises InvalidInputError: no function, or ``n_max`` is out of range.
    """

    def __init__(
        self, function: Callable[[NDArray[np.intc]], Any], *, n_max: int | Literal["auto"] = 10
    ) -> None:
        if not callable(function):
            raise InvalidInputError(f"function must be callable, not {type(function).__name__}")
        _longest(n_max)
        self.n_max = n_max
        self.draws = False
        self._function = function
        self._texts: dict[int, list[int]] = {}
        self._starts: dict[int, int] = {}

    def process(self, batch: Batch) -> None:
        instance("batch", batch, Batch)
        if batch.n_embd > 0:
            raise InvalidInputError("the drafter needs token ids; this batch holds embeddings")
        texts: dict[int, list[int]] = {}
        starts: dict[int, int] = {}
        for token, position, seqs in sorted(
            zip(batch.tokens.tolist(), batch.positions.tolist(), batch.sequences, strict=True),
            key=lambda entry: entry[1],
        ):
            for seq in seqs:
                if seq not in starts:
                    starts[seq] = position
                    texts[seq] = self._texts.get(seq, [])[:position]
                if position != len(texts[seq]):
                    raise InvalidInputError(
                        f"sequence {seq} goes on at position {len(texts[seq])}, not {position}; a drafter "
                        "must process every batch"
                    )
                texts[seq].append(token)
        self._texts.update(texts)
        self._starts.update(starts)

    def draft(self, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
        drafts = {}
        for seq, request in requests.items():
            text = self._texts.get(seq, [])
            if request.position != len(text):
                raise InvalidInputError(
                    f"sequence {seq}: the last token must be at position {len(text)}, not {request.position}"
                )
            n_max = min(_longest(self.n_max), request.n_max)
            found = self._function(np.array([*text, request.last_token], np.intc))
            tokens = token_array(np.asarray(found))[: max(n_max, 0)]
            drafts[seq] = Draft(tokens)
        return drafts

    def accept(self, seq: int, n: int) -> None:
        text = self._texts.get(seq, [])
        start = self._starts.get(seq, 0)
        if not 0 <= integer("n", n) < len(text) - start:
            raise InvalidInputError(
                f"sequence {seq} had {len(text) - start} entries in the last batch; the first and {n} more "
                "cannot stand"
            )
        del text[start + n + 1 :]

    def reset(self, seq: int) -> None:
        self._texts.pop(seq, None)
        self._starts.pop(seq, None)


_BY_KIND: dict[str, type[_Speculative]] = {
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
    "dflash": DFlashDrafter,
}


def load_drafter(
    context: Context,
    draft: str | os.PathLike[str] | Model | SpeculativeContext,
    *,
    n_max: int | Literal["auto"] = 4,
    n_min: int = 0,
    p_min: float = 0.0,
    temperature: float = 0.0,
    seed: int = 0,
) -> Drafter:
    """The drafter for a file, whatever its kind: an :class:`Eagle3Drafter`, :class:`MtpDrafter`,
    :class:`DFlashDrafter` or :class:`ModelDrafter`, with what these take.

    :raises InvalidInputError: the file does not fit the context's model, or a number is out of range.
    :raises ModelLoadError: the file cannot be loaded.
    """
    spec = draft if isinstance(draft, SpeculativeContext) else SpeculativeContext(context, draft)
    if spec.kind == "model":
        return ModelDrafter(
            context, spec, n_max=n_max, n_min=n_min, p_min=p_min, temperature=temperature, seed=seed
        )
    return _BY_KIND[spec.kind](
        spec, n_max=n_max, n_min=n_min, p_min=p_min, temperature=temperature, seed=seed
    )


def as_drafter(drafter: object) -> Drafter | None:
    """`drafter` as a Drafter: a plain callable of token ids is wrapped.

    :raises InvalidInputError: it is neither, nor None.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, Sequence) and not isinstance(drafter, (str, bytes)):
        return DrafterChain(*[one for one in map(as_drafter, drafter) if one is not None])
    if isinstance(drafter, (str, os.PathLike, Model, SpeculativeContext)):
        raise InvalidInputError(
            f"drafter must be a Drafter, a list of them, or a function of token ids, not {drafter!r}; "
            "make one with load_drafter(context, ...) and give generate() the same context"
        )
    if isinstance(drafter, type) or not callable(drafter):
        raise InvalidInputError(
            f"drafter must be a Drafter, a list of them, or a function of token ids, not {drafter!r}"
        )
    return CallableDrafter(drafter)


def reset_all(drafters: Iterable[Drafter], seqs: Iterable[int]) -> None:
    """Let all drafters forget all sequences; what one of them raises comes out when all were asked."""
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
    return [one.spec for one in leaves(drafter) if isinstance(one, _Speculative)]


def new_length(drafter: Drafter) -> DraftLength | None:
    """What chooses the length of the drafter's drafts, where it shall be chosen."""
    return DraftLength(AUTO_LONGEST) if drafter.n_max == "auto" else None
