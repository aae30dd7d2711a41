"""Models that cannot give states: they load, say why they cannot, and never end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models.registry import FILES

#: Run apart, since an abort of the engine ends the process: what each way to compute raises.
PROGRAM = """
import json, sys
import llamatap as lt

def tried(action):
    try:
        action()
    except lt.Error as error:
        return [type(error).__name__, str(error)]
    return ["ok", ""]

def tap():
    with model.context(n_ctx=64) as context, context.tap([0]):
        context.decode(lt.Batch.of([5, 6, 7]))

def decode():
    with model.context(n_ctx=64) as context:
        context.decode(lt.Batch.of([5, 6, 7]))

model = lt.Model(sys.argv[1])
ways = {"extract": lambda: lt.extract(model, [5, 6, 7], [0]), "tap": tap, "decode": decode}
print(json.dumps({name: tried(way) for name, way in ways.items()}))
"""


def outcome(name: str, tmp_path: Path) -> dict[str, list[str]]:
    path = FILES[name]().write(tmp_path / "tiny.gguf")
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("eagle3", "drafts for another"),
        ("eagle3-headless", "drafts for another"),
        ("dflash", "drafts for another"),
        ("gemma4-assistant", "drafts for another"),
        ("plm", "aborts"),
    ],
)
def test_no_context_can_be_made(name: str, reason: str, tmp_path: Path) -> None:
    arch = FILES[name]().arch
    for way, (kind, message) in outcome(name, tmp_path).items():
        assert kind == "UnsupportedError", way
        assert message.startswith(f"{arch}: ")
        assert reason in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "wavtokenizer-dec"])
def test_what_has_no_single_stream_can_still_be_computed(name: str, tmp_path: Path) -> None:
    found = outcome(name, tmp_path)
    for way in ("extract", "tap"):
        kind, message = found[way]
        assert kind == "UnsupportedError"
        assert "no single residual stream" in message
    assert found["decode"] == ["ok", ""]


def test_embeddings_in_the_place_of_tokens_where_the_engine_aborts(tmp_path: Path) -> None:
    path = FILES["graniteswitch"]().write(tmp_path / "tiny.gguf")
    program = """
import sys
import numpy as np
import llamatap as lt
model = lt.Model(sys.argv[1])
batch = lt.Batch(n_embd=model.n_embd)
batch.add_embedding(np.ones(model.n_embd, np.float32), 0, output=True)
with model.context(n_ctx=64) as context:
    try:
        context.decode(batch)
    except lt.UnsupportedError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "from tokens only" in done.stdout
