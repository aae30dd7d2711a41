"""Handler of ``/v1/chat/completions``: applies the chat template, and builds the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamatap.errors import UnsupportedError
from llamatap.generation.results import Generation, TokenLogprobs
from llamatap.serve.app_state import AppState
from llamatap.serve.completions.logprobs import finite
from llamatap.serve.completions.schema import ROLES, ChatRequest
from llamatap.serve.completions.text_handler import TextHandler
from llamatap.serve.errors import ApiError
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["ChatHandler"]

# Template variables that other fields of a request set, and names reserved by Python.
_RESERVED = frozenset(("messages", "add_generation_prompt", "template", "self"))

# The mark of transformers; some templates look for it.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatHandler(TextHandler):
    """Handles one request of ``/v1/chat/completions``."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    choices_have_prompt_logprobs = False
    body: ChatRequest

    def __init__(self, app_state: AppState, worker: ModelWorker, body: ChatRequest) -> None:
        super().__init__(app_state, worker, body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError.invalid("top_logprobs needs logprobs: true")
        if body.continue_final_message and body.add_generation_prompt:
            raise ApiError.invalid(
                "continue_final_message and add_generation_prompt exclude each other: set the latter to false"
            )

    @property
    def n_logprobs(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    @property
    def max_tokens(self) -> int | None:
        return self.body.max_completion_tokens or self.body.max_tokens

    def read_inputs(self) -> list[str | Sequence[int]]:
        body = self.body
        messages: list[dict[str, Any]] = []
        for message in body.messages:
            one = message.model_dump(exclude_none=True)
            if isinstance(message.content, list):
                one["content"] = "\n".join(part.text for part in message.content)
            messages.append(one)
        variables = body.chat_template_kwargs or {}
        if taken := _RESERVED & variables.keys():
            raise ApiError.invalid(f"chat_template_kwargs cannot hold {', '.join(sorted(taken))}")
        if body.continue_final_message:
            messages[-1]["content"] = f"{messages[-1].get('content', '')}{_MARK}"
        if self.model.chat_template is None:
            raise UnsupportedError(
                f"{self.worker.name} has no chat template; send plain text to /v1/completions"
            )
        self._check_roles(self.model.chat_template)
        text = self.model.apply_chat_template(messages, body.add_generation_prompt, **variables)
        return [_up_to_mark(text) if body.continue_final_message else text]

    def _check_roles(self, template: str) -> None:
        """Refuse unknown roles: many templates print any role, or leave its message out.

        :raises ApiError: a role is neither OpenAI's nor named in the template.
        """
        for index, message in enumerate(self.body.messages):
            role = message.role
            if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
                raise ApiError.invalid(
                    f"messages[{index}].role: there is no role {role[:100]!r}; known are "
                    f"{', '.join(ROLES)}, and those that the chat template names"
                )

    def choice(self, index: int, found: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": found.text, "refusal": None},
            "logprobs": None if found.logprobs is None else self._logprobs(found.logprobs),
        }

    def extra_fields(self) -> dict[str, Any]:
        # vLLM puts the ids of the prompt here for a chat, but into each choice for a completion.
        return {"prompt_token_ids": list(self.prompts[0])} if self.body.return_token_ids else {}

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.chunk(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                **(self.extra_fields() if index == 0 else {}),
            )
            for index in range(self.n)
        ]

    def delta(self, index: int, text: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        found = None if logprobs is None else self._logprobs([logprobs])
        delta = {"content": text} if text or found else {}
        return {"index": index, "delta": delta, "logprobs": found, "finish_reason": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._logprob(one.token, one.logprob)
            | {"top_logprobs": [self._logprob(token, logprob) for token, logprob in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.model.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def _up_to_mark(text: str) -> str:
    """Cut a rendered conversation at the mark, which ends its last message."""
    end = text.rfind(_MARK.rstrip())
    if end < 0:
        raise ApiError.invalid(
            "continue_final_message: the chat template does not write the last message unchanged"
        )
    # A template that strips the end of a message (the mark's blank) would also strip the text before it.
    return text[:end] if text[end:].startswith(_MARK) else text[:end].rstrip()
