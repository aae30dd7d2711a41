"""Keyword options that are declared once, in a TypedDict whose entries carry their defaults and help.

From the declaration come the static checks of callers, the signature and the docstring that ``help()`` shows,
the defaults, the checks of values, and the help of the command line:

    class ContextOptions(TypedDict, total=False):
        n_ctx: Annotated[int, Option(0, "tokens that fit, of all sequences together", low=0)]
        flash_attn: Annotated[bool | None, Option(None, "None leaves it to the engine")]

    @takes_options(ContextOptions)
    class Context:
        \"\"\"A model with memory of its sequences.

        :param model: kept alive by the context.
        :options:
        \"\"\"

        def __init__(self, model: Model, **options: Unpack[ContextOptions]) -> None:
            chosen = checked_options(ContextOptions, options, "Context()")   # defaults filled in
            self.n_ctx = chosen["n_ctx"]

``:options:`` becomes a ``:param`` line for each entry. A TypedDict may inherit from another one. The types of
the entries are read at run time, so the module that declares them imports what they name.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, Union, cast

from llamatap._validate import choice, finite_number, flag, instance, integer

__all__ = ["Option", "checked_options", "given_options", "read_options", "takes_options"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Option:
    """An entry of a TypedDict of options, in its ``Annotated``.

    Values are checked by the entry's type: int, float, bool, str, or a Literal of strings; with ``| None``,
    None passes. Entries of other types pass as they are, unless ``check`` is given.
    """

    default: Any
    #: Meaning of the option, as the docstring and the command line show it.
    help: str
    #: Range of an int (-2**31..2**31-1 where no bound is given) or of a float, which is always finite.
    low: float | None = None
    high: float | None = None
    #: In place of ``low``: an exclusive bound of a float.
    above: float | None = None
    #: Function from the option's name and a value (not None where None passes) to the value to use.
    check: Callable[[str, Any], Any] | None = None
    #: The name and the type of the entry; :func:`read_options` fills them in.
    name: str = field(default="", kw_only=True)
    type: Any = field(default=None, kw_only=True)

    @property
    def plain_help(self) -> str:
        """The help without the markup of docstrings, for the command line and HTTP."""
        return re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"\1\2", self.help)

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in _members(self.type)

    @property
    def kind(self) -> Any:
        """The type of values other than None."""
        members = [one for one in _members(self.type) if one is not type(None)]
        return members[0] if len(members) == 1 else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; none for other types."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    def checked(self, value: object) -> Any:
        """The value to use.

        :raises InvalidInputError: the value is of another type, or out of range.
        """
        if value is None and self.optional:
            return None
        if self.check is not None:
            return self.check(self.name, value)
        if self.choices:
            return choice(self.name, value, self.choices, self.optional)
        if self.kind is int:
            bounds = {"low": self.low, "high": self.high}
            return integer(self.name, value, **{k: int(v) for k, v in bounds.items() if v is not None})
        if self.kind is bool:
            return flag(self.name, value)
        if self.kind is float:
            return finite_number(self.name, value, self.low, self.high, self.above)
        if self.kind is str:
            instance(self.name, value, str)
        return value


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; else the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def read_options(declaration: type[Any]) -> Mapping[str, Option]:
    """The options of a TypedDict, by name, in the order of their declaration."""
    key: Any = declaration
    return _read(key)


@functools.cache
def _read(declaration: Any) -> Mapping[str, Option]:
    found = {}
    for name, hint in typing.get_type_hints(declaration, include_extras=True).items():
        kind, option = typing.get_args(hint)
        found[name] = replace(option, name=name, type=kind)
    return types.MappingProxyType(found)


def checked_options(declaration: type[_T], given: Mapping[str, Any], caller: str) -> _T:
    """All options of a TypedDict: the given ones, checked, and the defaults of the others.

    :param caller: the function that was called, as errors name it: "Context()".
    :raises TypeError: a name is not an option.
    :raises InvalidInputError: a value is of another type, or out of range.
    """
    defaults = {name: option.default for name, option in read_options(declaration).items()}
    return cast("_T", defaults | dict(given_options(declaration, given, caller)))


def given_options(declaration: type[Any], given: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """The given options of a TypedDict, checked.

    :param caller: the function that was called, as errors name it.
    :raises TypeError: a name is not an option.
    :raises InvalidInputError: a value is of another type, or out of range.
    """
    options = read_options(declaration)
    for name in given:
        if name not in options:
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}")
    return {name: options[name].checked(value) for name, value in given.items()}


def takes_options(declaration: type[Any]) -> Callable[[_T], _T]:
    """Decorator of a function, or of a class for its ``__init__``, with ``**options`` of a TypedDict: its
    signature names each option with its default, and ``:options:`` in its docstring describes each."""

    def decorate(decorated: _T) -> _T:
        function: Any = decorated
        if isinstance(function, type):
            function = vars(function)["__init__"]
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = read_options(declaration).values()
        named = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
            )
            for one in options
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])
        lines = []
        for line in (decorated.__doc__ or "").splitlines():
            if line.strip() != ":options:":
                lines.append(line)
                continue
            indent = line[: -len(line.lstrip())]
            for one in options:
                lines += textwrap.wrap(
                    f":param {one.name}: {one.help}.",
                    110,
                    initial_indent=indent,
                    subsequent_indent=indent + "    ",
                )
        decorated.__doc__ = "\n".join(lines) or None
        return decorated

    return decorate
