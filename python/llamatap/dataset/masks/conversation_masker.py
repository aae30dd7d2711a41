"""ConversationMasker: conversations to token ids with a loss mask over the assistant's turns."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.chat import template as chat_templates
from llamatap.chat.unparsed_tokens import warning_text
from llamatap.dataset.masks.assistant_turns import Render, assistant_turns
from llamatap.dataset.masks.empty_thoughts import ThoughtFrame, find_frames, without_empty_thought
from llamatap.dataset.masks.turn_masker import TurnMasker
from llamatap.dataset.messages import join_parts
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.model import Model

__all__ = ["ConversationMasker"]


class ConversationMasker:
    """Renders conversations with one chat template, and masks the tokens of the assistant's turns.

    :param template: a chat template; None for the model's own.
    :param variables: variables for the template.
    :param supervise_empty_thoughts: include the empty thoughts that the template adds in the mask.
    """

    def __init__(
        self,
        model: Model,
        template: str | None,
        variables: Mapping[str, Any],
        *,
        supervise_empty_thoughts: bool,
    ) -> None:
        self._model = model
        self._template = template
        self._variables = variables
        self._supervise_empty_thoughts = supervise_empty_thoughts
        self._masker = TurnMasker(model)

    def tokens_and_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The token ids of a conversation, int32 ``(n,)``, and its loss mask, bool ``(n,)``.

        :raises InvalidInputError: the template fails, or a turn or its tokens cannot be located.
        :raises UnsupportedError: the template writes control tokens that the tokenizer splits.
        """
        template = self._template or self._model.chat_template
        if template is not None:
            # Before markers are put into them.
            messages = chat_templates.messages_for(template, messages)
        render = self._render(tools)
        text = render(messages)
        if not text:
            raise InvalidInputError("the chat template renders the messages as an empty text")
        self._check_parsed(text, messages)
        if any(isinstance(one.get("content"), list) and str(one["content"]) in text for one in messages):
            # The template does not support content in parts, and writes the list as Python prints it.
            messages = [join_parts(index, message) for index, message in enumerate(messages)]
            text = render(messages)
        turns = assistant_turns(render, messages, text)
        if not self._supervise_empty_thoughts:
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
        tokens = self._model.unparsed_tokens(self._template)
        if tokens:
            # A message may quote such a token: only tokens that the template adds count.
            said = json.dumps(messages, ensure_ascii=False, skipkeys=True, default=str)
            written = {name: token for name, token in tokens.items() if text.count(name) > said.count(name)}
            if written:
                raise UnsupportedError(f"{warning_text(written)}, or give input_ids with a loss_mask")

    @functools.cached_property
    def _frames(self) -> list[ThoughtFrame]:
        return find_frames(self._render())

    def _render(self, tools: Any = None) -> Render:
        variables = dict(self._variables)
        if tools:
            variables["tools"] = tools

        def render(
            some: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = False, **markers: Any
        ) -> str:
            return self._model.apply_chat_template(
                some, add_generation_prompt, template=self._template, **variables, **markers
            )

        return render
