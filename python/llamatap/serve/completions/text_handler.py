"""Handler of one request for text: from its body to the generation of its texts, and to the response."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import orjson
from fastapi import Response

from llamatap.errors import ContextFullError
from llamatap.extraction.inputs import CheckedPrompt
from llamatap.generation.api import GenerateOptions
from llamatap.generation.results import Event, Generation, TokenLogprobs
from llamatap.serve.app_state import AppState
from llamatap.serve.completions.logprobs import prompt_logprobs, prompt_logprobs_bytes
from llamatap.serve.completions.returned_states import ReturnedStates
from llamatap.serve.completions.schema import Sampling
from llamatap.serve.completions.verifier_file import VerifierFile
from llamatap.serve.errors import ApiError
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["TextHandler"]

_FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length", "cancelled": "length"}


class TextHandler(ABC):
    """Handles one request for text: checks it, sets the options of its texts, builds the response.

    :raises ApiError: the request cannot be served.
    """

    #: ``object`` of a response, and of a chunk of a stream.
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    id_prefix: ClassVar[str]
    #: Whether each choice has ``prompt_logprobs``, as in vLLM's completions, or the response has them once.
    choices_have_prompt_logprobs: ClassVar[bool]
    #: Advice to a request that combines ``prompt_logprobs`` with ``stream``.
    stream_advice: ClassVar[str] = "send the request without stream"

    def __init__(self, app_state: AppState, worker: ModelWorker, body: Sampling) -> None:
        self.app_state = app_state
        self.worker = worker
        self.model = worker.model
        self.body = body
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        #: Texts for each prompt.
        self.n = body.n or 1
        #: Prompts as in the request, and as token ids; set by :meth:`prepare`.
        self.inputs: list[str | Sequence[int]] = []
        self.prompts: list[CheckedPrompt] = []
        self.returned_states: ReturnedStates | None = None
        self.verifier_file: VerifierFile | None = None
        #: Maximum memory of states and log-probabilities until they are sent; set by :meth:`prepare`.
        self.n_bytes = 0
        self._check_combinations()

    def _check_combinations(self) -> None:
        body = self.body
        if body.stream_options is not None and not body.stream:
            raise ApiError.invalid("stream_options needs stream: true")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError.invalid(
                f"prompt_logprobs cannot be combined with stream: {self.stream_advice}",
                "unsupported_combination",
            )
        if not body.return_hidden_states:
            if body.layer is not None:
                raise ApiError.invalid("layer needs return_hidden_states")
            return
        if body.stream:
            raise ApiError.invalid(
                "return_hidden_states cannot be combined with stream: send the request without stream, or "
                "get "
                "the states of the finished text with POST /v1/hidden_states",
                "unsupported_combination",
            )
        if self.n > 1:
            raise ApiError.invalid(
                "return_hidden_states cannot be combined with n > 1: send a request for each text, with its "
                "own "
                "seed",
                "unsupported_combination",
            )

    # Differences between the endpoints.

    @property
    @abstractmethod
    def n_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each token; None for no log-probabilities."""

    @property
    def n_prompt_logprobs(self) -> int | None:
        """The same at each token of the prompt."""
        return self.body.prompt_logprobs

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of a text, from the request."""

    @abstractmethod
    def read_inputs(self) -> list[str | Sequence[int]]:
        """The prompts of the request."""

    @abstractmethod
    def choice(self, index: int, found: Generation) -> dict[str, Any]:
        """The choice of a finished text."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        """The choice in a chunk of a streamed text. Called once for each token, in order."""

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks that open a stream."""
        return []

    def extra_fields(self) -> dict[str, Any]:
        """Further fields of a whole response, and of the first chunk of a stream."""
        return {}

    def must_echo(self, index: int) -> bool:
        """Whether the next chunk of a text is its prompt, which takes long to make."""
        return False

    def echo(self, index: int, event: Event) -> dict[str, Any]:
        """The choice in the chunk that echoes the prompt of a text."""
        raise NotImplementedError

    # From the request to its texts.

    def prepare(self) -> None:
        """Tokenise the prompts and check sizes. Long work: run it off the event loop.

        :raises ApiError: the response would be too large.
        :raises InvalidInputError: a prompt is wrong.
        """
        self.inputs = self.read_inputs()
        n_texts = len(self.inputs) * self.n
        if n_texts > (most := self.app_state.options.max_inputs):
            raise ApiError.invalid(
                f"{n_texts} texts; this server allows {most} in a response", "too_many_inputs"
            )
        if self.n_logprobs is not None or self.n_prompt_logprobs is not None or self.body.stop is not None:
            # Raises if the model has no tokenizer, and so no texts to search or to show.
            self.model.token_bytes(0)
        self.prompts = [self._checked_prompt(given) for given in self.inputs]
        if (n_scored := self.n_prompt_logprobs) is not None:
            n_tokens = sum(map(len, self.prompts)) * self.n
            self.n_bytes += prompt_logprobs_bytes(n_tokens, n_scored)
        if self.body.return_hidden_states:
            n_rows = sum(len(prompt) + self._most_tokens(prompt) for prompt in self.prompts)
            self.returned_states = ReturnedStates(self.model, self.body)
            self.returned_states.check_size(n_rows, self.app_state.options.max_response_bytes)
            self.n_bytes += self.returned_states.n_bytes(n_rows)
        verifier = self.app_state.verifier
        if verifier is not None and self.body.return_token_ids and not self.body.stream and self.n == 1:
            if len(self.prompts) > 1:
                raise ApiError.invalid("a verifier takes one prompt per request")
            self.verifier_file = VerifierFile(verifier, self.model, len(self.prompts[0]))
            self.n_bytes += self.verifier_file.n_bytes

    def _checked_prompt(self, given: str | Sequence[int]) -> CheckedPrompt:
        prompt = self.app_state.checked_prompt(self.model, given)
        if len(prompt) > (most := self.worker.limits.text):
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens; {self.worker.name} takes texts of at most {most}"
            )
        return prompt

    def _most_tokens(self, prompt: CheckedPrompt) -> int:
        """Maximum number of tokens to generate after a prompt. Without a number in the request, a text gets
        whole shares of the context, as many as leave at least a quarter of one for it."""
        share = self.worker.limits.text_share
        n_shares = (len(prompt) + share // 4) // share + 1
        most = self.worker.limits.text
        wanted = self.max_tokens
        if wanted is None:
            wanted = max(min(n_shares * share, most) - len(prompt), 1)
        # The last token needs no position in the context.
        return min(wanted, most + 1 - len(prompt))

    def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Generate the texts, after :meth:`prepare`: events, with the numbers of their choices."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        texts = [(prompt, self._options(prompt, index)) for index, prompt in enumerate(prompts)]
        return self.worker.generate(texts, streamed=bool(self.body.stream))

    def _options(self, prompt: CheckedPrompt, index: int) -> GenerateOptions:
        options = self.body.generate_options()
        options["max_tokens"] = self._most_tokens(prompt)
        options["logprobs"] = self.n_logprobs
        options["prompt_logprobs"] = self.n_prompt_logprobs
        if (seed := options.get("seed")) is not None:
            options["seed"] = (seed + index * 0x9E3779B1) % (2**32 - 1)
        layers = () if self.verifier_file is None else self.verifier_file.layers
        if self.returned_states is not None:
            layers += (self.returned_states.layer,)
            options["states"] = "full" if self.returned_states.full else "last"
        if layers:
            options["layers"] = tuple(dict.fromkeys(layers))
            options["prompt_states"] = self.verifier_file is not None or (
                self.returned_states is not None and self.returned_states.full
            )
        return options

    # From the texts to the response.

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event."""
        choices = [self.echo(index, event)] if self.must_echo(index) else []
        has_token = event.token >= 0
        ids = {"token_ids": [event.token] if has_token else []} if self.body.return_token_ids else {}
        if event.text or (has_token and (ids or event.logprobs is not None)):
            choices.append(self.delta(index, event.text, event.logprobs if has_token else None) | ids)
        if event.final is not None:
            last = self.delta(index, "", None)
            last["finish_reason"] = _FINISH_REASONS[event.final.finish_reason]
            choices.append(last | {"token_ids": []} if ids else last)
        return [self.chunk([choice]) for choice in choices]

    def chunk(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """A chunk of a stream."""
        # If usage is requested, every chunk has it: null in all except the last.
        usage = {"usage": None} if self.wants_usage else {}
        return self._envelope(self.chunk_object_name, choices) | usage | more

    @property
    def wants_usage(self) -> bool:
        """Whether the last chunk of a stream reports the number of tokens."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def usage(self, done: dict[int, Generation]) -> dict[str, int]:
        """Numbers of tokens. A prompt with several texts counts once."""
        prompt = sum(map(len, self.prompts))
        completion = sum(len(found.tokens) for found in done.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def response(self, done: dict[int, Generation]) -> Response:
        """The whole response. Long work: run it off the event loop.

        :raises ApiError: 422, states contain NaN or infinity; 503, there is no room for the verifier's file.
        """
        choices = [self._whole_choice(index, found) for index, found in sorted(done.items())]
        content = self._envelope(self.object_name, choices) | {"usage": self.usage(done)}
        content |= self.extra_fields()
        if self.body.prompt_logprobs is not None and not self.choices_have_prompt_logprobs:
            content["prompt_logprobs"] = self._prompt_logprobs(done[0])
        if self.returned_states is not None:
            content |= self.returned_states.description(done[0])
        if self.verifier_file is not None:
            path = self.verifier_file.write(done[0])
            content["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return Response(orjson.dumps(content), media_type="application/json")

    def _whole_choice(self, index: int, found: Generation) -> dict[str, Any]:
        choice = self.choice(index, found)
        choice["finish_reason"] = _FINISH_REASONS[found.finish_reason]
        if self.body.return_token_ids:
            choice["token_ids"] = found.tokens.tolist()
        if self.returned_states is not None:
            choice["hidden_states"] = self.returned_states.as_json(found)
        if self.body.prompt_logprobs is not None and self.choices_have_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(found)
        return choice

    def _prompt_logprobs(self, found: Generation) -> orjson.Fragment:
        assert found.prompt_logprobs is not None
        assert self.body.prompt_logprobs is not None
        return prompt_logprobs(self.model, found.prompt_logprobs, self.body.prompt_logprobs)

    def _envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.worker.name,
            "choices": choices,
        }
