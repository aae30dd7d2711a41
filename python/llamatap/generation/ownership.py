"""Exclusive use: a context's memory and a drafter belong to one generation at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from llamatap._engine_context import engine_of
from llamatap.context import Context
from llamatap.drafting.chain import members
from llamatap.drafting.drafter import Drafter
from llamatap.errors import BusyError, InvalidInputError

__all__ = ["cleanup", "require_unused", "reserve"]

_logger = logging.getLogger("llamatap")

#: The generation that uses each drafter, by the drafter's id. Meanwhile the id cannot be reused: a live
#: generation keeps its drafter alive.
_users: dict[int, weakref.ref[object]] = {}
#: Held while drafters are reserved. Releasing must not wait for it: the garbage collector may release.
_reserving = threading.Lock()

_IN_USE = (
    "this context is in use by a generation; end that first (close() the iterator of generate(), or close "
    "the "
    "Session)"
)
_DRAFTER_IN_USE = "the drafter is in use by another generation; give each generation its own drafter"


def _user(drafter: Drafter) -> object | None:
    found = _users.get(id(drafter))
    return None if found is None else found()


def require_unused(context: Context, drafter: Drafter | None) -> None:
    """Check that the context's memory is empty, and that no generation uses it or the drafter.

    :raises InvalidInputError: the memory holds tokens.
    :raises BusyError: a generation uses the context or the drafter.
    """
    engine = engine_of(context)
    if engine.owner is not None:
        raise BusyError(_IN_USE)
    if drafter is not None and any(_user(one) is not None for one in members(drafter)):
        raise BusyError(_DRAFTER_IN_USE)
    for seq in range(context.n_seq_max):
        if engine.native.memory_last(seq) >= 0:
            raise InvalidInputError(
                f"sequence {seq} of the context holds tokens; generation needs an empty memory "
                "(memory.clear())"
            )


@contextlib.contextmanager
def reserve(context: Context, drafter: Drafter | None, user: object) -> Iterator[None]:
    """Reserve the context and the drafter for `user`, until the block ends or `user` is garbage collected.

    :raises BusyError: another generation has them.
    """
    drafters = [] if drafter is None else list(members(drafter))
    try:
        if not engine_of(context).reserve(user):
            raise BusyError(_IN_USE)
        with _reserving:
            for one in drafters:
                if _user(one) not in (None, user):
                    raise BusyError(_DRAFTER_IN_USE)
                _users[id(one)] = weakref.ref(user)
        yield
    finally:
        engine_of(context).release(user)
        for one in drafters:
            if _user(one) is user:
                del _users[id(one)]


def cleanup(
    action: Callable[[], object],
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    """Make an exit callback that runs ``action`` at the end of a ``with`` block. An exception of the action
    is raised, or logged if it would replace the exception that ended the block."""

    def run(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            action()
        except Exception as another:
            if error is None or isinstance(error, GeneratorExit):
                raise
            _logger.warning("after %r, cleaning up a generation failed: %r", error, another)

    return run
