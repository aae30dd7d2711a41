"""Checked arguments of extraction: prompts, windows of positions, output arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import shown
from llamatap.errors import InvalidInputError
from llamatap.loaded_model import LoadedModel
from llamatap.states import dtype_name
from llamatap.tokenizer import token_array

__all__ = [
    "CheckedPrompt",
    "Input",
    "Window",
    "checked_out",
    "checked_prompt",
    "cut_tokens",
    "is_single",
    "parse_window",
    "prompt_tokens",
    "window_bounds",
    "window_text",
]

#: A prompt: text, or token ids.
Input: TypeAlias = "str | Sequence[int] | NDArray[np.integer[Any]]"
#: Positions [start, stop), as in a Python slice.
Window: TypeAlias = "tuple[int | None, int | None]"


@dataclass(frozen=True, eq=False)
class CheckedPrompt(Sequence[int]):
    """A prompt whose token ids were checked for a model and truncated: it is not checked again.

    :ivar tokens: int32 ``(n,)``, read-only.
    :ivar n_uncut: number of tokens before truncation.
    """

    tokens: NDArray[np.int32]
    n_uncut: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found: int | Sequence[int] = self.tokens[index].tolist()
        return found


def is_single(inputs: object, name: str = "inputs") -> bool:
    """Whether `inputs` is one prompt rather than a list of them.

    :raises InvalidInputError: it is neither.
    """
    if isinstance(inputs, str):
        return True
    if isinstance(inputs, np.ndarray):
        if inputs.ndim != 1:
            raise InvalidInputError(
                f"{name} is an array of {inputs.ndim} dimensions; give a list of its rows, without padding"
            )
        return True
    if not isinstance(inputs, Sequence) or isinstance(inputs, (bytes, bytearray)):
        hint = "; .tolist() of a tensor gives a list" if hasattr(inputs, "tolist") else ""
        raise InvalidInputError(
            f"{name} must be a str, token ids, or a list of either, not {type(inputs).__name__}{hint}"
        )
    if len(inputs) == 0:
        raise InvalidInputError(f"{name} is empty")
    are_ids = [isinstance(item, (int, np.integer)) for item in inputs]
    if any(are_ids) and not all(are_ids):
        other = type(inputs[are_ids.index(False)]).__name__
        raise InvalidInputError(
            f"{name} is a list of token ids and {other}; a list of prompts holds lists of ids"
        )
    return all(are_ids)


def prompt_tokens(model: LoadedModel, prompt: Input, max_length: int | None) -> NDArray[np.int32]:
    """The token ids of a prompt: a read-only copy, because the caller's array may change.

    :param max_length: maximum number of tokens; see :func:`cut_tokens`.
    """
    return checked_prompt(model, prompt, max_length).tokens


def checked_prompt(model: LoadedModel, prompt: Input, max_length: int | None) -> CheckedPrompt:
    """A prompt as token ids, checked and truncated.

    :param max_length: maximum number of tokens; see :func:`cut_tokens`. Ignored for a checked prompt.
    :raises InvalidInputError: it is empty, or not a prompt of this model.
    """
    if isinstance(prompt, CheckedPrompt):
        return prompt
    if not isinstance(prompt, (str, Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray)):
        hint = "; .tolist() of a tensor gives a list" if hasattr(prompt, "tolist") else ""
        raise InvalidInputError(f"a prompt is a str or token ids, not {type(prompt).__name__}{hint}")
    if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise InvalidInputError(f"token ids must be one-dimensional, not of shape {prompt.shape}")
    # An empty text is a mistake, even if it gets a BOS token.
    if len(prompt) == 0:
        raise InvalidInputError("the prompt is empty")
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else token_array(prompt)
    n_uncut = len(tokens)
    tokens = cut_tokens(model, prompt, tokens, max_length).copy()
    if len(tokens) == 0:
        raise InvalidInputError("the prompt has no tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.n_vocab:
        raise InvalidInputError(f"token ids must be in 0..{model.n_vocab - 1}; found {low}..{high}")
    tokens.flags.writeable = False
    return CheckedPrompt(tokens, n_uncut)


def cut_tokens(
    model: LoadedModel, prompt: Input, tokens: NDArray[np.int32], max_length: int | None
) -> NDArray[np.int32]:
    """The tokens of a prompt, truncated on the right to `max_length`.

    A text keeps the EOS (or SEP) that the tokenizer adds: models trained with one are read out there.
    """
    if max_length is None or len(tokens) <= max_length or not isinstance(prompt, str):
        return tokens[:max_length]
    first, last = model.added_tokens
    if last is None or tokens[-1] != last or max_length < (2 if first is None else 3):
        return tokens[:max_length]
    return np.append(tokens[: max_length - 1], tokens[-1:])


def checked_out(out: object, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Check that states of this shape and dtype can be written to `out`. Returns it as a plain array (a
    memmap, say, is a subclass).

    :raises InvalidInputError: they cannot.
    """
    if not isinstance(out, np.ndarray):
        raise InvalidInputError(f"out must be a NumPy array, not {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise InvalidInputError("out must have no mask; give the array under it (out.data)")
    found = dtype_name(out.dtype)
    if found != dtype:
        raise InvalidInputError(f"out is {found}, but dtype={dtype} was requested")
    if out.shape != shape:
        raise InvalidInputError(f"out must have the shape {shape}, not {out.shape}")
    if not out.flags.c_contiguous:
        raise InvalidInputError("out must be C-contiguous")
    if not out.flags.writeable:
        raise InvalidInputError("out is read-only")
    if not out.flags.aligned:
        raise InvalidInputError("out is not aligned to its dtype")
    return out.view(np.ndarray)


def window_bounds(window: Window | None, length: int) -> tuple[int, int]:
    """The positions [begin, end) of a window on a prompt of `length` tokens.

    :raises InvalidInputError: it holds none.
    """
    if window is None:
        return 0, length
    try:
        start, stop = window
        begin, end, _ = slice(start, stop).indices(length)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"a window is a pair (start, stop) of integers or None, not {shown(window)}"
        ) from None
    if begin >= end:
        raise InvalidInputError(f"window {shown(window)} holds no position of a prompt of {length} tokens")
    return begin, end


def window_text(window: Window) -> str:
    """Spell a window as :func:`parse_window` reads it."""
    start, stop = window
    return f"{'' if start is None else start}:{'' if stop is None else stop}"


def parse_window(name: str, text: str) -> Window:
    """Parse a window such as "2:", ":-1" or "2:5".

    :raises InvalidInputError: the text is not a window.
    """
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return (int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise InvalidInputError(f"{name}: expected START:STOP, found {shown(text)}") from None
