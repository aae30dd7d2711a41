"""Field types of request bodies.

Bodies are checked on the event loop, so a check stops at the first mistake: a list of a million wrong
elements, or a body with as many unknown fields, gives one error.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

__all__ = ["Biases", "Body", "Ids", "Prompts", "Texts"]

Ids: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]

_MOST_BIASES = 1024
_TOKEN_ID = "[0-9]{1,9}"


def _shown(name: Any) -> str:
    """The name of a field for an error message: cut if it is long, without half characters."""
    return str(name)[:100].encode(errors="backslashreplace").decode()


def _token_ids(value: Any) -> Any:
    # pydantic would report every wrong entry of a large object.
    if not isinstance(value, dict):
        return value
    if len(value) > _MOST_BIASES:
        raise PydanticCustomError("too_many", f"more than {_MOST_BIASES} tokens")
    found: set[int] = set()
    for key in value:
        if not (isinstance(key, str) and re.fullmatch(_TOKEN_ID, key)):
            raise PydanticCustomError(
                "token_id", "each key must be a token id in digits, not '{key}'", {"key": _shown(key)}
            )
        if int(key) in found:
            raise PydanticCustomError("token_twice", "token {token} is named twice", {"token": int(key)})
        found.add(int(key))
    return value


#: By token id, in JSON a string of digits: the number added to its logit.
Biases: TypeAlias = Annotated[
    dict[
        Annotated[str, Field(pattern=f"^{_TOKEN_ID}$")],
        Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
    ],
    Field(max_length=_MOST_BIASES),
    BeforeValidator(_token_ids),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]


def _kind(value: Any) -> str | None:
    """The kind of prompts, by the type of the first: "text", "texts", "ids", "lists", or None."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


#: A text, token ids, or a list of either.
Prompts: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("lists")],
    Discriminator(
        _kind,
        custom_error_type="prompts",
        custom_error_message="expected a text, token ids, or a list of either",
    ),
]


class Body(BaseModel):
    """Base of request bodies: no unknown fields, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in data if name not in known), None)
            if unknown is not None:
                shown = _shown(unknown)
                near = difflib.get_close_matches(shown, known, 1)
                raise PydanticCustomError(
                    "unknown_field",
                    "{name} is not a field of this request{advice}",
                    {"name": shown, "advice": f"; did you mean {near[0]}?" if near else ""},
                )
        return data
