"""A context's memory and a drafter, for one generation alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from llamatap._engine_context import engine_of
from llamatap._native import native_of
from llamatap.context import Context
from llamatap.drafting.drafter import Drafter, leaves
from llamatap.errors import BusyError, InvalidInputError

__all__ = ["check_free", "held", "tidying"]

_logger = logging.getLogger("llamatap")

#: The generation that uses each drafter, by the drafter's id. An id is not used anew while the entry counts:
#: a generation that is alive keeps its drafter alive.
_users: dict[int, weakref.ref[object]] = {}
#: Held while drafters are taken. Giving them back must not wait for it: the garbage collector may do so.
_taking = threading.Lock()

_NOT_FREE = (
    "another generation is going on in this context; it must end first (close() what generate() gave, or the "
    "Session)"
)


def _user(drafter: Drafter) -> object | None:
    found = _users.get(id(drafter))
    return None if found is None else found()


def check_free(context: Context, drafter: Drafter | None) -> None:
    """The context's memory holds nothing, and no generation has it or the drafter for itself.

    :raises InvalidInputError: it holds tokens.
    :raises BusyError: a generation is going on.
    """
    if engine_of(context).owner is not None:
        raise BusyError(_NOT_FREE)
    if drafter is not None and any(_user(one) is not None for one in leaves(drafter)):
        raise BusyError("the drafter is in use by another generation; give each one of its own")
    for seq in range(context.n_seq_max):
        if native_of(context).memory_last(seq) >= 0:
            raise InvalidInputError(
                f"sequence {seq} of the context holds tokens; generation needs an empty memory "
                "(memory.clear())"
            )


@contextlib.contextmanager
def held(context: Context, drafter: Drafter | None, user: object) -> Iterator[None]:
    """Reserve the context and the drafter for `user`, until the block ends or `user` is garbage collected.

    :raises BusyError: another one has them.
    """
    drafters = [] if drafter is None else list(leaves(drafter))
    try:
        if not engine_of(context).reserve(user):
            raise BusyError(_NOT_FREE)
        with _taking:
            for one in drafters:
                if _user(one) not in (None, user):
                    raise BusyError("the drafter is in use by another generation; give each one of its own")
                _users[id(one)] = weakref.ref(user)
        yield
    finally:
        engine_of(context).release(user)
        for one in drafters:
            if _user(one) is user:
                del _users[id(one)]


def tidying(
    action: Callable[[], object],
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    """`action` for the end of a ``with`` block. What it raises does not replace what ended the block."""

    def tidy(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            action()
        except Exception as other:
            if error is None or isinstance(error, GeneratorExit):
                raise
            _logger.warning("after %r a generation could not be tidied up: %r", error, other)

    return tidy
