"""The HTTP server: ``llamatap serve``, or :func:`create_app` for another ASGI server (extra ``[server]``).

``POST /v1/hidden_states`` returns states; ``/v1/completions`` and ``/v1/chat/completions`` generate text as
OpenAI's API does, and act as the verifier for trainers of drafters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamatap.serve.options import ModelOptions, ServedCoTraining, ServerOptions, VerifierOptions

if TYPE_CHECKING:
    from llamatap.serve.app import create_app

__all__ = ["ModelOptions", "ServedCoTraining", "ServerOptions", "VerifierOptions", "create_app"]


def __getattr__(name: str) -> Any:
    # The command line reads the defaults of options, and must start without FastAPI.
    if name == "create_app":
        from llamatap.serve.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
