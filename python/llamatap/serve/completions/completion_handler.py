"""Handler of ``/v1/completions``: takes prompts unchanged, and builds the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from llamatap.generation.options import token_bytes
from llamatap.generation.results import Event, Generation, TokenLogprobs
from llamatap.generation.text_stream import TextStream
from llamatap.serve.app_state import AppState
from llamatap.serve.completions.echo import offsets_in, text_of
from llamatap.serve.completions.logprobs import finite
from llamatap.serve.completions.schema import CompletionRequest
from llamatap.serve.completions.text_handler import TextHandler
from llamatap.serve.errors import ApiError
from llamatap.serve.payload import as_array
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["CompletionHandler"]

#: A token of the legacy ``logprobs``: its id, its log-probabilities (None for the first token of a prompt),
#: and its offset in characters.
_Row: TypeAlias = "tuple[int, TokenLogprobs | None, int]"


class CompletionHandler(TextHandler):
    """Handles one request of ``/v1/completions``."""

    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl"
    choices_have_prompt_logprobs = True
    stream_advice = "send the request without stream, or with echo and logprobs"
    body: CompletionRequest

    def __init__(self, app_state: AppState, worker: ModelWorker, body: CompletionRequest) -> None:
        super().__init__(app_state, worker, body)
        if body.best_of not in (None, 1, self.n):
            raise ApiError.invalid("best_of is not supported: only n texts are generated")
        if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
            raise ApiError.invalid(
                "max_tokens is 0, so the response would be empty: also request echo or prompt_logprobs"
            )
        #: By choice: the streamed text so far, decoded from its tokens.
        self._streams: dict[int, TextStream] = {}
        #: Choices with at least one sent chunk.
        self._opened: set[int] = set()
        #: By choice, once its prompt was echoed: the number of characters of the prompt.
        self._echoed: dict[int, int] = {}

    @property
    def n_logprobs(self) -> int | None:
        return self.body.logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        body = self.body
        wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
        # With max_tokens 0 the log-probabilities of the prompt are all there is to compute.
        wanted.append(0 if body.max_tokens == 0 else None)
        return max((one for one in wanted if one is not None), default=None)

    @property
    def max_tokens(self) -> int | None:
        return 16 if self.body.max_tokens is None else self.body.max_tokens

    def read_inputs(self) -> list[str | Sequence[int]]:
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError.invalid("the prompt is empty")
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def choice(self, index: int, found: Generation) -> dict[str, Any]:
        prompt = ""
        rows: list[_Row] = []
        if self.body.echo:
            prompt, rows = self._prompt(index, found.prompt_logprobs)
        if found.logprobs is not None:
            rows += self._rows(found.logprobs, self._new_stream(), len(prompt))
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt + found.text,
            "logprobs": None if found.logprobs is None else self._logprobs(rows),
        }
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = found.prompt.tolist()
        return choice

    def delta(self, index: int, text: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        rows = None
        if logprobs is not None:
            stream = self._streams.setdefault(index, self._new_stream())
            rows = self._rows([logprobs], stream, self._echoed.get(index, 0))
        return self._chunk_choice(index, text, rows)

    def must_echo(self, index: int) -> bool:
        return bool(self.body.echo) and index not in self._echoed

    def echo(self, index: int, event: Event) -> dict[str, Any]:
        text, rows = self._prompt(index, event.prompt_logprobs)
        self._echoed[index] = len(text)
        choice = self._chunk_choice(index, text, None if self.body.logprobs is None else rows)
        return choice | {"token_ids": []} if self.body.return_token_ids else choice

    def _chunk_choice(self, index: int, text: str, rows: Sequence[_Row] | None) -> dict[str, Any]:
        found = None if rows is None else self._logprobs(rows)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": found, "finish_reason": None}
        if self.body.return_token_ids and index not in self._opened:
            self._opened.add(index)
            choice["prompt_token_ids"] = list(self.prompts[index // self.n])
        return choice

    def _new_stream(self) -> TextStream:
        # Without stop strings: the offset of a token does not depend on later ones.
        return TextStream(token_bytes(self.model), ())

    def _prompt(self, index: int, logprobs: Sequence[TokenLogprobs | None] | None) -> tuple[str, list[_Row]]:
        """The text of a choice's prompt, and the rows of its tokens if log-probabilities are requested."""
        given = self.inputs[index // self.n]
        text = text_of(self.model, given)
        if self.body.logprobs is None or logprobs is None:
            return text, []
        tokens = list(self.prompts[index // self.n])
        offsets = offsets_in(self.model, given, tokens)
        return text, list(zip(tokens, logprobs, offsets, strict=True))

    def _rows(self, logprobs: Sequence[TokenLogprobs], stream: TextStream, begin: int) -> list[_Row]:
        """The rows of a text's tokens.

        :param begin: characters before the text.
        """
        rows: list[_Row] = []
        for one in logprobs:
            # A token within a character begins where the character does.
            rows.append((one.token, one, begin + len(stream.text)))
            stream.push(one.token)
        return rows

    def _logprobs(self, rows: Sequence[_Row]) -> dict[str, Any]:
        return {
            "tokens": as_array(self._spelled(token) for token, _, _ in rows),
            "token_logprobs": as_array(None if one is None else finite(one.logprob) for _, one, _ in rows),
            "top_logprobs": as_array(None if one is None else self._top(one) for _, one, _ in rows),
            "text_offset": as_array(offset for _, _, offset in rows),
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities of the most likely tokens and of the token itself, by text."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top[: self.body.logprobs], (one.token, one.logprob)):
            # Among tokens with the same text, keep the most likely one.
            found.setdefault(self._spelled(token), finite(logprob))
        return found

    def _spelled(self, token: int) -> str:
        """The text of a token; bytes that are not valid UTF-8 are spelled as in OpenAI's API."""
        data = self.model.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
