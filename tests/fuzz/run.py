"""Load spoilt GGUF files, each in a child process of its own.

    python -m fuzz.run FILE... [--count N] [--seed N] [--keep DIR]

Run in tests/. Prints a JSON object: how often each outcome came, and the cases that ended by a signal, a
time-out or anything but a result or an error of ours. Case i of a seed is always the same.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import llamatap as lt
from fuzz.gguf_bytes import GgufBytes, parse
from fuzz.mutations import mutate
from llamatap._native import _core

#: Seconds that a case may take. Files are tiny.
PATIENCE = 60.0
MEMORY = 8 << 30  # bytes of address space


def use(path: Path) -> None:
    """Use a model as a person would, through everything that reads the file's numbers."""
    with contextlib.suppress(lt.Error), lt.Model(path, vocab_only=True) as model:
        model.detokenize(model.tokenize("Hello \U0001f600 <s> world"))
        model.apply_chat_template([{"role": "user", "content": "Hi"}])
    with contextlib.suppress(lt.Error), lt.Model(path, weights="f16") as model:
        lt.extract(model, [0], layers=[-1])
    with lt.Model(path) as model:
        tokens = [t for t in (5, 1, 7, 3, 2) if t < model.n_vocab] or [0]
        layers: list[lt.LayerId] = [*range(model.n_layer + 1)]
        if model.layer_map.has_norm:
            layers.append("norm")
        lt.extract(model, tokens, layers=layers)
        with model.context(n_ctx=64) as context, context.tap([0, -1]):
            context.decode(lt.Batch.of(tokens))
            context.logits()
            context.memory.clear()


def child(path: Path) -> str:
    """Use a file in the child process; the name of the outcome."""
    try:
        use(path)
    except lt.Error as error:
        return type(error).__name__
    except MemoryError:
        return "MemoryError"
    except BaseException:
        traceback.print_exc()
        return "!" + str(sys.exc_info()[0])
    return "ok"


def outcome(path: Path) -> tuple[str, str]:
    """Fork, use the file there, and say how it ended, with what was printed."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            if not _core.build_info()["sanitize"]:  # AddressSanitizer reserves terabytes
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(said.fileno(), child(path).encode())
            os._exit(0)
        deadline = time.monotonic() + PATIENCE
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "time-out", ""
            time.sleep(0.001)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
        if status < 0:
            return signal.Signals(-status).name, text
        return said.read().decode() or f"exit code {status}", text


def is_bad(result: str) -> bool:
    return result.startswith(("SIG", "!", "exit", "time"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Load spoilt GGUF files, each in a child process.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the files that ended badly")
    arguments = parser.parse_args()

    files: dict[Path, GgufBytes] = {}
    counts: collections.Counter[str] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory(prefix="llamatap-fuzz-") as folder:
        path = Path(folder) / "spoilt.gguf"
        for case in range(arguments.first, arguments.first + arguments.count):
            rng = random.Random(f"{arguments.seed}/{case}")
            source = rng.choice(arguments.files)
            if source not in files:
                files[source] = parse(source)
            name, spoilt = mutate(files[source], rng)
            path.write_bytes(spoilt)
            result, text = outcome(path)
            counts[result] += 1
            if is_bad(result):
                case_of = {"case": case, "file": source.name, "mutation": name}
                bad.append({**case_of, "result": result, "text": text})
                if arguments.keep:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    (arguments.keep / f"{case}-{source.stem}-{name}.gguf").write_bytes(spoilt)
            path.unlink()
    json.dump({"counts": dict(counts), "bad": bad}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
