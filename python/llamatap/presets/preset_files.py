"""Preset files: TOML, read strictly, because an ignored key would silently change the states."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from llamatap._validate import shown
from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import Window, parse_window
from llamatap.layers import LayerId
from llamatap.presets.preset import Preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["load_preset", "preset_names"]


def preset_names() -> list[str]:
    """The sorted names of the built-in presets."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_preset(preset: str | os.PathLike[str]) -> Preset:
    """Load a built-in preset, or one from a file.

    :param preset: a name of :func:`preset_names`, or the path of a TOML file: a ``Path``, or a str that ends
        in ``.toml`` or contains a folder.
    :raises InvalidInputError: there is no preset of that name, no such file, or the file is not a preset;
        with the key and its expected value.
    :raises OSError: the file cannot be read.
    """
    if not isinstance(preset, (str, os.PathLike)):
        raise InvalidInputError(f"a preset is a name or a path, not {type(preset).__name__}")
    path = Path(preset)
    if isinstance(preset, str) and path.suffix != ".toml" and path.name == preset:
        if preset not in (names := preset_names()):
            raise InvalidInputError(
                f"no preset is called {shown(preset)}; there are {', '.join(names)}, and a path ends in .toml"
            )
        where, data = preset, (resources.files(__package__) / f"{preset}.toml").read_bytes()
    else:
        try:
            where, data = str(path), path.read_bytes()
        except FileNotFoundError:
            raise InvalidInputError(
                f"there is no preset file {path}; built in are {', '.join(preset_names())}"
            ) from None
    try:
        return _read(data)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from error


class _Table:
    """A table of the file; refuses unknown keys and values of other types."""

    def __init__(self, label: str, entries: dict[str, Any], known: Sequence[str]) -> None:
        self.label = label
        self._entries = entries
        for key in entries:
            if key not in known:
                raise InvalidInputError(f"unknown key {label}{key}; known are {', '.join(known)}")

    def table(self, key: str, known: Sequence[str], *, required: bool = False) -> _Table:
        entries = self._get(key, dict, "a table", required)
        return _Table(f"{self.label}{key}.", entries or {}, known)

    def free_table(self, key: str) -> dict[str, Any]:
        return self._get(key, dict, "a table", False) or {}

    def text(self, key: str) -> str | None:
        found: str | None = self._get(key, str, "a text in quotes", False)
        return found

    def required_text(self, key: str) -> str:
        found: str = self._get(key, str, "a text in quotes", True)
        return found

    def count(self, key: str) -> int | None:
        expected = "a whole number of at least 1"
        found: int | None = self._get(key, int, expected, False)
        if found is not None and not 1 <= found < 2**31:
            raise self._error(key, expected, found)
        return found

    def window(self, key: str) -> Window | None:
        text = self._get(key, str, 'a text "START:STOP" such as "34:"', False)
        return None if text is None else parse_window(self.label + key, text)

    def layers(self, key: str) -> tuple[LayerId, ...]:
        expected = 'a list of layer ids, such as [-2] or [9, 18, "norm"]'
        found = self._get(key, list, expected, True)
        if not all(type(item) is int or item == "norm" for item in found):
            raise self._error(key, expected, found)
        return tuple(found)

    def _get(self, key: str, kind: type, expected: str, required: bool) -> Any:
        if key not in self._entries:
            if required:
                raise InvalidInputError(f"{self.label}{key} is missing; it is {expected}")
            return None
        found = self._entries[key]
        # Not isinstance, for which true and false are integers.
        if type(found) is not kind:
            raise self._error(key, expected, found)
        return found

    def _error(self, key: str, expected: str, found: object) -> InvalidInputError:
        return InvalidInputError(f"{self.label}{key} must be {expected}, not {reprlib.repr(found)}")


def _read(data: bytes) -> Preset:
    """Read the content of a preset file.

    :raises InvalidInputError: it is not TOML, a key is unknown or missing, or a value is wrong.
    """
    try:
        # Some editors write a byte order mark, which TOML does not allow.
        entries = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"this is not TOML: {error}") from error
    top = _Table("", entries, ("name", "description", "source", "model", "prompt", "states"))
    name = top.required_text("name")
    model = top.table("model", ("name", "architecture", "n_layer", "n_embd"))
    prompt = top.table("prompt", ("template", "template_variables", "max_length"))
    states = top.table("states", ("convention", "layers", "rows"), required=True)
    return Preset(
        name=name,
        description=top.text("description") or "",
        source=top.text("source") or "",
        model_name=model.text("name"),
        architecture=model.text("architecture"),
        n_layer=model.count("n_layer"),
        n_embd=model.count("n_embd"),
        template=prompt.text("template"),
        template_variables=prompt.free_table("template_variables"),
        max_length=prompt.count("max_length"),
        convention=states.required_text("convention"),
        layers=states.layers("layers"),
        rows=states.window("rows"),
    )
