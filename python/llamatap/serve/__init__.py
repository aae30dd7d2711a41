"""The HTTP server: ``llamatap serve``, or :func:`create_app` in a server of one's own (extra ``[server]``).

``POST /v1/hidden_states`` gives states; ``/v1/completions`` and ``/v1/chat/completions`` generate text as
OpenAI's API does, and serve trainers of drafters as a verifier.
"""

from __future__ import annotations

from llamatap.serve.app import create_app
from llamatap.serve.options import ModelOptions, ServerOptions, VerifierOptions

__all__ = ["ModelOptions", "ServerOptions", "VerifierOptions", "create_app"]
