"""``llamatap serve``: models over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llamatap._extras import needs
from llamatap.commands._options import (
    DTYPES,
    above,
    add_loading,
    add_threads,
    draft_length,
    integers,
    layer_ids,
)
from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    from llamatap.context import ContextOptions
    from llamatap.serve import ModelOptions, ServerOptions

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve", help="serve models over HTTP: hidden states, completions, a verifier for trainers"
    )
    serve.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=FILE.gguf",
        help="a model and what requests call it (default: the file's name); may be given again",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=integers(0, 65535), default=8000, help="0 for a free one (default: 8000)"
    )
    serve.add_argument(
        "--api-key", help="what requests must bring (default: the variable LLAMATAP_API_KEY, if it is set)"
    )
    serve.add_argument(
        "--insecure",
        action="store_true",
        help="without a key, listen at any address and answer whatever host a request names",
    )
    serve.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin (https://example.org; * for all) read answers; may be given again",
    )
    add_loading(serve)
    add_threads(serve)
    serve.add_argument(
        "--flash-attn",
        choices=("on", "off"),
        help="flash attention (default: where the engine thinks it best)",
    )
    serve.add_argument("--kv-type", help="of the KV cache: f32, f16, bf16, q8_0, ... (default: f16)")
    serve.add_argument(
        "--preset", action="append", default=[], type=Path, metavar="FILE.toml", help="a preset of your own"
    )
    serve.add_argument(
        "--verbose", action="store_true", help="show the engine's lines too, and all of the HTTP server's"
    )
    text = serve.add_argument_group("completions")
    text.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a drafter of the model's; ngram; or mtp for the model's own blocks",
    )
    text.add_argument("--n-max", help="tokens of a draft, or auto (default: 8 with ngram, else 4)")
    text.add_argument(
        "--parallel", type=integers(1, 1024), default=8, help="texts generated at once (default: 8)"
    )
    text.add_argument(
        "--n-ctx",
        type=integers(0),
        default=0,
        help="tokens of all of them together; their memory is tried at the start and taken at the first text "
        "(default: what the model was trained with for each, 4096 at most)",
    )
    verifier = serve.add_argument_group("verifier: files of states for a trainer of drafters")
    verifier.add_argument(
        "--hidden-states-path",
        type=Path,
        metavar="FOLDER",
        help="where completions with return_token_ids write",
    )
    verifier.add_argument(
        "--verifier-layers",
        type=layer_ids,
        help="ids as vLLM's, 0..n; H_n follows as the last (default: 2, n//2 and n-3 of n blocks)",
    )
    verifier.add_argument("--verifier-dtype", choices=DTYPES, default="bfloat16")
    verifier.add_argument(
        "--quota-gib", type=above(0, 2**30), default=16 * 2**30, help="of all files (default: 16)"
    )
    verifier.add_argument(
        "--max-age", type=above(0), default=3600.0, metavar="SECONDS", help="of a file (default: 3600)"
    )
    limits = serve.add_argument_group("limits")
    limits.add_argument("--max-queue", type=integers(1), default=256, help="prompts that wait (default: 256)")
    limits.add_argument(
        "--max-length", type=integers(1), default=32768, help="tokens of a prompt (default: 32768)"
    )
    limits.add_argument(
        "--max-inputs", type=integers(1), default=256, help="prompts of a request (default: 256)"
    )
    limits.add_argument(
        "--max-body-mib", type=above(0, 2**20), default=4 * 2**20, help="of a request (default: 4)"
    )
    limits.add_argument(
        "--max-response-mib",
        type=above(0, 2**20),
        default=256 * 2**20,
        help="of the states of a request (default: 256)",
    )
    limits.add_argument(
        "--max-pending-mib",
        type=above(0, 2**20),
        default=4096 * 2**20,
        help="of all that are computed, encoded and sent at one time (default: 4096)",
    )
    limits.add_argument(
        "--drain",
        type=integers(0),
        default=60,
        metavar="SECONDS",
        help="for what was accepted, at the end (default: 60)",
    )
    _add_connections(serve)
    serve.set_defaults(run=run)


def _add_connections(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("connections")
    group.add_argument(
        "--max-connections",
        type=integers(1),
        default=256,
        help="open ones; beyond it those that wait for their client are closed, the oldest first (default: "
        "256, or half of the files that may be open)",
    )
    for name, seconds, text in (
        ("header", 10, "for a request's headers"),
        ("body", 60, "for its body"),
        ("idle", 75, "between requests"),
        ("send", 60, "in which a client takes some of what is sent"),
    ):
        group.add_argument(
            f"--{name}-timeout",
            type=above(0),
            default=float(seconds),
            metavar="SECONDS",
            help=f"{text} (default: {seconds})",
        )


def _models(arguments: argparse.Namespace) -> list[ModelOptions]:
    from llamatap.serve import ModelOptions

    paths: dict[str, Path] = {}
    for one in arguments.model:
        name, equals, path = one.partition("=")
        if not equals:
            name, path = Path(one).stem, one
        if name in paths:
            raise InvalidInputError(f"--model: {name!r} is there twice; give each a NAME=")
        paths[name] = Path(path)
    drafters: dict[str, str] = {}
    for one in arguments.drafter:
        name, equals, drafter = one.partition("=")
        if not equals:
            if len(paths) > 1:
                raise InvalidInputError(f"--drafter {one}: of which model? give NAME={one}")
            name, drafter = next(iter(paths)), one
        if name not in paths:
            raise InvalidInputError(f"--drafter: there is no model {name!r}; there are {', '.join(paths)}")
        drafters[name] = drafter
    context: ContextOptions = {"n_threads": arguments.threads}
    if arguments.flash_attn is not None:
        context["flash_attn"] = arguments.flash_attn == "on"
    if arguments.kv_type is not None:
        context |= {"type_k": arguments.kv_type, "type_v": arguments.kv_type}
    return [
        ModelOptions(
            name=name,
            path=path,
            n_gpu_layers=arguments.gpu_layers,
            weights=arguments.weights,
            context=context,
            n_ctx=arguments.n_ctx,
            parallel=arguments.parallel,
            drafter=drafters.get(name),
            n_max=None if arguments.n_max is None else draft_length(arguments.n_max),
        )
        for name, path in paths.items()
    ]


def _options(arguments: argparse.Namespace) -> ServerOptions:
    from llamatap.serve import ServerOptions, VerifierOptions

    verifier = None
    if arguments.hidden_states_path is not None:
        verifier = VerifierOptions(
            folder=arguments.hidden_states_path,
            layers=None if arguments.verifier_layers is None else tuple(arguments.verifier_layers),
            dtype=arguments.verifier_dtype,
            quota_bytes=int(arguments.quota_gib),
            max_age=arguments.max_age,
        )
    elif arguments.verifier_layers is not None:
        raise InvalidInputError("--verifier-layers are of files; there is no --hidden-states-path")
    return ServerOptions(
        api_key=os.environ.get("LLAMATAP_API_KEY") or None
        if arguments.api_key is None
        else arguments.api_key,
        max_queue=arguments.max_queue,
        max_body_bytes=int(arguments.max_body_mib),
        max_response_bytes=int(arguments.max_response_mib),
        max_length=arguments.max_length,
        max_inputs=arguments.max_inputs,
        verifier=verifier,
        max_pending_bytes=int(arguments.max_pending_mib),
        any_host=arguments.insecure,
        presets=tuple(arguments.preset),
        cors=tuple(arguments.cors),
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; what was accepted is answered first."""
    with needs("server", "the server"):
        from llamatap.serve import create_app, logs
        from llamatap.serve.http.connection_options import ConnectionOptions
        from llamatap.serve.http.request_checks import is_loopback
        from llamatap.serve.http.server import HttpServer
    options = _options(arguments)
    if not is_loopback(arguments.host) and options.api_key is None and not arguments.insecure:
        raise InvalidInputError(
            f"--host {arguments.host} lets others in: give an --api-key, or --insecure if that is meant"
        )
    logs.configure(arguments.verbose)
    app = create_app(_models(arguments), options)
    for line in app.state.server.summary():
        logs.logger.info("%s", line)
    connections = ConnectionOptions(
        max_connections=arguments.max_connections,
        header_timeout=arguments.header_timeout,
        body_timeout=arguments.body_timeout,
        idle_timeout=arguments.idle_timeout,
        send_timeout=arguments.send_timeout,
    )
    server = HttpServer(app, connections, drain=arguments.drain, host=arguments.host, port=arguments.port)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 3
