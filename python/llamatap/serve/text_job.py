"""A request for text, between its body and the generation of its texts: options on the way in, choices on the
way out."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import numpy as np
import orjson
from fastapi import Response
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap.errors import ContextFullError
from llamatap.generation.api import GenerateOptions
from llamatap.generation.results import Event, Generation, TokenLogprobs
from llamatap.layers import LayerId
from llamatap.serve.errors import ApiError
from llamatap.serve.openai_schema import Sampling
from llamatap.serve.payload import as_array, as_lists, bytes_of
from llamatap.serve.state import Server
from llamatap.serve.worker import ModelWorker

__all__ = ["TextJob", "finite"]

# Bytes of one token among the log-probabilities of a prompt, from computation until sent: the entry, its
# text, and the JSON of both.
_LOGPROB_BYTES = 400

_FINISH = {"stop": "stop", "length": "length", "context": "length", "cancelled": "length"}


class TextJob(ABC):
    """A request for text; one object a request.

    :raises ApiError: it asks for what cannot be had.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]
    #: Whether it has ``prompt_logprobs`` in each choice, as vLLM does of completions, or once.
    scores_choices: ClassVar[bool]
    #: How to get log-probabilities of a prompt all the same where ``stream`` is asked for.
    scores_streams: ClassVar[str] = "ask without stream"

    def __init__(self, server: Server, worker: ModelWorker, body: Sampling) -> None:
        self.server = server
        self.worker = worker
        self.model = worker.model
        self.body = body
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.n = body.n or 1
        #: Prompts as the request gave them, and their tokens; after :meth:`prepare`.
        self.given: list[str | Sequence[int]] = []
        self.prompts: list[NDArray[np.int32]] = []
        self.layer: LayerId | None = None
        self.verifier_layers: tuple[LayerId, ...] = ()
        #: The most memory that its states take until they are sent; after :meth:`prepare`.
        self.n_bytes = 0
        if body.stream_options is not None and not body.stream:
            raise ApiError.invalid("stream_options is of stream, which is not asked for")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError.invalid(
                f"prompt_logprobs does not go with stream: {self.scores_streams}",
                "unsupported_combination",
            )
        if body.return_hidden_states:
            if body.stream:
                raise ApiError.invalid(
                    "return_hidden_states does not go with stream: ask without stream, or for the states of "
                    "the finished text with POST /v1/hidden_states",
                    "unsupported_combination",
                )
            if self.n > 1:
                raise ApiError.invalid(
                    "return_hidden_states does not go with n > 1: send a request for each text, with a seed "
                    "of its own",
                    "unsupported_combination",
                )
        elif body.layer is not None:
            raise ApiError.invalid("layer is of return_hidden_states, which is not asked for")

    @property
    @abstractmethod
    def n_logprobs(self) -> int | None:
        """How many of the most likely tokens to report."""

    @property
    def n_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to report at each token of the prompt."""
        return self.body.prompt_logprobs

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """The most tokens of a text, as the request gives it."""

    @abstractmethod
    def inputs(self) -> list[str | Sequence[int]]:
        """The prompts of the request."""

    @abstractmethod
    def choice(self, index: int, found: Generation) -> dict[str, Any]:
        """The choice of a finished text."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        """The choice of a piece of a streamed text; each token comes once, in order."""

    def prepare(self) -> None:
        """Tokenise; off the event loop, for it may be long work.

        :raises InvalidInputError: a prompt is wrong.
        """
        self.given = inputs = self.inputs()
        if len(inputs) * self.n > self.server.options.max_inputs:
            raise ApiError.invalid(
                f"{len(inputs) * self.n} texts; this server gives {self.server.options.max_inputs} in a "
                "response",
                "too_many_inputs",
            )
        n_scored = self.n_prompt_logprobs
        if self.n_logprobs is not None or n_scored is not None or self.body.stop is not None:
            # Raises where the model has no tokenizer, and so no texts to look for or to show.
            self.model.token_bytes(0)
        self.prompts = [self.server.tokens(self.model, one) for one in inputs]
        most = self.worker.text_limit
        for prompt in self.prompts:
            if len(prompt) > most:
                raise ContextFullError(
                    f"the prompt has {len(prompt)} tokens; {self.worker.name} takes texts of {most} at most"
                )
        if n_scored is not None:
            self.n_bytes += sum(map(len, self.prompts)) * self.n * (n_scored + 1) * _LOGPROB_BYTES
        if self.body.return_hidden_states:
            (found,) = layer_ids.translate_for(
                self.model, [-1 if self.body.layer is None else self.body.layer], source="transformers"
            )
            (self.layer,) = layer_ids.normalize(found, self.model.n_layer)
            rows = sum(len(one) + self._most_tokens(one) for one in self.prompts)
            limit = self.server.options.max_response_bytes
            n_numbers = rows * self.model.n_embd
            if self.body.return_hidden_states is True:
                self.n_bytes += bytes_of(n_numbers, 4, "float")
            if self.body.return_hidden_states is True and 4 * n_numbers > limit:
                raise ApiError(
                    413,
                    "invalid_request_error",
                    "response_too_large",
                    f"the states of {rows} tokens are more than {limit} bytes, what this server gives in a "
                    "response: ask for the last token's, or for a shorter text",
                )
        verifier = self.server.verifier
        if verifier is not None and self.body.return_token_ids and not self.body.stream and self.n == 1:
            if len(self.prompts) > 1:
                raise ApiError.invalid("a verifier takes one prompt a request")
            self.verifier_layers = verifier.layers(self.model)
            n_tokens, width = len(self.prompts[0]), len(self.verifier_layers) * self.model.n_embd
            # Again when the file is written; a refusal is cheaper now.
            verifier.check_room(n_tokens, width)
            self.n_bytes += bytes_of(n_tokens * width, 4, "safetensors")

    def _most_tokens(self, prompt: NDArray[np.int32]) -> int:
        """The most tokens that may be generated after a prompt. A request that does not say gets shares of
        the context, as many as leave it a quarter of one."""
        share = self.worker.text_room
        shares = (len(prompt) + share // 4) // share + 1
        most = self.worker.text_limit
        wanted = self.max_tokens
        if wanted is None:
            wanted = max(min(shares * share, most) - len(prompt), 1)
        # The last token needs no place.
        return min(wanted, most + 1 - len(prompt))

    def _options(self, prompt: NDArray[np.int32], number: int) -> GenerateOptions:
        body = self.body
        options: GenerateOptions = {
            "max_tokens": self._most_tokens(prompt),
            # As vLLM does, lest logits overflow.
            "temperature": 1.0 if body.temperature is None else body.temperature * (body.temperature >= 1e-5),
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(body.top_k or 0, 0),
            "min_p": body.min_p or 0.0,
            "repeat_penalty": body.repetition_penalty or 1.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "presence_penalty": body.presence_penalty or 0.0,
            "stop": () if body.stop is None else body.stop,
            "stop_tokens": body.stop_token_ids or (),
            "ignore_eos": bool(body.ignore_eos),
            "logprobs": self.n_logprobs,
            "prompt_logprobs": self.n_prompt_logprobs,
        }
        if body.logit_bias:
            options["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        if body.seed is not None:
            options["seed"] = (body.seed + number * 0x9E3779B1) % (2**32 - 1)
        layers: tuple[LayerId, ...] = self.verifier_layers
        if self.layer is not None:
            layers += (self.layer,)
            options["states"] = "last" if body.return_hidden_states == "last" else "full"
        if layers:
            options["layers"] = tuple(dict.fromkeys(layers))
            options["prompt_states"] = bool(self.verifier_layers) or body.return_hidden_states is True
        return options

    def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events of all texts, with their choice's number; after :meth:`prepare`."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        texts = [(prompt, self._options(prompt, number)) for number, prompt in enumerate(prompts)]
        return self.worker.generate(texts, streamed=bool(self.body.stream))

    # Responses.

    def frame(self, choices: list[dict[str, Any]], *, whole: bool = False) -> dict[str, Any]:
        """A response, or a chunk of one."""
        return {
            "id": self.id,
            "object": self.kind if whole else self.chunk_kind,
            "created": self.created,
            "model": self.worker.name,
            "choices": choices,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before all others."""
        return []

    def besides(self) -> dict[str, Any]:
        """Further fields of the whole answer, and of its first chunk."""
        return {}

    def has_prologue(self, index: int) -> bool:
        """Whether the next chunks of a text begin with its prompt, which is long work."""
        return False

    def prologue(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Choices of the chunks that come before a text's own."""
        return []

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event."""
        found = self.prologue(index, event)
        has_token = event.token >= 0
        ids = {"token_ids": [event.token] if has_token else []} if self.body.return_token_ids else {}
        if event.text or (has_token and (ids or event.logprobs is not None)):
            found.append(self.delta(index, event.text, event.logprobs if has_token else None) | ids)
        if event.final is not None:
            last = self.delta(index, "", None)
            last["finish_reason"] = _FINISH[event.final.finish_reason]
            found.append(last | {"token_ids": []} if ids else last)
        return [self.chunk([one]) for one in found]

    def chunk(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        """An event of a stream."""
        # Where usage is asked for, all chunks have it: null but in the last one.
        usage = {"usage": None} if self.wants_usage else {}
        return self.frame(choices) | usage | more

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def usage(self, done: dict[int, Generation]) -> dict[str, int]:
        """Tokens; a prompt with several texts counts once."""
        prompt = sum(len(one) for one in self.prompts)
        completion = sum(len(one.tokens) for one in done.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def response(self, done: dict[int, Generation]) -> Response:
        """The whole answer; off the event loop."""
        choices = []
        for index, found in sorted(done.items()):
            choice = self.choice(index, found)
            choice["finish_reason"] = _FINISH[found.finish_reason]
            if self.body.return_token_ids:
                choice["token_ids"] = found.tokens.tolist()
            if self.body.return_hidden_states:
                choice["hidden_states"] = self._hidden_states(found)
            if self.body.prompt_logprobs is not None and self.scores_choices:
                choice["prompt_logprobs"] = self._prompt_logprobs(found)
            choices.append(choice)
        content = self.frame(choices, whole=True) | {"usage": self.usage(done)}
        content |= self.besides()
        if self.body.prompt_logprobs is not None and not self.scores_choices:
            content["prompt_logprobs"] = self._prompt_logprobs(done[0])
        if self.layer is not None:
            content |= self._about_states(done[0])
        if self.verifier_layers:
            content["kv_transfer_params"] = {"hidden_states_path": self._leave_file(done[0])}
        return Response(orjson.dumps(content), media_type="application/json")

    def _prompt_logprobs(self, found: Generation) -> orjson.Fragment:
        """Log-probabilities of the prompt as vLLM gives them: by token id, the prompt's own token first."""
        assert found.prompt_logprobs is not None
        return as_array(map(self._candidates, found.prompt_logprobs))

    def _candidates(self, one: TokenLogprobs | None) -> dict[str, Any] | None:
        if one is None:
            return None
        ranks = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
        found = dict(((one.token, one.logprob), *one.top[: self.body.prompt_logprobs]))
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token),
                "decoded_token": self.model.token_bytes(token).decode(errors="replace"),
            }
            for token, logprob in found.items()
        }

    def _about_states(self, found: Generation) -> dict[str, Any]:
        """The fields that describe ``hidden_states``, as ``/v1/hidden_states`` has them."""
        assert found.states is not None
        assert self.layer is not None
        about = found.states.select((self.layer,)).provenance
        return {
            "layer": -1 if self.body.layer is None else self.body.layer,
            "dtype": "float32",
            "provenance": {
                key: about[key] for key in about if key not in ("window", "max_length", "pooling")
            },
        }

    def _hidden_states(self, found: Generation) -> orjson.Fragment:
        """The prompt's rows and then one a token, or the last one's."""
        assert self.layer is not None
        assert found.states is not None
        rows = found.states[self.layer]
        _check_finite(rows)
        if self.body.return_hidden_states == "last":
            return orjson.Fragment(b"".join(as_lists(rows[-1])) if len(rows) else b"null")
        assert found.prompt_states is not None
        prompt = found.prompt_states[self.layer]
        _check_finite(prompt)
        entries = [as_lists(prompt), *(as_lists(row) for row in rows)]
        return orjson.Fragment(b"[" + b",".join(b"".join(one) for one in entries) + b"]")

    def _leave_file(self, found: Generation) -> str:
        verifier = self.server.verifier
        assert verifier is not None
        assert found.prompt_states is not None
        states = found.prompt_states.select(self.verifier_layers)
        _check_finite(states.array)
        return str(verifier.leave(states))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; OpenAI's own stand-in for what cannot be."""
    return max(logprob, -9999.0)


def _check_finite(array: NDArray[Any]) -> None:
    if not np.isfinite(array).all():
        raise ApiError(
            422, "model_error", "not_finite", "the states hold NaN or infinity; see `llamatap info`"
        )
