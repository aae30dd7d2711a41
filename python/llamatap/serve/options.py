"""Options of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llamatap._validate import integer
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.layers import LayerId

__all__ = ["ConnectionOptions", "ModelOptions", "ServedCoTraining", "ServerOptions", "VerifierOptions"]


@dataclass(frozen=True, kw_only=True)
class ServedCoTraining:
    """Co-training of a served model's drafter (:class:`llamatap.train.CoTrainer`).

    :ivar folder: its folder; no other server may use it meanwhile.
    :ivar start_trainer: whether the server starts ``llamatap cotrain``.
    :ivar python: the Python that runs it, one with PyTorch; None for the server's own.
    """

    folder: Path
    start_trainer: bool = True
    python: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model to serve.

    :ivar name: its name in requests.
    :ivar path: its GGUF file.
    :ivar n_gpu_layers: layers on the GPU; -1 for all.
    :ivar weights: type that its weights are converted to: "f32", "f16" or "bf16"; None keeps them.
    :ivar context: further options of the contexts, as in :class:`llamatap.Context` (``n_threads``,
        ``type_k``, ``flash_attn``, ...). The server sets their sizes.
    :ivar n_ctx: KV cache size in tokens, shared by all in-flight texts; 0 for ``parallel`` times the trained
        length, at most 4,096 each.
    :ivar parallel: texts generated at once.
    :ivar drafter: "ngram", "suffix" (one cache for all texts), "mtp" (the model's own blocks) or a drafter
        file; None for no drafter.
    :ivar n_max: draft length in tokens; None for the drafter's default.
    :ivar cotrain: retrain the drafter, an EAGLE-3 or MTP file, on the model's own texts; None does not.
    """

    name: str
    path: Path
    n_gpu_layers: int = 0
    weights: Literal["f32", "f16", "bf16"] | None = None
    context: ContextOptions = field(default_factory=lambda: ContextOptions())
    n_ctx: int = 0
    parallel: int = 8
    drafter: str | None = None
    n_max: int | Literal["auto"] | None = None
    cotrain: ServedCoTraining | None = None

    def __post_init__(self) -> None:
        if self.cotrain is not None and self.drafter in (None, "ngram", "suffix", "mtp"):
            raise InvalidInputError(
                f"co-training needs a drafter with a file, EAGLE-3 or MTP; found {self.drafter or 'none'}"
            )
        integer("n_ctx", self.n_ctx, 0)
        integer("parallel", self.parallel, 1, 1024)
        if 0 < self.n_ctx < self.parallel:
            raise InvalidInputError(
                f"n_ctx is {self.n_ctx} for {self.parallel} texts at once; each needs at least one token"
            )


@dataclass(frozen=True, kw_only=True)
class VerifierOptions:
    """Options of the hidden-states files that completions write for trainers of drafters.

    :ivar folder: the folder of the files, created if missing. Nothing is written anywhere else.
    :ivar layers: layer ids in vLLM's numbering, 0..n; H_n follows them as the last slot. None for those of
        EAGLE-3 drafters: ``[2, n//2, n-3]``.
    :ivar dtype: dtype of the states in the files.
    :ivar quota_bytes: size limit of all files together. Beyond it requests get 503 until files are removed.
    :ivar max_age: seconds after which a file that was not read is removed.
    """

    folder: Path
    layers: tuple[LayerId, ...] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    quota_bytes: int = 16 * 2**30
    max_age: float = 3600.0

    def __post_init__(self) -> None:
        integer("quota_bytes", self.quota_bytes, 1, 2**63 - 1)
        if not self.max_age > 0:
            raise InvalidInputError(f"max_age must be above 0 seconds, not {self.max_age}")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits of a server, and access to it.

    :ivar api_key: the key that requests must send as ``Authorization: Bearer``; None for no key.
    :ivar any_host: whether a server without a key answers requests whose ``Host`` is not this machine.
    :ivar max_queue: maximum number of waiting prompts of a model; further requests get 429.
    :ivar max_body_bytes: maximum size of a request's body.
    :ivar max_response_bytes: maximum size of the states of a request, before encoding.
    :ivar max_pending_bytes: limit for the states of all requests, including their encoded form, from before
        they are computed until they are sent. Requests wait for their share.
    :ivar max_length: maximum number of tokens in a prompt, and the largest ``max_length`` of a request.
    :ivar max_inputs: maximum number of prompts in one request.
    :ivar verifier: files of states that completions write; None for no files.
    :ivar presets: TOML files of further presets.
    :ivar cors: origins ("https://example.org") whose pages may read from this server in a browser; "*" for
        all. By default none may.
    """

    api_key: str | None = None
    any_host: bool = False
    max_queue: int = 256
    max_body_bytes: int = 4 * 2**20
    max_response_bytes: int = 256 * 2**20
    max_pending_bytes: int = 4 * 2**30
    max_length: int = 32768
    max_inputs: int = 256
    verifier: VerifierOptions | None = None
    presets: tuple[Path, ...] = ()
    cors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("max_"):
                integer(name, value, 1, 2**63 - 1)
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise InvalidInputError(
                "an API key must be one or more printable ASCII characters without blanks"
            )
        object.__setattr__(self, "cors", tuple(map(_origin, self.cors)))


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Limits of a server's connections; times in seconds.

    :ivar max_connections: maximum number of open connections. Beyond it, connections that wait for their
        client are closed, the oldest first; if all are busy, further ones get quick responses (``GET``) or
        503.
    :ivar header_timeout: from the connection, or the first byte of a request, to the end of its headers.
    :ivar body_timeout: from the end of the headers to the end of the body.
    :ivar idle_timeout: from a response to the next request.
    :ivar send_timeout: time within which a client must read some of the data sent to it.
    """

    max_connections: int = 256
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    # Longer than the timeouts of clients and proxies, or they send into a closing connection.
    idle_timeout: float = 75.0
    send_timeout: float = 60.0

    def __post_init__(self) -> None:
        integer("max_connections", self.max_connections, 1)
        for name in ("header_timeout", "body_timeout", "idle_timeout", "send_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be above 0 seconds, not {getattr(self, name)}")


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")

# Ports that browsers leave out of an origin.
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def _origin(given: str) -> str:
    """Normalise an origin to the form that browsers send: only that form matches.

    :raises InvalidInputError: it is not an origin.
    """
    if given == "*":
        return given
    found = _ORIGIN.fullmatch(given.lower())
    if found is None:
        raise InvalidInputError(
            "an origin must be SCHEME://HOST or SCHEME://HOST:PORT, such as https://example.org, without a "
            "path "
            f"or a pattern, or * for all; found {given!r}"
        )
    scheme, host, port = found.groups()
    end = "" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}"
    return f"{scheme}://{host}{end}"
