"""The patched barrier of the engine (vendor/patches): threads that share a CPU sleep instead of spinning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatap._native import _core

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be kept on one CPU here"),
    pytest.mark.skipif(
        _core.build_info()["openmp"] == "ON" or _core.build_info()["engine_commit"] == "local",
        reason="another barrier than the patched one",
    ),
]

CODE = """
import json, os, resource, sys, warnings
import llamatap as lt

warnings.simplefilter("ignore")
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
model = lt.Model(sys.argv[1])
found = []
for n_threads in (1, 4):
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
    with model.context(n_ctx=256, n_threads=n_threads, **exact) as context:
        before = resource.getrusage(resource.RUSAGE_SELF)
        tokens = [1, 2, 3]
        context.decode(lt.Batch.of(tokens))
        for position in range(3, 40):
            tokens.append(int(context.logits().argmax()))
            context.decode(lt.Batch.of(tokens[-1:], pos0=position))
        after = resource.getrusage(resource.RUSAGE_SELF)
    found.append((tokens, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw))
print(json.dumps(found))
"""


def test_four_threads_on_one_cpu_wait_asleep(tiny_path: Path) -> None:
    """A spinning thread runs until the kernel takes its CPU; a sleeping one gives it up by itself.
    Spinning without end: about 90 times by itself, between graphs, and 17,000 times not, in a minute of CPU
    time. Sleeping: 14,000 and 4,000 times, in 0.3 seconds."""
    child = subprocess.run(
        [sys.executable, "-c", CODE, str(tiny_path)], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    (alone, _, _), (together, by_itself, taken) = json.loads(child.stdout)
    assert together == alone
    assert by_itself > 40 * 20, (by_itself, taken)
    assert by_itself > taken, (by_itself, taken)
