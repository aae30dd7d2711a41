"""Rows to samples: the ids, conversation or text of each row become token ids with a loss mask."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._threads import default_threads
from llamatap.dataset.masks.conversation_masker import ConversationMasker
from llamatap.dataset.messages import parse_tools, read_messages
from llamatap.dataset.options import DatasetOptions
from llamatap.dataset.row_files import Row
from llamatap.dataset.samples import Samples
from llamatap.errors import Error, InvalidInputError, UnsupportedError
from llamatap.model import Model
from llamatap.tokenizer import token_array

__all__ = ["Prepared", "Preparer", "prepare"]

# Maximum number of threads that prepare rows.
_MOST_THREADS = 4
# Rows read before the first of them is done.
_READ_AHEAD = 256


@dataclass
class Prepared:
    """The samples of all rows, the number of rows, and the number of truncated samples."""

    samples: Samples
    n_rows: int
    n_truncated: int


def prepare(
    model: Model, rows: Iterable[Row], options: DatasetOptions, skip: Callable[[int, Error], None]
) -> Prepared:
    """Turn rows into samples, in several threads.

    :param options: of these, the lengths, the template, its variables and date, and
        ``supervise_empty_thoughts`` are used; samples are not truncated without ``max_length``.
    :param skip: called with each row that gives no sample, and the reason. If it raises, the work ends.
    :raises InvalidInputError: there are no rows.
    :raises UnsupportedError: the model lacks the tokenizer or chat template that the rows need, or the
        template writes control tokens that the tokenizer splits.
    """
    preparer = Preparer(model, options)
    samples = Samples()
    n_rows = n_truncated = 0

    def attempt(row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool] | Error:
        try:
            return preparer(row)
        except UnsupportedError:
            # A fault of the model, not of the row.
            raise
        except Error as error:
            return error

    coming = iter(rows)
    # Threads help because tokenising releases the GIL.
    with ThreadPoolExecutor(min(_MOST_THREADS, default_threads()), "llamatap-prepare") as threads:
        while some := list(itertools.islice(coming, _READ_AHEAD)):
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


class Preparer:
    """Turns one row at a time into a sample. May be shared by threads; caches facts of the vocabulary."""

    def __init__(self, model: Model, options: DatasetOptions) -> None:
        self._model = model
        self._options = options
        variables = dict(options.template_variables)
        if options.date is not None:
            variables["strftime_now"] = _parse_date(options.date).strftime
        self._conversations = ConversationMasker(
            model, options.template, variables, supervise_empty_thoughts=options.supervise_empty_thoughts
        )

    def __call__(self, row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
        """The token ids of a row, int32 ``(n,)``, its loss mask, bool ``(n,)``, and whether it was truncated.

        :raises Error: the row gives no sample.
        """
        if isinstance(row, Error):
            raise row
        if not isinstance(row, Mapping):
            raise InvalidInputError(f"a row must be a mapping of columns, not {type(row).__name__}")
        try:
            tokens, mask = self._untruncated(row)
        except RecursionError:
            raise InvalidInputError("the row is nested too deeply") from None
        limit = self._options.max_length
        truncated = limit is not None and len(tokens) > limit
        tokens, mask = tokens[:limit], mask[:limit]
        _check_length(len(tokens), int(mask.sum()), self._options)
        return tokens, mask, truncated

    def _untruncated(self, row: Mapping[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        given = {name: value for name, value in row.items() if not _is_missing(value)}
        if "input_ids" in given:
            return self._from_ids(given["input_ids"], given.get("loss_mask"))
        messages = given.get("messages", given.get("conversations"))
        if messages is not None:
            tools = given.get("tools")
            checked = read_messages(messages)
            return self._conversations.tokens_and_mask(checked, parse_tools(tools) if tools else None)
        text = given.get("text")
        if text is None:
            found = ", ".join(map(str, row)) or "none"
            raise InvalidInputError(f"a row needs input_ids, messages, conversations or text; it has {found}")
        if not isinstance(text, str):
            raise InvalidInputError(f"text must be a string, not {type(text).__name__}")
        tokens = self._model.tokenize(text) if text else np.zeros(0, np.int32)
        return tokens, np.ones(len(tokens), np.bool_)

    def _from_ids(self, ids: Any, loss_mask: Any) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
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


def _check_length(n_tokens: int, n_loss: int, options: DatasetOptions) -> None:
    if n_tokens < options.min_tokens:
        raise InvalidInputError(f"it has {n_tokens} tokens, but min_tokens is {options.min_tokens}")
    if n_loss < options.min_loss_tokens:
        raise InvalidInputError(
            f"its loss mask has {n_loss} of its first {n_tokens} tokens, but min_loss_tokens is "
            f"{options.min_loss_tokens}"
        )


def _is_missing(value: Any) -> bool:
    """Whether a column of a row is empty: None, or the NaN of pandas and Ray Data."""
    return value is None or (isinstance(value, float) and value != value)


def _parse_date(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d")
    except (TypeError, ValueError):
        raise InvalidInputError(f"a date is YYYY-MM-DD, not {text!r}") from None
