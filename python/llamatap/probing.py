"""Probing a GGUF file in a child process: whether it loads, and the values of its layers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamatap._validate import integer, number
from llamatap._validate import path as checked_path
from llamatap.errors import Error, InvalidInputError

__all__ = ["LayerProbe", "Probe", "probe"]

_TOKENS = 16
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from llamatap.probing import run_child
run_child(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
"""


@dataclasses.dataclass(frozen=True)
class LayerProbe:
    """One layer of a model, computed on 16 arbitrary tokens."""

    #: Layer id: 0..n, or "norm".
    layer: int | str
    #: The engine's name of the tensor; without one, its operation in parentheses.
    node: str
    #: Root mean square of the values; NaN when they are not finite.
    rms: float

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return self.rms == self.rms


@dataclasses.dataclass(frozen=True)
class Probe:
    """Result of :func:`probe`. Fields are None where the probe did not get that far."""

    path: Path
    #: Whether the model loads.
    loads: bool = False
    #: Whether hidden states can be captured: it has one residual stream, and a first computation succeeded.
    states: bool = False
    #: Reason why it does not load or gives no states.
    error: str | None = None
    arch: str | None = None
    name: str | None = None
    description: str | None = None
    file_type: str | None = None
    n_params: int | None = None
    size_bytes: int | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    n_vocab: int | None = None
    n_ctx_train: int | None = None
    chat_template: bool | None = None
    #: Control tokens that the chat template writes and the tokenizer splits: the file does not mark them.
    unparsed_tokens: dict[str, int] | None = None
    #: H_0..H_n, then norm(H_n) where the model has a final norm.
    layers: tuple[LayerProbe, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as values of JSON."""
        facts = dataclasses.asdict(self)
        facts["path"] = str(self.path)
        for layer in facts["layers"]:
            layer["finite"] = layer["rms"] == layer["rms"]
            layer["rms"] = layer["rms"] if layer["finite"] else None
        return facts


def probe(path: str | os.PathLike[str], *, timeout: float = 600.0, n_threads: int | None = None) -> Probe:
    """Try a GGUF file safely: a child process loads it and computes with it.

    The engine trusts its files: a broken one can crash the process that loads it, in spite of all checks.
    Here that is the child process, and the result says so.

    :param timeout: seconds until the child is given up.
    :param n_threads: threads of the engine; None for one per physical core, within the CPU quota.
    :raises InvalidInputError: ``path`` is not a path, ``timeout`` is not above 0, or ``n_threads`` is not a
        number of threads.
    """
    # Imported here: that takes a while, and llamatap is imported more often than it probes.
    import signal
    import subprocess
    import tempfile

    path = checked_path("path", path).absolute()
    timeout = number("timeout", timeout)
    if not timeout > 0:
        raise InvalidInputError(f"timeout must be above 0 seconds, not {timeout}")
    threads = None if n_threads is None else integer("n_threads", n_threads, 1, 512)
    facts: dict[str, Any] = {}
    # Not through standard output, where a module that the child imports may print (sitecustomize).
    with tempfile.TemporaryFile() as results:
        descriptor = results.fileno()
        command = [
            sys.executable,
            "-c",
            _CHILD,
            json.dumps(sys.path),
            os.fspath(path),
            str(descriptor),
            json.dumps(threads),
        ]
        try:
            child = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor],
                timeout=timeout,
            )
            errors, status = child.stderr, child.returncode
        except subprocess.TimeoutExpired as error:
            errors, status = error.stderr or b"", None
        results.seek(0)
        for line in results:
            # The last line may be incomplete.
            if line.endswith(b"\n"):
                facts |= json.loads(line)
    facts["layers"] = tuple(LayerProbe(**layer) for layer in facts.get("layers", ()))
    if status is None:
        facts["error"] = f"no result after {timeout:g} seconds"
    elif status != 0:
        last = errors.decode(errors="replace").strip()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        facts["error"] = f"the process ended with {how}" + (f": {last}" if last else "")
    return Probe(path, **facts)


def run_child(path: str, results: int, n_threads: int | None) -> None:
    """The child's part of :func:`probe`: write each finding at once, one JSON object per line, because the
    next step may crash the process.

    :param results: the file descriptor to write to.
    """

    def report(**facts: Any) -> None:
        os.write(results, json.dumps(facts).encode() + b"\n")

    # A crash must not leave a file of the model's size behind.
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError):
        pass
    try:
        _examine(Path(path), report, n_threads)
    except (Error, MemoryError) as error:
        report(error=str(error) or type(error).__name__)


def _examine(path: Path, report: Callable[..., None], n_threads: int | None) -> None:
    import numpy as np

    from llamatap.extraction.extractor import Extractor
    from llamatap.layers import LayerId
    from llamatap.model import Model

    with Model(path) as model:
        report(
            loads=True,
            arch=model.arch,
            name=model.metadata.get("general.name"),
            description=model.description,
            file_type=model.file_type,
            n_params=model.n_params,
            size_bytes=model.size_bytes,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            n_vocab=model.n_vocab,
            n_ctx_train=model.n_ctx_train,
            chat_template=model.chat_template is not None,
        )
        report(unparsed_tokens=model.unparsed_tokens())
        layers: list[LayerId] = [*range(model.n_layer + 1)]
        if model.layer_map.has_norm:
            layers.append("norm")
        nodes = [name for name, _ in model.layer_map.nodes[: len(layers)]]
        tokens = np.linspace(0, model.n_vocab - 1, _TOKENS).astype(np.int32)
        with Extractor(model, n_threads=n_threads) as extractor:
            found = extractor(tokens, layers).array.astype(np.float64)
        rms = np.sqrt(np.mean(found**2, axis=(0, 2)))
        rms[~np.isfinite(rms)] = np.nan
        report(
            states=True,
            layers=[
                {"layer": layer, "node": node, "rms": float(value)}
                for layer, node, value in zip(layers, nodes, rms, strict=True)
            ],
        )
