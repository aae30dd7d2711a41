"""Drafter: guesses the next tokens of sequences, for a target to verify."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import shown
from llamatap.context import Batch
from llamatap.drafting.draft_length import MaxTokens, request_limit
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId
from llamatap.states import States
from llamatap.tokenizer import token_array

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "check_drafter",
    "check_requests",
    "checked_drafts",
    "reset_all",
]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for a draft of one sequence.

    :ivar last_token: the newest token, which the target has not decoded yet.
    :ivar position: its position; the draft is for the positions after it.
    :ivar n_max: maximum number of tokens that can be used.
    :ivar seed: seed of the sequence, for drafters that sample their tokens.
    """

    last_token: int
    position: int
    n_max: int
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens to verify.

    :ivar tokens: int32 ``(n,)``; may be empty.
    :ivar probs: float32 ``(n,)``: the drafter's probability of each; None if it has none.
    :ivar distributions: float32 ``(n, n_vocab)``: the distribution that each token was sampled from, for
        rejection sampling; None if tokens were not sampled.
    """

    tokens: NDArray[np.int32]
    probs: NDArray[np.float32] | None = None
    distributions: NDArray[np.float32] | None = None


class Drafter(ABC):
    """Guesses the next tokens of sequences. Subclass it for a drafter of your own: only :meth:`draft` is
    required. A drafter that needs only the text is shorter as a :class:`TextDrafter`.

    :func:`llamatap.generate` and sessions call these methods, :meth:`draft` and :meth:`process` once for all
    in-flight requests:

    1. :meth:`reset`, for a sequence before its first batch.
    2. :meth:`process`, once after each decode of the target with new entries: the prompt, or a chunk of it;
      or the newest token and the draft. Not after decodes that only repeat accepted entries (rollback in
      memories that cannot remove a suffix), nor after the decode of a text's final token for its states.
    3. :meth:`accept`, after such a batch, for each sequence that had its newest token in it, also without a
       draft. Not for prompts, whose tokens all stay.
    4. :meth:`draft`, for the sequences that continue and have room for a draft.
    5. :meth:`reset`, for a sequence that has ended, for any reason. Its id is then used for another text.
    """

    #: The layers whose states :meth:`process` gets for every token of the target.
    target_layers: tuple[LayerId, ...] = ()
    #: Maximum number of tokens that are requested; None for as many as fit. "auto" measures which length (0
    #: to 8) gives the most tokens per second.
    n_max: MaxTokens | None = None
    #: Whether its tokens may be sampled, so that drafts carry :attr:`Draft.distributions`. If False,
    #: ``generate(..., rejection=True)`` refuses the drafter at once.
    draws: bool = True

    def process(self, batch: Batch, states: States | None = None) -> None:  # noqa: B027  optional
        """Follow a batch that the target has decoded. Drafted tokens in it may still be rejected.

        :param states: the target's states of the batch, one row per entry, in batch order, of the layers in
            :attr:`target_layers`, in that order; None if it is empty.
        :raises InvalidInputError: states that the drafter needs, or an earlier batch, are missing.
        """

    @abstractmethod
    def draft(self, requests: Mapping[int, DraftRequest]) -> Mapping[int, Draft]:
        """Draft for these sequences.

        :returns: drafts by sequence id; sequences may be left out.
        :raises InvalidInputError: a request does not follow the processed batches.
        """

    def accept(self, seq: int, n: int) -> None:  # noqa: B027
        """Keep the first ``n`` drafted tokens of the sequence's last batch, and the token before them;
        discard the rest.

        :raises InvalidInputError: the batch had fewer.
        """

    def reset(self, seq: int) -> None:  # noqa: B027
        """Forget a sequence, known or not."""


def check_drafter(drafter: Drafter) -> None:
    """Check that a drafter can be called as :class:`Drafter` says.

    :raises TypeError: its ``process`` does not take the target's states.
    :raises InvalidInputError: its ``n_max`` is not a number.
    """
    try:
        inspect.signature(drafter.process).bind(None, None)
    except TypeError:
        raise TypeError(
            f"{type(drafter).__name__}.process must take the batch and the target's states: "
            "def process(self, batch, states=None)"
        ) from None
    except ValueError:
        # A callable of an extension module, without a signature.
        pass
    request_limit(drafter.n_max)


def check_requests(requests: object) -> None:
    """Check that the requests are a dict of DraftRequest by sequence id.

    :raises InvalidInputError: they are not.
    """
    if isinstance(requests, Mapping) and all(isinstance(one, DraftRequest) for one in requests.values()):
        return
    raise InvalidInputError(f"requests must be a dict of DraftRequest by sequence id, not {shown(requests)}")


def checked_drafts(drafter: Drafter, requests: Mapping[int, DraftRequest]) -> dict[int, Draft]:
    """Ask a drafter for drafts. The result has checked types, is cut to the ``n_max`` of the request and of
    the drafter, and has no empty drafts.

    :raises InvalidInputError: the drafter returned something else.
    """
    n_max = request_limit(drafter.n_max)
    asked = {seq: replace(one, n_max=min(one.n_max, n_max)) for seq, one in requests.items()}
    asked = {seq: one for seq, one in asked.items() if one.n_max > 0}
    if not asked:
        return {}
    found = drafter.draft(asked)
    if not isinstance(found, Mapping):
        raise InvalidInputError(
            f"a drafter must return a dict of drafts by sequence id, not {type(found).__name__}"
        )
    drafts: dict[int, Draft] = {}
    for seq, request in asked.items():
        draft = found.get(seq)
        if draft is None:
            continue
        if not isinstance(draft, Draft):
            raise InvalidInputError(
                f"a drafter must return llamatap.Draft objects, not {type(draft).__name__}"
            )
        tokens = token_array(draft.tokens)
        # Cut only a draft that is too long: otherwise arrays of a wrong length must be detected.
        cut = slice(request.n_max if len(tokens) > request.n_max else None)
        if len(tokens) > 0:
            probs = _float32("probs", draft.probs, cut)
            if probs is not None and probs.shape != tokens[cut].shape:
                raise InvalidInputError(
                    f"a draft needs a prob for each of its {len(tokens)} tokens; found the shape "
                    f"{probs.shape}"
                )
            drafts[seq] = Draft(tokens[cut], probs, _float32("distributions", draft.distributions, cut))
    return drafts


def _float32(name: str, values: object, rows: slice) -> NDArray[np.float32] | None:
    if values is None:
        return None
    try:
        return np.ascontiguousarray(values, np.float32)[rows]
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a draft's {name} must be a float32 array: {error}") from None


def reset_all(drafters: Iterable[Drafter], seqs: Iterable[int]) -> None:
    """Reset all sequences in all drafters. An exception is raised only after all of them were called."""
    with contextlib.ExitStack() as every_call:
        for seq in seqs:
            for drafter in drafters:
                every_call.callback(drafter.reset, seq)
