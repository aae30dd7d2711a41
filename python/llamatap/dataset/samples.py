"""Samples: what rows become before any state is computed, token ids with a loss mask."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._threads import default_threads
from llamatap._validate import shown
from llamatap.chat import template as chat_templates
from llamatap.chat.messages import NON_CONTENT_FIELDS
from llamatap.chat.unparsed_tokens import warning_text
from llamatap.dataset._masking import Masker
from llamatap.dataset._thoughts import Frame, frames, without_empty_thought
from llamatap.dataset._turns import Render, assistant_turns
from llamatap.dataset.rows import Row
from llamatap.errors import Error, InvalidInputError, UnsupportedError
from llamatap.model import Model
from llamatap.tokenizer import token_array

__all__ = ["Preparation", "Preparer", "Sample", "Samples", "prepare"]

# Threads that prepare rows.
_MOST_THREADS = 4
# Rows that are read before the first of them is done.
_AHEAD = 256

#: ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Sample:
    """A sample, ready to be computed.

    :ivar row: its row of the input, from 0.
    :ivar tokens: int32 ``(n,)``.
    :ivar loss_mask: bool ``(n,)``: the tokens that a loss is computed on.
    """

    row: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class Samples(Sequence[Sample]):
    """Samples in one piece of memory: 5 bytes a token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._mask = array("b")
        self._offsets = array("q", [0])
        self._rows = array("q")

    def append(self, row: int, tokens: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> None:
        self._tokens.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
        self._mask.frombytes(np.ascontiguousarray(loss_mask, np.int8).tobytes())
        self._offsets.append(len(self._tokens))
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        part = slice(self._offsets[index], self._offsets[index + 1])
        tokens = np.array(self._tokens[part], np.int32)
        return Sample(self._rows[index], tokens, np.array(self._mask[part], np.bool_))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 ``(n,)``."""
        offsets = self.offsets
        return offsets[1:] - offsets[:-1]

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of the input that each sample is of, int64 ``(n,)``."""
        return np.array(self._rows, np.int64)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each sample's tokens begin when all lie in a row, and the end: int64 ``(n + 1,)``."""
        return np.array(self._offsets, np.int64)

    @property
    def n_tokens(self) -> int:
        """Tokens of all samples."""
        return len(self._tokens)

    def sha256(self) -> str:
        """A hash of rows, tokens and masks."""
        digest = hashlib.sha256()
        for part in (self._rows, self._offsets, self._tokens, self._mask):
            digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True)
class Preparation:
    """How rows become samples.

    :ivar max_length: longer samples are cut on the right to this many tokens.
    :ivar min_tokens: shorter samples are left out: of one token nothing can be predicted.
    :ivar min_loss_tokens: so are samples with fewer tokens in the loss mask, after they were cut.
    :ivar template: a chat template in place of the model's own.
    :ivar template_variables: variables for it, e.g. ``enable_thinking``.
    :ivar date: what templates take for today, YYYY-MM-DD.
    :ivar supervise_empty_thoughts: whether the empty thoughts that a template adds are in the loss mask.
    """

    max_length: int
    min_tokens: int = 2
    min_loss_tokens: int = 1
    template: str | None = None
    template_variables: Mapping[str, Any] | None = None
    date: str | None = None
    supervise_empty_thoughts: bool = False


@dataclass
class Prepared:
    """The samples of all rows, and how many rows there were."""

    samples: Samples
    n_rows: int
    n_truncated: int


def prepare(
    model: Model, rows: Iterable[Row], how: Preparation, skip: Callable[[int, Error], None]
) -> Prepared:
    """Make samples of rows.

    :param skip: called with each row that gives no sample, and why. What it raises ends the work.
    :raises InvalidInputError: there are no rows.
    :raises UnsupportedError: the model has no tokenizer or chat template for them, or the template writes
        control tokens that the tokenizer splits.
    """
    preparer = Preparer(model, how)
    samples = Samples()
    n_rows = n_truncated = 0

    def attempt(row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool] | Error:
        try:
            return preparer(row)
        except UnsupportedError:
            # The model is at fault, and not the row.
            raise
        except Error as error:
            return error

    coming = iter(rows)
    # Tokenising leaves Python to the other threads.
    with ThreadPoolExecutor(min(_MOST_THREADS, default_threads()), "llamatap-prepare") as threads:
        while some := list(itertools.islice(coming, _AHEAD)):
            for found in threads.map(attempt, some):
                if isinstance(found, Error):
                    skip(n_rows, found)
                else:
                    tokens, mask, truncated = found
                    n_truncated += truncated
                    samples.append(n_rows, tokens, mask)
                n_rows += 1
    if n_rows == 0:
        raise InvalidInputError("the input holds no samples: it is empty")
    return Prepared(samples, n_rows, n_truncated)


def _check_length(n_tokens: int, n_loss: int, how: Preparation) -> None:
    if n_tokens < how.min_tokens:
        raise InvalidInputError(f"it has {n_tokens} tokens, and min_tokens is {how.min_tokens}")
    if n_loss < how.min_loss_tokens:
        raise InvalidInputError(
            f"its loss mask holds {n_loss} of its first {n_tokens} tokens, and min_loss_tokens is "
            f"{how.min_loss_tokens}"
        )


