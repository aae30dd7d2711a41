"""transformers as an object; it runs peer_program.py in a process and environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROGRAM = Path(__file__).with_name("peer_program.py")


class Transformers:
    """A model in transformers.

    PyTorch and the engine would fight for the cores in one process; this one sleeps between requests.

    :param python: the interpreter of an environment with torch, transformers, gguf and accelerate.
    :param path: a GGUF file; transformers dequantises it.
    """

    def __init__(
        self,
        python: Path,
        path: Path,
        *,
        dtype: str = "float32",
        attention: str = "eager",
        threads: int = 2,
    ) -> None:
        command = [str(python), str(PROGRAM), str(path), "--dtype", dtype, "--attention", attention]
        command += ["--threads", str(threads)]
        # Threads that wait for work must leave the cores to others; nothing is looked up on the network.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        #: Package -> version.
        self.versions: dict[str, str] = self._answer()

    def __enter__(self) -> Transformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def states(self, tokens: Sequence[int], *, rounded: bool = False) -> NDArray[np.float32]:
        """All hidden states: (n_tokens, H_0..H_n and norm(H_n), n_embd).

        :param rounded: with what enters a matrix rounded as the engine's kernels for the file's types do it.
        """
        return self._saved({"tokens": list(tokens), "rounded": rounded}, None)

    def blocks(self, tokens: Sequence[int], entering: NDArray[np.float32]) -> NDArray[np.float32]:
        """Output of each block run alone on its own input, with the same rounding: (n_tokens, H_1.., n_embd).

        :param entering: (n_tokens, H_0..H_n and anything, n_embd), float32.
        """
        return self._saved({"tokens": list(tokens), "rounded": True}, entering)

    def seconds(self, tokens: Sequence[int]) -> float:
        """How long all hidden states take to compute, by the clock of its process."""
        return float(self._ask({"tokens": list(tokens)})["seconds"])

    def _saved(self, request: dict[str, Any], entering: NDArray[np.float32] | None) -> NDArray[np.float32]:
        with tempfile.TemporaryDirectory(prefix="llamatap-") as folder:
            request["states"] = f"{folder}/states.npy"
            if entering is not None:
                request["entering"] = f"{folder}/entering.npy"
                np.save(request["entering"], entering)
            self._ask(request)
            found: NDArray[np.float32] = np.load(request["states"])
            return found

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers ended with status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer
