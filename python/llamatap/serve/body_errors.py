"""Error messages for wrong request bodies, with fields named as a client writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

__all__ = ["unreadable_body", "validation_message"]

# Types of errors whose input is the wrong value, beside those that end in "_type".
_OF_VALUES = frozenset(
    (
        "finite_number",
        "greater_than",
        "greater_than_equal",
        "int_from_float",
        "less_than",
        "less_than_equal",
        "literal_error",
        "prompts",
    )
)

# Better messages for some of pydantic's error types.
_SAID = {"finite_number": "must be a finite number", "model_attributes_type": "must be an object"}


def _path(location: Sequence[str | int], body: Any, missing: bool) -> str:
    """The path of a place in a body: ``messages[0].content[1].image_url``.

    pydantic's location has branches of unions among the fields; the body shows which part is which.

    :param missing: whether the last part is a missing field.
    """
    path, here = "", body
    for i, part in enumerate(location):
        if isinstance(here, list) and isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if part < len(here) else None
        elif isinstance(here, dict) and (part in here or (missing and i == len(location) - 1)):
            path += f".{part}" if path else str(part)
            here = here.get(part)
    return path


def _found(value: Any) -> str:
    """A value of a body as errors show it, in JSON; long ones are cut, lists and objects left out."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return json.dumps(value[:40]) + ("..." if len(value) > 40 else "")
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def validation_message(error: RequestValidationError) -> str:
    """The error message for a wrong body: its first mistakes, by field."""
    found: list[tuple[str, str]] = []
    problems: list[dict[str, Any]] = list(error.errors())
    for problem in problems[:5]:
        kind, said = problem["type"], _SAID.get(problem["type"], problem["msg"])
        if kind in _OF_VALUES or kind.endswith("_type"):
            said += f", found {_found(problem['input'])}"
        if kind == "json_invalid":
            return f"the body is not JSON: {problem.get('ctx', {}).get('error', said)}"
        where = _path(problem["loc"][1:], error.body, kind == "missing")
        if kind == "unknown_field":
            found.append((where, f"{where}.{said}" if where else said))
        elif not where:
            found.append((where, "a request must be a JSON object"))
        elif kind == "unserved":
            found.append((where, f"{where} {said}; leave it out"))
        else:
            found.append((where, f"{where}: {said}"))
    # In a field of several types, report the mistake in the type that fits best.
    deepest = [
        said
        for where, said in found
        if not any(other.startswith((f"{where}.", f"{where}[")) for other, _ in found)
    ]
    return "; ".join(dict.fromkeys(deepest))


def unreadable_body(cause: BaseException | None) -> str:
    """The error message for a body that Python's JSON parser cannot read.

    :param cause: the parser's exception.
    """
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not JSON in UTF-8: {cause.reason} at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    if isinstance(cause, ValueError):
        # The only other ValueError of the parser is the limit of digits.
        return f"an integer in the body has more than {sys.get_int_max_str_digits()} digits"
    return "the body cannot be read"
