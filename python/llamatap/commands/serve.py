"""``llamatap serve``: models over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from llamatap._extras import needs
from llamatap.commands._arguments import (
    DTYPES,
    add_field,
    add_loading,
    add_threads,
    byte_size,
    draft_length,
    given,
    integers,
    layer_ids,
    number_above,
)
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError
from llamatap.serve.options import (
    ConnectionOptions,
    ModelOptions,
    ServedCoTraining,
    ServerOptions,
    VerifierOptions,
)

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve", help="serve models over HTTP: hidden states, completions, a verifier for trainers"
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=FILE.gguf",
        help="a model, and its name in requests (default: the file's name); repeatable",
    )
    _add_access(parser)
    add_loading(parser)
    add_threads(parser)
    parser.add_argument(
        "--flash-attn", choices=("on", "off"), help="flash attention (default: the engine decides)"
    )
    parser.add_argument(
        "--kv-type", metavar="TYPE", help="type of the KV cache: f32, f16, bf16, q8_0, ... (default: f16)"
    )
    parser.add_argument(
        "--preset",
        dest="presets",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.toml",
        help="a preset of your own; repeatable",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also show the log of the engine and of the HTTP server"
    )
    _add_completions(parser.add_argument_group("completions"))
    _add_verifier(parser.add_argument_group("verifier: files of states for a trainer of drafters"))
    _add_limits(parser.add_argument_group("limits"))
    _add_connections(parser.add_argument_group("connections"))
    parser.set_defaults(run=run)


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        type=integers(0, 65535),
        default=8000,
        help="port to listen at; 0 picks a free one (default: 8000)",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("LLAMATAP_API_KEY") or None,
        help="API key that requests must send (default: the variable LLAMATAP_API_KEY, if set)",
    )
    parser.add_argument(
        "--insecure",
        dest="any_host",
        action="store_true",
        help="allow any --host, and any Host header, without a key",
    )
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow pages of this origin (https://example.org; * for all) to read responses; repeatable",
    )


def _add_completions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drafter",
        dest="drafters",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a drafter file for the model; ngram or suffix, which need only the text; or mtp for the "
        "model's own blocks",
    )
    group.add_argument(
        "--n-max",
        metavar="N",
        help="draft length in tokens, or auto (default: 8 with ngram, 64 with suffix, else 4)",
    )
    group.add_argument(
        "--cotrain",
        dest="cotrained",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="retrain the model's --drafter (EAGLE-3, MTP) on what it generates, in this folder",
    )
    group.add_argument(
        "--cotrain-trainer",
        choices=("on", "off"),
        default="on",
        help="start `llamatap cotrain`, which trains (default: on); off if you start it yourself",
    )
    group.add_argument(
        "--cotrain-python",
        type=Path,
        metavar="PYTHON",
        help="the Python that runs it, with PyTorch (default: this one)",
    )
    add_field(group, "--parallel", ModelOptions, "parallel", integers(1, 1024), "texts generated at once")
    group.add_argument(
        "--n-ctx",
        type=integers(0),
        metavar="N",
        help="KV cache size in tokens, shared by all texts; checked at the start, allocated at the first "
        "text (default: the trained length for each, at most 4096)",
    )


def _add_verifier(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hidden-states-path",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="folder for the states files of completions with return_token_ids",
    )
    group.add_argument(
        "--verifier-layers",
        dest="layers",
        type=layer_ids,
        metavar="IDS",
        help="layer ids in vLLM's numbering, 0..n; H_n is added (default: 2, n//2 and n-3 of n blocks)",
    )
    group.add_argument("--verifier-dtype", dest="dtype", choices=DTYPES, help="(default: bfloat16)")
    gib = 2**30
    add_field(
        group,
        "--quota-gib",
        VerifierOptions,
        "quota_bytes",
        byte_size(gib),
        "limit for all files together",
        unit=gib,
        metavar="GIB",
    )
    add_field(
        group,
        "--max-age",
        VerifierOptions,
        "max_age",
        number_above(0),
        "remove files older than this",
        metavar="SECONDS",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for name, text in (
        ("max_queue", "maximum number of waiting prompts"),
        ("max_length", "maximum tokens in a prompt"),
        ("max_inputs", "maximum prompts in a request"),
    ):
        add_field(group, f"--{name.replace('_', '-')}", ServerOptions, name, integers(1), text)
    mib = 2**20
    for name, text in (
        ("body", "maximum size of a request body"),
        ("response", "maximum size of the states of a request"),
        ("pending", "limit for the states of all in-flight requests, including their encoded form"),
    ):
        add_field(
            group,
            f"--max-{name}-mib",
            ServerOptions,
            f"max_{name}_bytes",
            byte_size(mib),
            text,
            unit=mib,
            metavar="MIB",
        )
    group.add_argument(
        "--drain",
        type=integers(0),
        default=60,
        metavar="SECONDS",
        help="time for in-flight requests at shutdown (default: 60)",
    )


def _add_connections(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-connections",
        type=integers(1),
        metavar="N",
        help="maximum number of open connections; beyond it idle ones are closed, the oldest first "
        f"(default: {ConnectionOptions.max_connections}, but at most half of the file descriptors)",
    )
    for name, text in (
        ("header", "time for the headers of a request"),
        ("body", "time for its body"),
        ("idle", "time between requests"),
        ("send", "time within which a client must read some of the sent data"),
    ):
        field = f"{name}_timeout"
        add_field(
            group, f"--{name}-timeout", ConnectionOptions, field, number_above(0), text, metavar="SECONDS"
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; accepted requests are answered first."""
    with needs("server", "the server"):
        from llamatap.serve import create_app, logs
        from llamatap.serve.http.request_checks import is_loopback
        from llamatap.serve.http.server_lifecycle import HttpServer, check_port
    options = _server_options(arguments)
    if not is_loopback(arguments.host) and options.api_key is None and not options.any_host:
        raise InvalidInputError(
            f"--host {arguments.host} is open to other machines: give --api-key, or --insecure to allow that"
        )
    check_port(arguments.host, arguments.port)
    logs.configure(arguments.verbose)
    app = create_app(_models(arguments), options)
    for line in app.state.server.summary():
        logs.logger.info("%s", line)
    connections = ConnectionOptions(**given(ConnectionOptions, arguments))
    server = HttpServer(app, connections, drain=arguments.drain, host=arguments.host, port=arguments.port)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 3


