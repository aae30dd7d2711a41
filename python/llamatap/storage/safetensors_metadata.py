"""Metadata of safetensors files: any JSON value, in a format that holds only strings.

A string is written as it is, everything else as JSON, so that any reader of such files understands it.
``json_keys``, itself JSON, lists the keys whose values are JSON: it distinguishes 3 from "3".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["JSON_KEYS", "from_metadata", "to_metadata"]

#: The key whose value lists the keys of JSON values.
JSON_KEYS = "json_keys"

# The keys of JSON values in files without that list.
_ALWAYS_JSON = frozenset(
    (
        "flash_attention",
        "layers",
        "max_length",
        "n_embd",
        "n_layer",
        "norm",
        "provenance",
        "row",
        "truncated",
        "window",
    )
)


def _is_text(value: object) -> bool:
    """Whether a value is a string of valid Unicode; the name of a file need not be."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def to_metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    """Convert fields to the strings of a file's metadata.

    :param fields: strings, or other values of JSON.
    """
    are_json = [key for key, value in fields.items() if not _is_text(value)]
    found = {key: json.dumps(value) if key in are_json else value for key, value in fields.items()}
    return {**found, JSON_KEYS: json.dumps(are_json)}


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read the fields that :func:`to_metadata` wrote.

    :raises ValueError: a value that should be JSON is not, or is nested too deeply.
    """
    try:
        return _read(metadata)
    except RecursionError:
        raise ValueError("its metadata is nested too deeply") from None


def _read(metadata: Mapping[str, str]) -> dict[str, Any]:
    listed = metadata.get(JSON_KEYS)
    are_json = _ALWAYS_JSON if listed is None else frozenset(json.loads(listed))
    return {
        key: json.loads(value) if key in are_json else value
        for key, value in metadata.items()
        if key != JSON_KEYS
    }
