"""What the routes of an app share: its models, presets and limits."""

from __future__ import annotations

from fastapi import Request

from llamatap.errors import InvalidInputError
from llamatap.presets import Preset, load_preset, preset_names
from llamatap.serve.errors import ApiError
from llamatap.serve.metrics import Metrics
from llamatap.serve.options import ServerOptions
from llamatap.serve.verifier import VerifierFiles
from llamatap.serve.worker import ModelWorker

__all__ = ["Server", "server_of"]


class Server:
    """The models of an app, and its options."""

    def __init__(
        self,
        workers: dict[str, ModelWorker],
        options: ServerOptions,
        metrics: Metrics,
        verifier: VerifierFiles | None,
    ) -> None:
        self.workers = workers
        self.options = options
        self.metrics = metrics
        self.verifier = verifier
        self.presets: dict[str, Preset] = {name: load_preset(name) for name in preset_names()}
        for name, path in options.presets.items():
            self.presets[name] = load_preset(path)

    def worker(self, model: str) -> ModelWorker:
        """The model of a name.

        :raises ApiError: there is none.
        """
        try:
            return self.workers[model]
        except KeyError:
            raise ApiError(
                404,
                "model_not_found",
                "model_not_found",
                f"no model {model!r} here; there are {', '.join(self.workers)}",
            ) from None

    def preset(self, name: str) -> Preset:
        """The preset of a name: one that the server knows, for a request must not name files.

        :raises InvalidInputError: there is none.
        """
        try:
            return self.presets[name]
        except KeyError:
            raise InvalidInputError(f"no preset {name!r} here; there are {', '.join(self.presets)}") from None


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server
