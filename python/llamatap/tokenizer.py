"""The tokenizer and the chat template of a model's file."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap._native import NativeOwner, _core, native_of
from llamatap._validate import flag, integer
from llamatap.chat import template as chat_templates
from llamatap.chat import unparsed_tokens
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = ["Tokenizer", "token_array"]

_logger = logging.getLogger("llamatap")


def token_array(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as int32 ``(n,)``; a copy unless they are that already.

    :raises InvalidInputError: not integers, not one-dimensional, or beyond 32 bits.
    """
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise InvalidInputError(f"token ids must be a flat sequence of integers: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"token ids must be a one-dimensional sequence of integers, not {array.dtype} of "
            f"shape {array.shape}"
        )
    if array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise InvalidInputError(f"token ids must be in 0..2**31-1; found {low}..{high}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidInputError(f"expected a str, found {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the text is not valid Unicode: {error}") from error


class Tokenizer(NativeOwner[_core.Model]):
    """Base of models: text to tokens and back, and messages to text.

    :ivar path: the file.
    """

    path: Path

    def __init__(self) -> None:
        #: Results of :meth:`unparsed_tokens`, by template.
        self._unparsed: dict[str, dict[str, int]] = {}
        self._unparsed_lock = threading.Lock()

    @property
    def bos_token(self) -> int | None:
        """The id of the token that begins a text; None if the vocabulary has none."""
        return native_of(self).bos

    @property
    def eos_token(self) -> int | None:
        """The id of the token that ends a text; None if the vocabulary has none."""
        return native_of(self).eos

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> NDArray[np.int32]:
        """Convert a text to token ids, int32 ``(n,)``.

        :param add_special: add BOS and EOS (CLS and SEP) if the file says so. A text that has its own (e.g. a
            rendered chat template) does not get a second one.
        :param parse_special: parse special tokens in the text; otherwise they are plain text.
        :raises UnsupportedError: the file has no tokenizer.
        """
        native = native_of(self)
        tokens = native.tokenize(
            _utf8(text), flag("add_special", add_special), flag("parse_special", parse_special)
        )
        if not add_special or not text:
            return tokens
        first, last = self.added_tokens
        if first is not None and len(tokens) > 1 and tokens[0] == tokens[1] == first:
            tokens = tokens[1:]
        # An added BOS is not the text's own, even if EOS is the same token.
        fewest = 1 if first is None else 2
        if last is not None and len(tokens) > fewest and tokens[-1] == tokens[-2] == last:
            tokens = tokens[:-1]
        return tokens.copy()

    @functools.cached_property
    def added_tokens(self) -> tuple[int | None, int | None]:
        """The tokens that ``add_special`` puts before and after a text: BOS and EOS, or CLS and SEP, or None.

        :raises UnsupportedError: the file has no tokenizer.
        """
        native = native_of(self)
        alone = native.tokenize(b"", True, False).tolist()
        if len(alone) == 1:
            return (alone[0], None) if native.adds_bos and not native.adds_eos else (None, alone[0])
        return (alone[0], alone[-1]) if alone else (None, None)

    def detokenize(self, tokens: ArrayLike, *, skip_special: bool = False) -> str:
        """Convert token ids to text; invalid UTF-8 becomes U+FFFD.

        :param skip_special: leave out special tokens.
        :raises InvalidInputError: an id is outside of the vocabulary.
        """
        skip = flag("skip_special", skip_special)
        text = native_of(self).detokenize(token_array(tokens), skip, not skip)
        return text.decode(errors="replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token, which may be a part of a UTF-8 character.

        :param special: whether special tokens have their text; otherwise they are empty.
        """
        return native_of(self).piece(integer("a token id", token), flag("special", special))

    def is_end_of_generation(self, token: int) -> bool:
        """Whether a model that emits this token has finished (EOS, EOT, ...)."""
        return native_of(self).is_end_of_generation(integer("a token id", token))

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template (Jinja2), if it has one."""
        return native_of(self).chat_template()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render messages as the model was trained to read them.

        :param messages: mappings with ``role`` and ``content``, and other keys that the template reads.
        :param add_generation_prompt: end with the start of an assistant's turn.
        :param template: a template to use instead of the file's own.
        :param kwargs: variables for the template, e.g. ``tools`` or ``enable_thinking``.
        :returns: text with special tokens in it; :meth:`tokenize` adds no second BOS.
        :raises UnsupportedError: the file has no chat template.
        :raises InvalidInputError: the template fails or refuses the messages.
        """
        text = template if template is not None else self.chat_template
        if text is None:
            raise UnsupportedError(f"{self.path.name} has no chat template; give one as template=")
        found = self._render(text, messages, add_generation_prompt=add_generation_prompt, **kwargs)
        self.unparsed_tokens(text)
        return found

    def unparsed_tokens(self, template: str | None = None) -> dict[str, int]:
        """Control tokens that a chat template writes and that this file does not mark as such.

        :meth:`tokenize` splits them, and the model reads a chat that it was not trained on. The logger
        ``llamatap`` warns of them once per model.

        :param template: a template to use instead of the file's own.
        :returns: their ids by their spelling; empty if there are none, or no template or tokenizer.
        """
        text = template if template is not None else self.chat_template
        if text is None:
            return {}
        if text not in self._unparsed:
            texts = unparsed_tokens.probe_texts(functools.partial(self._render, text))
            try:
                found = unparsed_tokens.find_unparsed(native_of(self), texts)
            except UnsupportedError:
                found = {}
            with self._unparsed_lock:
                first = not any(self._unparsed.values())
                self._unparsed[text] = found
            if found and first:
                _logger.warning("%s: %s", self.path.name, unparsed_tokens.warning_text(found))
        return dict(self._unparsed[text])

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        native = native_of(self)

        def spelled(token: int | None) -> str:
            return "" if token is None else native.token_text(token).decode(errors="replace")

        own = {"bos_token": spelled(native.bos), "eos_token": spelled(native.eos)}
        return chat_templates.render(template, messages, **own | variables)
