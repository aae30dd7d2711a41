"""The entries of a config.json: each is used, changes nothing, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llamatap._validate import shown
from llamatap.errors import InvalidInputError

__all__ = ["NO_EFFECT", "Settings"]

#: Entries without effect on what a trained block computes: names, training, tokens that only a caller uses.
NO_EFFECT = frozenset(
    (
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_window_layers",  # only where windows are used
        "model_type",
        "pad_token_id",
        "pretraining_tp",  # the same sums in parts
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)

_REQUIRED: Any = object()


class Settings:
    """A JSON object whose entries are taken one by one.

    :param values: the object.
    :param where: name of the object in errors, with a dot at its end; empty for the file's own.
    :param ignored: full names of entries that the caller declares to be without effect.
    :ivar refused: what the engine's graph does not compute with, found so far.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = "", ignored: Iterable[str] = ()) -> None:
        self._values = values
        self._where = where
        self._ignored = frozenset(ignored)
        self._taken: set[str] = set()
        self.refused: list[str] = []

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all entries."""
        return tuple(self._values)

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        found = self._values.get(key)
        if found is None:
            if default is _REQUIRED:
                raise InvalidInputError(f"config.json has no {self._where}{key}")
            return default
        return found

    def _wrong(self, key: str, expected: str, found: object) -> InvalidInputError:
        return InvalidInputError(f"{self._where}{key} in config.json must be {expected}, not {shown(found)}")

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """An integer above 0."""
        found = self._take(key, default)
        if type(found) is not int or not 0 < found < 2**31:
            raise self._wrong(key, "an integer above 0", found)
        return int(found)

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """An integer from 0 on."""
        found = self._take(key, default)
        if type(found) is not int or not 0 <= found < 2**31:
            raise self._wrong(key, "an integer from 0 on", found)
        return int(found)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A number above 0."""
        found = self._take(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < float("inf"):
            raise self._wrong(key, "a number above 0", found)
        return float(found)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """A bool."""
        found = self._take(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, "true or false", found)
        return found

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        found = self._take(key, default)
        if not isinstance(found, str):
            raise self._wrong(key, "a string", found)
        return found

    def integers(self, key: str) -> list[int] | None:
        """A list of integers; None where it is missing or empty."""
        found = self._take(key, [])
        if not isinstance(found, list) or any(
            isinstance(one, bool) or not isinstance(one, int) for one in found
        ):
            raise self._wrong(key, "a list of integers", found)
        return found or None

    def inner(self, key: str) -> Settings:
        """An object within this one; an empty one where it is missing."""
        found = self._take(key, {})
        if not isinstance(found, dict):
            raise self._wrong(key, "a JSON object", found)
        where = f"{self._where}{key}."
        return Settings(found, where=where, ignored=self._ignored)

    def only(self, key: str, *allowed: Any, why: str = "") -> None:
        """Refuse an entry unless it is missing, null, or one of these values."""
        self._taken.add(key)
        found = self._values.get(key)
        if found is None or any(type(found) is type(one) and found == one for one in allowed):
            return
        self.refuse(key, why)

    def refuse(self, key: str, why: str = "") -> None:
        """Refuse an entry."""
        self._taken.add(key)
        name = f"{self._where}{key}"
        if name not in self._ignored:
            self.refused.append(f"{name} = {shown(self._values.get(key))}" + (f" ({why})" if why else ""))

    def skip(self, *keys: str) -> None:
        """Leave entries out that have no effect."""
        self._taken.update(keys)

    def rest(self) -> list[str]:
        """Everything refused: found so far, and all entries that were not taken and are not off (null, false,
        0, empty)."""
        unknown = sorted(key for key in self._values if key not in self._taken | NO_EFFECT)
        for key in unknown:
            if self._values[key]:
                self.refuse(key)
        return self.refused