class Preparer:
    """Makes samples of rows, one at a time; remembers what it learnt of the vocabulary."""

    def __init__(self, model: Model, how: Preparation) -> None:
        self._model = model
        self._masker = Masker(model)
        self._how = how
        self._variables: dict[str, Any] = dict(how.template_variables or {})
        if how.date is not None:
            today = _parse_date(how.date)
            self._variables["strftime_now"] = today.strftime

    def __call__(self, row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
        """A row's token ids, int32 ``(n,)``, its loss mask, bool ``(n,)``, and whether they were cut.

        :raises Error: the row gives no sample.
        """
        if isinstance(row, Error):
            raise row
        if not isinstance(row, Mapping):
            raise InvalidInputError(f"a row must be a mapping of columns, not {type(row).__name__}")
        try:
            tokens, mask = self._whole(row)
        except RecursionError:
            raise InvalidInputError("the row is nested too deeply") from None
        limit = self._how.max_length
        truncated = len(tokens) > limit
        tokens, mask = tokens[:limit], mask[:limit]
        _check_length(len(tokens), int(mask.sum()), self._how)
        return tokens, mask, truncated

    def _whole(self, row: Mapping[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        given = {name: value for name, value in row.items() if not _is_missing(value)}
        if "input_ids" in given:
            return self._of_ids(given["input_ids"], given.get("loss_mask"))
        messages = given.get("messages", given.get("conversations"))
        if messages is not None:
            return self._of_messages(_messages(messages), given.get("tools"))
        text = given.get("text")
        if text is None:
            found = ", ".join(map(str, row)) or "none"
            raise InvalidInputError(f"a row needs input_ids, messages, conversations or text; it has {found}")
        if not isinstance(text, str):
            raise InvalidInputError(f"text must be a string, not {type(text).__name__}")
        tokens = self._model.tokenize(text) if text else np.zeros(0, np.int32)
        return tokens, np.ones(len(tokens), np.bool_)

    def _of_ids(self, ids: Any, loss_mask: Any) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        tokens = token_array(ids)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._model.n_vocab:
            raise InvalidInputError(
                f"input_ids must be in 0..{self._model.n_vocab - 1}; found {tokens.min()}..{tokens.max()}"
            )
        if loss_mask is None:
            return tokens, np.ones(len(tokens), np.bool_)
        try:
            mask = np.asarray(loss_mask)
        except ValueError as error:
            raise InvalidInputError(f"loss_mask must be a flat list of 0 and 1: {error}") from None
        if mask.shape != tokens.shape or mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
            raise InvalidInputError(
                f"loss_mask must hold a 0 or 1 for each of the {len(tokens)} input_ids; found {mask.dtype} "
                f"of shape {mask.shape}"
            )
        return tokens, mask.astype(np.bool_)

    def _of_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        template = self._how.template or self._model.chat_template
        if template is not None:
            # Before there are marks in them.
            messages = chat_templates.messages_for(template, messages)
        render = self._render(_tools(tools) if tools else None)
        text = render(messages)
        if not text:
            raise InvalidInputError("the chat template makes an empty text of the messages")
        self._check_parsed(text, messages)
        if any(isinstance(one.get("content"), list) and str(one["content"]) in text for one in messages):
            # The template does not know of parts, and writes them as Python does.
            messages = [_joined(index, message) for index, message in enumerate(messages)]
            text = render(messages)
        turns = assistant_turns(render, messages, text)
        if not self._how.supervise_empty_thoughts:
            turns = [
                without_empty_thought(
                    turn, text, None if turn.message is None else messages[turn.message], self._frames
                )
                for turn in turns
            ]
        return self._masker.mask(text, turns)

    def _check_parsed(self, text: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a text with control tokens that the tokenizer splits.

        :raises UnsupportedError: the template writes some.
        """
        tokens = self._model.unparsed_tokens(self._how.template)
        if tokens:
            # Others may speak of such a token.
            said = json.dumps(messages, ensure_ascii=False, skipkeys=True, default=str)
            written = {name: token for name, token in tokens.items() if text.count(name) > said.count(name)}
            if written:
                raise UnsupportedError(f"{warning_text(written)}, or give input_ids with a loss_mask")

    @functools.cached_property
    def _frames(self) -> list[Frame]:
        return frames(self._render())

    def _render(self, tools: Any = None) -> Render:
        variables = dict(self._variables)
        if tools:
            variables["tools"] = tools

        def render(
            some: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = False, **marks: Any
        ) -> str:
            return self._model.apply_chat_template(
                some, add_generation_prompt, template=self._how.template, **variables, **marks
            )

        return render


def _is_missing(value: Any) -> bool:
    """Whether a row has nothing in a column: pandas, and with it Ray Data, has NaN there."""
    return value is None or (isinstance(value, float) and value != value)


def _parse_date(text: str) -> Any:
    import datetime

    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d")
    except (TypeError, ValueError):
        raise InvalidInputError(f"a date is YYYY-MM-DD, not {text!r}") from None


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """A conversation's messages; ShareGPT's ``from`` and ``value`` are renamed."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise InvalidInputError(f"messages must be a list of messages, not {shown(value):.80}")
    messages: list[Mapping[str, Any]] = []
    for index, message in enumerate(value):
        if isinstance(message, Mapping) and "role" not in message and isinstance(message.get("from"), str):
            role = message["from"]
            message = {"role": _ROLES.get(role, role), "content": message.get("value")}
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInputError(f"message {index} must have a role, and is {shown(message):.80}")
        # Others may have their say in fields of their own.
        names = (
            NON_CONTENT_FIELDS
            if message["role"] == "assistant"
            else [name for name in message if name != "role"]
        )
        if message.get("content") is None and not any(message.get(name) for name in names):
            raise InvalidInputError(
                f"message {index} says nothing: expected a content, found {shown(message):.80}"
            )
        messages.append(message)
    return messages


def _joined(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with a text for content, in place of parts: their texts, a line each."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(
            f"the chat template knows of texts alone, and message {index} has {shown(content):.80}"
        )
    return {**message, "content": "\n".join(map(str, texts))}


def _tools(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"tools is no JSON: {error}") from None