def _server_options(arguments: argparse.Namespace) -> ServerOptions:
    verifier = None
    if arguments.folder is not None:
        verifier = VerifierOptions(**given(VerifierOptions, arguments))
    elif arguments.layers is not None:
        raise InvalidInputError("--verifier-layers needs --hidden-states-path, the folder of the files")
    return ServerOptions(verifier=verifier, **given(ServerOptions, arguments))


def _models(arguments: argparse.Namespace) -> list[ModelOptions]:
    paths: dict[str, Path] = {}
    for item in arguments.model:
        name, equals, path = item.partition("=")
        if not equals:
            name, path = Path(item).stem, item
        if name in paths:
            raise InvalidInputError(f"--model: {name!r} is given twice; give each its own NAME=")
        paths[name] = Path(path)
    drafters = _by_model("--drafter", arguments.drafters, list(paths))
    cotrained = {
        name: ServedCoTraining(
            folder=Path(folder),
            start_trainer=arguments.cotrain_trainer == "on",
            python=arguments.cotrain_python,
        )
        for name, folder in _by_model("--cotrain", arguments.cotrained, list(paths)).items()
    }
    if arguments.n_max is not None:
        arguments.n_max = draft_length(arguments.n_max)
    shared = given(ModelOptions, arguments) | {"context": _context_options(arguments)}
    return [
        ModelOptions(name=name, path=path, drafter=drafters.get(name), cotrain=cotrained.get(name), **shared)
        for name, path in paths.items()
    ]


def _by_model(flag: str, items: list[str], models: list[str]) -> dict[str, str]:
    """The values of a repeatable option, by the names of the models that they are for."""
    values: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            if len(models) > 1:
                raise InvalidInputError(f"{flag} {item}: for which model? give NAME={item}")
            name, value = models[0], item
        if name not in models:
            raise InvalidInputError(f"{flag}: there is no model {name!r}; there are {', '.join(models)}")
        values[name] = value
    return values


def _context_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = given(ContextOptions, arguments)
    # n_ctx is only the size of the texts' context.
    options.pop("n_ctx", None)
    if arguments.flash_attn is not None:
        options["flash_attn"] = arguments.flash_attn == "on"
    if arguments.kv_type is not None:
        options["type_k"] = options["type_v"] = arguments.kv_type
    return options
