"""The ``drafter`` argument of generation: a drafter, several, a function of token ids, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import shown
from llamatap.drafting.chain import DrafterChain
from llamatap.drafting.drafter import Drafter, check_drafter
from llamatap.drafting.text_drafters import CallableDrafter
from llamatap.errors import InvalidInputError

__all__ = ["AnyDrafter", "as_drafter"]

_Function: TypeAlias = Callable[[NDArray[np.int32]], Any]
#: The ``drafter`` argument of :func:`llamatap.generate`. Several are asked in turn; a function takes token
#: ids and returns guesses of the next ones.
AnyDrafter: TypeAlias = Drafter | _Function | Sequence[Drafter | _Function] | None


def as_drafter(drafter: object) -> Drafter | None:
    """Make a Drafter of the argument: a list becomes a :class:`DrafterChain`, a function of token ids a
    :class:`CallableDrafter`.

    :raises InvalidInputError: it is neither of them, nor None.
    :raises TypeError: its ``process`` does not take the target's states.
    """
    if drafter is None:
        return None
    if isinstance(drafter, Drafter):
        check_drafter(drafter)
        return drafter
    if isinstance(drafter, Sequence) and not isinstance(drafter, (str, bytes)):
        return DrafterChain(*[one for one in map(as_drafter, drafter) if one is not None])
    if isinstance(drafter, type) or not callable(drafter):
        raise InvalidInputError(
            f"drafter must be a Drafter, a list of them, or a function of token ids, not {shown(drafter)}; "
            "load_drafter(context, ...) makes one from a file, with the context to generate in"
        )
    return CallableDrafter(drafter)
