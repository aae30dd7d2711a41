"""A request of ``/v1/completions``: prompts as they are, and its answer's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamatap._options import pieces_of
from llamatap._text import TextStream
from llamatap.generation import Generation, TokenLogprobs
from llamatap.serve.errors import ApiError
from llamatap.serve.openai_schema import CompletionRequest
from llamatap.serve.state import Server
from llamatap.serve.text_job import TextJob, finite
from llamatap.serve.worker import ModelWorker

__all__ = ["CompletionJob"]


class CompletionJob(TextJob):
    """Of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    body: CompletionRequest

    def __init__(self, server: Server, worker: ModelWorker, body: CompletionRequest) -> None:
        super().__init__(server, worker, body)
        if body.best_of not in (None, 1, self.n):
            raise ApiError.invalid("best_of is not supported here: n texts are all that are generated")
        #: Of the streamed texts, what their tokens came to so far.
        self._streams: dict[int, TextStream] = {}
        self._opened: set[int] = set()

    @property
    def n_logprobs(self) -> int | None:
        return self.body.logprobs

    @property
    def max_tokens(self) -> int | None:
        return self.body.max_tokens or 16

    def inputs(self) -> list[str | Sequence[int]]:
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError.invalid("the prompt is empty")
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def choice(self, index: int, found: Generation) -> dict[str, Any]:
        logprobs = None if found.logprobs is None else self._logprobs(found.logprobs, self._new_stream())
        choice: dict[str, Any] = {"index": index, "text": found.text, "logprobs": logprobs}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = found.prompt.tolist()
        return choice

    def delta(self, index: int, text: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        found = None
        if logprobs is not None:
            stream = self._streams.setdefault(index, self._new_stream())
            found = self._logprobs([logprobs], stream)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": found, "finish_reason": None}
        if self.body.return_token_ids and index not in self._opened:
            self._opened.add(index)
            choice["prompt_token_ids"] = self.prompts[index // self.n].tolist()
        return choice

    def _new_stream(self) -> TextStream:
        # Stop strings count too: where a token begins does not depend on what comes later.
        return TextStream(pieces_of(self.model), ())

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], stream: TextStream) -> dict[str, Any]:
        offsets = []
        for one in logprobs:
            # Tokens within a character begin where it does.
            offsets.append(len(stream.text))
            stream.push(one.token)
        return {
            "tokens": [self._spelled(one.token) for one in logprobs],
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """The most likely ones by their texts, and the one that was chosen."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            # Of tokens with the same text the most likely one.
            found.setdefault(self._spelled(token), finite(logprob))
        return found

    def _spelled(self, token: int) -> str:
        """A token; what is no text of its own is spelled as OpenAI spells it."""
        data = self.model.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
