"""Helpers of the connector tests: samples of small numbers, and processes that put some."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamatap as lt
from llamatap.connectors import Stored


def values(k: int, n: int = 5, n_layers: int = 3) -> NDArray[np.float32]:
    """The states of sample k, which bfloat16 holds exactly."""
    rows, layers, width = np.ogrid[:n, :n_layers, :4]
    found: NDArray[np.float32] = (10 * k + rows + 0.25 * layers - 0.5 * width).astype(np.float32)
    return found


def states(k: int = 1, dtype: Any = np.float32, n: int = 5) -> lt.States:
    tokens = np.arange(k, k + n, dtype=np.int32)
    return lt.States(values(k, n).astype(dtype), tokens, (1, 2, 4), n_layer=4)


def check(found: Stored | None, k: int, n: int = 5, dtype: str = "float32", mask: Any = None) -> None:
    assert found is not None
    assert str(found["hidden_states"].dtype) == dtype
    assert found["hidden_states"].astype(np.float32).tolist() == values(k, n).tolist()
    assert found["token_ids"].dtype == np.int64
    assert found["token_ids"].tolist() == list(range(k, k + n))
    assert found.keys() == {"hidden_states", "token_ids", *(() if mask is None else ("loss_mask",))}
    if mask is not None:
        assert found["loss_mask"].tolist() == mask
    for array in found.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


WRITER = """
import json, sys
import numpy as np
import llamatap as lt
from llamatap.connectors import connect
from support.stored_samples import states

connector = connect("shared_memory", name=sys.argv[1])
params = [connector.put(states(k)) for k in range(4)]
connector.put(states(9), index=0, loss_mask=[0, 0, 0, 1, 1])
print(json.dumps(params), flush=True)
sys.stdin.readline()
"""


def writer(name: str, code: str = WRITER) -> tuple[subprocess.Popen[str], list[dict[str, str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def end(process: subprocess.Popen[str], kill: bool = False) -> None:
    if kill:
        process.send_signal(signal.SIGKILL)
    process.communicate("")
