"""State of an app: the models, presets and limits that its routes share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.extraction.inputs import CheckedPrompt, checked_prompt
from llamatap.model import Model
from llamatap.presets import Preset, load_preset, preset_names
from llamatap.serve.drain_deadline import DrainDeadline
from llamatap.serve.errors import ApiError
from llamatap.serve.memory_budget import Budget
from llamatap.serve.metrics import Metrics
from llamatap.serve.options import ServerOptions
from llamatap.serve.threads import Threads
from llamatap.serve.verifier import VerifierFiles
from llamatap.serve.workers.model_worker import ModelWorker

__all__ = ["AppState", "app_state_of"]

# Maximum characters per token, on average. Longer texts cannot fit and are not tokenised.
_MOST_CHARACTERS = 16
_FEWEST_CHARACTERS = 2**16


class AppState:
    """The models of an app, and the limits that its requests share."""

    def __init__(
        self,
        workers: dict[str, ModelWorker],
        options: ServerOptions,
        metrics: Metrics,
        verifier: VerifierFiles | None,
        drain_deadline: DrainDeadline,
    ) -> None:
        self.workers = workers
        self.options = options
        self.metrics = metrics
        self.verifier = verifier
        self.drain_deadline = drain_deadline
        self.presets: dict[str, Preset] = {name: load_preset(name) for name in preset_names()}
        for path in options.presets:
            preset = load_preset(path)
            if preset.name in self.presets:
                raise InvalidInputError(
                    f"{path}: there is already a preset {preset.name!r}; give it another name"
                )
            self.presets[preset.name] = preset
        self.threads = Threads(options.max_queue)
        # Separate threads: encoding frees memory, so it must not wait for requests that wait for memory.
        self.encoders = Threads(2**31)
        self.budget = Budget(options.max_pending_bytes, options.max_queue)

    def summary(self) -> list[str]:
        """Lines for the log: the models and presets."""
        return [
            *(worker.summary() for worker in self.workers.values()),
            f"presets: {', '.join(self.presets)}",
        ]

    def worker(self, model: str | None) -> ModelWorker:
        """The worker of a model.

        :param model: name of the model; None for the only one.
        :raises ApiError: there is no such model, or None and several models.
        """
        if model is None:
            if len(self.workers) > 1:
                raise ApiError.invalid(f"model is missing: one of {', '.join(self.workers)}", "missing_field")
            (model,) = self.workers
        try:
            return self.workers[model]
        except KeyError:
            raise ApiError(
                404,
                "model_not_found",
                "model_not_found",
                f"no model {model!r} here; there are {', '.join(self.workers)}",
            ) from None

    def checked_prompt(self, model: Model, prompt: str | Sequence[int] | NDArray[np.int32]) -> CheckedPrompt:
        """A prompt as token ids, uncut. Long work: run it off the event loop.

        :raises InvalidInputError: it is empty, or longer than any prompt that the server accepts.
        """
        if isinstance(prompt, str):
            self.check_text(prompt)
        return checked_prompt(model, prompt, None)

    def check_text(self, prompt: str) -> None:
        """Check that a text is short enough to be tokenised.

        :raises InvalidInputError: it is longer than any prompt that the server accepts.
        """
        most = max(_MOST_CHARACTERS * self.options.max_length, _FEWEST_CHARACTERS)
        if len(prompt) > most:
            raise InvalidInputError(
                f"the text has {len(prompt)} characters; this server takes prompts of "
                f"{self.options.max_length} tokens, and tokenises at most {most} characters"
            )

    def preset(self, name: str) -> Preset:
        """A preset by name. Only presets that the server knows: a request must not name files.

        :raises InvalidInputError: there is no such preset.
        """
        try:
            return self.presets[name]
        except KeyError:
            raise InvalidInputError(f"no preset {name!r} here; there are {', '.join(self.presets)}") from None


def app_state_of(request: Request) -> AppState:
    """The state of the app that received a request."""
    app_state = request.app.state.server
    assert isinstance(app_state, AppState)
    return app_state
