"""A request for hidden states, checked: prompts tokenised, layers resolved, sizes within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap.errors import ContextFullError, InvalidInputError
from llamatap.extraction.inputs import CheckedPrompt, cut_tokens
from llamatap.layers import LayerId
from llamatap.presets import Preset
from llamatap.serve.app_state import AppState
from llamatap.serve.errors import ApiError
from llamatap.serve.hidden_states.schema import HiddenStatesRequest
from llamatap.serve.payload import bytes_of
from llamatap.serve.workers.model_worker import ModelWorker
from llamatap.serve.workers.tasks import ExtractionTask, WantedStates
from llamatap.states import DTYPES

__all__ = ["DEFAULT_LAYER", "CheckedRequest", "check_request"]

#: In transformers' numbering: the state that enters the last block.
DEFAULT_LAYER = -2

# Used if a request has neither max_length nor a preset.
_DEFAULT_MAX_LENGTH = 512

_Prompt: TypeAlias = "str | NDArray[np.int32]"


@dataclass(frozen=True)
class CheckedRequest:
    """A request whose states can be computed.

    :ivar single: whether it has one prompt, rather than a list of them.
    :ivar tasks: one for each prompt.
    """

    body: HiddenStatesRequest
    worker: ModelWorker
    preset: Preset | None
    single: bool
    wanted: WantedStates
    tasks: list[ExtractionTask]

    @property
    def n_bytes(self) -> int:
        """Maximum memory of the response until it is sent."""
        return bytes_of(self._n_numbers, self._itemsize, self.body.encoding_format)

    @property
    def states_bytes(self) -> int:
        """The size of the states before they are encoded."""
        return self._n_numbers * self._itemsize

    @property
    def _n_numbers(self) -> int:
        rows = sum(1 if self.wanted.pooling else len(task.prompt) for task in self.tasks)
        return rows * len(self.wanted.layers) * self.worker.model.n_embd

    @property
    def _itemsize(self) -> int:
        return int(DTYPES[self.wanted.dtype].itemsize)


def check_request(app_state: AppState, worker: ModelWorker, body: HiddenStatesRequest) -> CheckedRequest:
    """Check a request and tokenise its prompts. Long work: run it off the event loop.

    :raises ApiError: the request is wrong, or too large.
    :raises InvalidInputError: a prompt or a layer is wrong.
    """
    preset = _preset(app_state, worker, body)
    _check_count(app_state, body.input if preset is None else body.prompt)
    inputs = _texts(worker, body, preset) if preset is not None else _inputs(body)
    single = not isinstance(inputs, list)
    prompts: list[_Prompt] = inputs if isinstance(inputs, list) else [inputs]
    layers = _layers(worker, body, preset)
    wanted = WantedStates(
        layers,
        max(layer_ids.slots(layers, worker.model.n_layer)),
        body.dtype or "float32",
        body.pooling,
        None if preset is None else preset.rows,
    )
    max_length = _max_length(app_state, body, preset)
    tasks = []
    for index, prompt in enumerate(prompts):
        where = "" if single else f"input {index}: "
        try:
            tasks.append(_task(app_state, worker, preset, wanted, prompt, max_length))
        except ContextFullError as error:
            raise ContextFullError(f"{where}{error}") from None
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}{error}") from None
    checked = CheckedRequest(body, worker, preset, single, wanted, tasks)
    if checked.states_bytes > (limit := app_state.options.max_response_bytes):
        raise ApiError(
            413,
            "invalid_request_error",
            "response_too_large",
            f"the states would take {checked.states_bytes} bytes; this server allows {limit} per response: "
            "request fewer tokens or layers, or float16",
        )
    return checked


def _preset(app_state: AppState, worker: ModelWorker, body: HiddenStatesRequest) -> Preset | None:
    if body.preset is None:
        if body.prompt is not None:
            raise ApiError.invalid("prompt needs a preset; put plain text into input")
        return None
    if body.prompt is None or body.input is not None:
        raise ApiError.invalid("a preset takes a prompt, not an input: it applies the template itself")
    if body.layer is not None or body.layers is not None:
        raise ApiError.invalid("a preset chooses the layers; leave out layer and layers")
    preset = app_state.preset(body.preset)
    preset.check(worker.model)
    return preset


def _check_count(app_state: AppState, given: str | Sequence[object] | None) -> None:
    if not isinstance(given, list) or (given and isinstance(given[0], int)):
        return
    if len(given) > (most := app_state.options.max_inputs):
        raise ApiError.invalid(
            f"{len(given)} inputs; this server allows {most} in a request", "too_many_inputs"
        )
    if not given:
        raise ApiError.invalid("the list of prompts is empty")


def _texts(worker: ModelWorker, body: HiddenStatesRequest, preset: Preset) -> _Prompt | list[_Prompt]:
    """The prompts of a request with a preset, in its template."""
    assert body.prompt is not None
    if isinstance(body.prompt, str):
        return preset.render(worker.model, body.prompt)
    return [preset.render(worker.model, prompt) for prompt in body.prompt]


def _inputs(body: HiddenStatesRequest) -> _Prompt | list[_Prompt]:
    if body.input is None:
        raise ApiError.invalid("input is missing: a text, token ids, or a list of either", "missing_field")
    if isinstance(body.input, str):
        return body.input
    if body.input and isinstance(body.input[0], int):
        return np.array(body.input, np.int32)
    return [one if isinstance(one, str) else np.array(one, np.int32) for one in body.input]


def _layers(worker: ModelWorker, body: HiddenStatesRequest, preset: Preset | None) -> tuple[LayerId, ...]:
    model = worker.model
    if body.layer is not None and body.layers is not None:
        raise ApiError.invalid("give layer or layers, not both")
    if preset is not None:
        return layer_ids.normalize(preset.layer_ids(model), model.n_layer)
    given = body.layers if body.layers is not None else [DEFAULT_LAYER if body.layer is None else body.layer]
    if len(given) > (most := 2 * (model.n_layer + 1)):
        raise ApiError.invalid(
            f"{len(given)} layers; {worker.name} has {model.n_layer + 1}, and a request may name at most "
            f"{most}"
        )
    return layer_ids.normalize(layer_ids.translate_for(model, given, source="transformers"), model.n_layer)


def _max_length(app_state: AppState, body: HiddenStatesRequest, preset: Preset | None) -> int:
    most = app_state.options.max_length
    # The length of a preset is part of it; a preset without one takes the whole text.
    default = min(_DEFAULT_MAX_LENGTH, most) if preset is None else preset.max_length or most
    max_length = body.max_length or default
    if max_length > most:
        raise ApiError.invalid(f"max_length is {max_length}; this server takes at most {most}")
    if preset is not None and preset.max_length is not None and max_length > preset.max_length:
        raise ApiError.invalid(
            f"max_length is {max_length}; preset {preset.name} takes at most {preset.max_length}"
        )
    return max_length


def _task(
    app_state: AppState,
    worker: ModelWorker,
    preset: Preset | None,
    wanted: WantedStates,
    prompt: _Prompt,
    max_length: int,
) -> ExtractionTask:
    whole = app_state.checked_prompt(worker.model, prompt)
    tokens = cut_tokens(worker.model, prompt, whole.tokens, max_length)
    if len(tokens) > (limit := worker.limits.prompt) > 0:
        raise ContextFullError(
            f"the prompt has {len(tokens)} tokens; {worker.name} was trained for {limit}: cut it with "
            "max_length"
        )
    if preset is not None:
        preset.check_rows(len(tokens))
    return ExtractionTask(CheckedPrompt(tokens, len(whole)), wanted)
