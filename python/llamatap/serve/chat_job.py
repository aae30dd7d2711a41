"""A request of ``/v1/chat/completions``: the model's chat template on the way in, and its answer's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamatap.errors import UnsupportedError
from llamatap.generation.results import Generation, TokenLogprobs
from llamatap.serve.errors import ApiError
from llamatap.serve.openai_schema import ROLES, ChatRequest
from llamatap.serve.state import Server
from llamatap.serve.text_job import TextJob, finite
from llamatap.serve.worker import ModelWorker

__all__ = ["ChatJob"]

# Variables that other fields of a request set, and Python's own name of an object (self).
_TAKEN = frozenset(("messages", "add_generation_prompt", "template", "self"))

# transformers' own, which some templates look for.
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatJob(TextJob):
    """A request of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    scores_choices = False
    body: ChatRequest

    def __init__(self, server: Server, worker: ModelWorker, body: ChatRequest) -> None:
        super().__init__(server, worker, body)
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

    def inputs(self) -> list[str | Sequence[int]]:
        body = self.body
        messages: list[dict[str, Any]] = []
        for message in body.messages:
            one = message.model_dump(exclude_none=True)
            if isinstance(message.content, list):
                one["content"] = "\n".join(part.text for part in message.content)
            messages.append(one)
        variables = body.chat_template_kwargs or {}
        if taken := _TAKEN & variables.keys():
            raise ApiError.invalid(f"chat_template_kwargs cannot hold {', '.join(sorted(taken))}")
        if body.continue_final_message:
            messages[-1]["content"] = f"{messages[-1].get('content', '')}{_HERE}"
        if self.model.chat_template is None:
            raise UnsupportedError(
                f"{self.worker.name} has no chat template; give a text as it is to /v1/completions"
            )
        self._check_roles(self.model.chat_template)
        text = self.model.apply_chat_template(messages, body.add_generation_prompt, **variables)
        return [_up_to_mark(text) if body.continue_final_message else text]

    def _check_roles(self, template: str) -> None:
        """Refuse unknown roles: many templates write any role, or leave its message out.

        :raises ApiError: a role is none of OpenAI's, and the template does not name it.
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

    def besides(self) -> dict[str, Any]:
        # vLLM has the prompt's ids in each choice of a completion, but here of a chat.
        return {"prompt_token_ids": self.prompts[0].tolist()} if self.body.return_token_ids else {}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.chunk(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                **(self.besides() if index == 0 else {}),
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
    """A rendered conversation up to the end of its last message."""
    end = text.rfind(_HERE.rstrip())
    if end < 0:
        raise ApiError.invalid(
            "continue_final_message: the chat template does not show the last message as it is"
        )
    # A template that cuts the blanks at a message's end would have cut those before the mark too.
    return text[:end] if text[end:].startswith(_HERE) else text[:end].rstrip()
