"""Checks of arguments before they reach the core; errors say what was expected and what was found."""

from __future__ import annotations

import itertools
import math
import operator
import os
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError

__all__ = [
    "NotCopied",
    "choice",
    "finite_number",
    "flag",
    "instance",
    "integer",
    "number",
    "path",
    "separate",
    "shown",
]


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlong = 60

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            # Python does not print integers of more than some thousand digits.
            return f"<an integer of {x.bit_length()} bits>"


_REPR = _Repr()


def shown(value: object) -> str:
    """`value` as errors show it: its repr, shortened if it is long."""
    try:
        return _REPR.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def integer(name: str, value: object, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    """`value` as an int; integers of NumPy are accepted, bools and floats are not."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(f"{name} must be an integer, not {shown(value)}") from None
    if not low <= found <= high:
        top = "2**31-1" if high == 2**31 - 1 else str(high)
        raise InvalidInputError(f"{name} must be in {low}..{top}, not {shown(found)}")
    return found


def number(name: str, value: object) -> float:
    """`value` as a float."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(f"{name} must be a number, not {shown(value)}") from None


def finite_number(
    name: str, value: object, low: float | None = None, high: float | None = None, above: float | None = None
) -> float:
    """`value` as a finite float within bounds.

    :param above: an exclusive lower bound.
    """
    found = number(name, value)
    bounds = (("at least", low), ("above", above), ("at most", high))
    fits = math.isfinite(found) and not (
        (low is not None and found < low)
        or (above is not None and found <= above)
        or (high is not None and found > high)
    )
    if fits:
        return found
    if low is not None and high is not None:
        expected = f"in {low:g}..{high:g}"
    else:
        expected = " and ".join(
            ["finite", *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)]
        )
    raise InvalidInputError(f"{name} must be {expected}, not {shown(found)}")


def flag(name: str, value: object) -> bool:
    """`value` as a bool; anything else is refused, because a text such as "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInputError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def instance(name: str, value: object, kind: type, called: str | None = None) -> None:
    """Check that `value` is a `kind`.

    :param called: the name of `kind` in the error, if not its own.
    """
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name} must be a {called or kind.__name__}, not {type(value).__name__}")


def choice(name: str, value: object, choices: Sequence[str], optional: bool = False) -> str:
    """`value`, checked to be one of `choices`.

    :param optional: whether None is allowed too, for the message.
    """
    if isinstance(value, str) and value in choices:
        return value
    *names, last = [*map(repr, choices), *(["None"] if optional else [])]
    raise InvalidInputError(f"{name} must be {', '.join(names)} or {last}, not {shown(value)}")


def path(name: str, value: object) -> Path:
    """`value`, a str or an os.PathLike of one, as a path."""
    try:
        if isinstance(value, (str, os.PathLike)):
            return Path(value)
    except TypeError:
        pass
    raise InvalidInputError(f"{name} must be a str or a path, not {type(value).__name__}")


def separate(name: str, arrays: Iterable[tuple[int, NDArray[Any]]]) -> None:
    """Check that no two of the numbered C-contiguous arrays share memory."""
    spans = sorted((array.ctypes.data, array.nbytes, index) for index, array in arrays)
    for (start, size, first), (after, _, second) in itertools.pairwise(spans):
        if start + size > after:
            one, other = sorted((first, second))
            raise InvalidInputError(f"{name} {one} and {other} share memory")


class NotCopied:
    """Base of objects that cannot be copied or pickled: two owners would close one object of the core."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} objects cannot be copied or pickled")
