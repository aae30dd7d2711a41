"""Options that are declared once: defaults, checks, signatures and docstrings come from the declaration."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
import pytest

import llamatap as lt
from llamatap._options import Option, checked_options, read_options, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _even(name: str, value: Any) -> int:
    if value % 2:
        raise lt.InvalidInputError(f"{name} must be even, not {value}")
    return int(value)


class Inner(TypedDict, total=False):
    width: Annotated[int, Option(3, "how wide", low=1, high=9)]
    share: Annotated[float, Option(0.5, "what is kept", low=0, high=1)]
    scale: Annotated[float, Option(1.0, "how much", above=0)]
    fast: Annotated[bool | None, Option(None, "None leaves it to the engine")]


class Outer(Inner, total=False):
    name: Annotated[str, Option("f16", "its type")]
    mode: Annotated[Literal["all", "last"] | None, Option(None, "which rows")]
    pairs: Annotated[int, Option(2, "an even number", check=_even)]
    other: Annotated[list[int], Option((), "passes as it is")]


@takes_options(Outer)
def function(first: int, **options: Unpack[Outer]) -> Outer:
    """A function.

    :param first: comes first.
    :options:
    :raises TypeError: an unknown one.
    """
    return checked_options(Outer, options, "function()")


def test_defaults_and_given_values() -> None:
    defaults = {
        "width": 3,
        "share": 0.5,
        "scale": 1.0,
        "fast": None,
        "name": "f16",
        "mode": None,
        "pairs": 2,
        "other": (),
    }
    assert function(1) == defaults
    found = function(1, width=np.int64(4), share=1, fast=np.True_, mode="last", pairs=6)  # type: ignore[arg-type]
    assert found == defaults | {"width": 4, "share": 1.0, "fast": True, "mode": "last", "pairs": 6}
    assert type(found["width"]) is int
    assert found["fast"] is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 0}, r"^width must be in 1\.\.9, not 0$"),
        ({"width": None}, "^width must be an integer, not None$"),
        ({"share": "much"}, "^share must be a number, not 'much'$"),
        ({"share": 1.5}, r"^share must be in 0\.\.1, not 1\.5$"),
        ({"share": float("nan")}, r"^share must be in 0\.\.1, not nan$"),
        ({"scale": 0}, r"^scale must be finite and above 0, not 0\.0$"),
        ({"scale": float("inf")}, "^scale must be finite and above 0, not inf$"),
        ({"fast": 1}, "^fast must be True or False, not 1$"),
        ({"name": None}, "^name must be a str, not NoneType$"),
        ({"mode": "none"}, "^mode must be 'all', 'last' or None, not 'none'$"),
        ({"pairs": 3}, "^pairs must be even, not 3$"),
    ],
)
def test_wrong_values_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(lt.InvalidInputError, match=message):
        function(1, **given)


def test_unknown_names_are_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"function\(\) got an unexpected keyword argument 'widht'"):
        function(1, widht=3)  # type: ignore[call-arg]


def test_signatures_and_docstrings_name_each_option() -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["first", *read_options(Outer)]
    assert parameters["mode"].default is None
    assert parameters["width"].kind is inspect.Parameter.KEYWORD_ONLY
    lines = [line.strip() for line in str(function.__doc__).splitlines()]
    assert lines[2:5] == [
        ":param first: comes first.",
        ":param width: how wide.",
        ":param share: what is kept.",
    ]
    assert lines[-2] == ":raises TypeError: an unknown one."


def test_a_class_has_them_in_its_init() -> None:
    @takes_options(Inner)
    class Made:
        """Made.

        :options:
        """

        def __init__(self, **options: Unpack[Inner]) -> None: ...

    assert list(inspect.signature(Made).parameters) == ["width", "share", "scale", "fast"]
    assert ":param share: what is kept." in str(Made.__doc__)


def test_help_without_the_markup_of_docstrings() -> None:
    option = Option(0, "as of :meth:`Context.tap`; with ``stream`` alone")
    assert option.plain_help == "as of Context.tap; with stream alone"
