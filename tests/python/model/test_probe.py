"""lt.probe: files inspected in a child process, and the errors of broken files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.numerics import computes_with_nan, relative
from support.paths import TESTS
from support.tiny import TinyLlama
from support.tiny_models.registry import FILES

import llamatap as lt
from llamatap import probing


def test_probe_tells_what_a_file_is(tiny: TinyLlama, tiny_path: Path, tiny_model: lt.Model) -> None:
    found = lt.probe(tiny_path)
    assert (found.loads, found.states, found.error) == (True, True, None)
    assert (found.arch, found.n_layer, found.n_embd) == ("llama", tiny.n_layer, tiny.n_embd)
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3, 4, "norm"]
    assert [layer.node for layer in found.layers] == [name for name, _ in tiny_model.layer_map.nodes]
    tokens = np.linspace(0, tiny.n_vocab - 1, 16).astype(np.int32)
    rms = np.sqrt(np.mean(tiny.entering(tokens) ** 2))
    assert found.layers[0].rms == pytest.approx(rms, rel=1e-6)
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["finite"] is True


def test_probe_tells_of_files_that_are_none(tmp_path: Path) -> None:
    found = lt.probe(tmp_path / "missing.gguf")
    assert (found.loads, found.states, found.arch) == (False, False, None)
    assert "no such file" in str(found.error)
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUFjunk")
    assert "not a readable GGUF file" in str(lt.probe(junk).error)
    with pytest.raises(lt.InvalidInputError, match="timeout"):
        lt.probe(junk, timeout=0)
    with pytest.raises(lt.InvalidInputError, match="n_threads"):
        lt.probe(junk, n_threads=0)


@computes_with_nan
def test_probe_sees_states_that_are_not_finite(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["blk.2.ffn_down.weight"][:] = np.nan
    found = lt.probe(tiny.write(tmp_path / "nan.gguf"))
    assert found.states
    assert [layer.finite for layer in found.layers] == [True, True, True, False, False, False]
    assert math.isnan(found.layers[3].rms)
    assert found.to_dict()["layers"][3]["rms"] is None


@pytest.mark.slow
def test_threads_reach_the_child(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = subprocess.run

    def noting(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noting)
    for n_threads in (1, None):
        assert lt.probe(tiny_path, n_threads=n_threads).states
    found: list[int | None] = []

    def counting(given: int | None) -> int:
        found.append(given)
        return 1

    monkeypatch.setattr("llamatap.context.thread_count", counting)
    for command in commands:
        with (tmp_path / "results").open("wb") as results:
            paths, threads = command[3:5], command[6:]
            monkeypatch.setattr(sys, "argv", ["-c", *paths, str(results.fileno()), *threads])
            exec(command[2])
    assert found == [1, None]


def test_probe_outlives_its_child(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = """
import os, sys
os.write(int(sys.argv[3]), b'{"loads": true, "arch": "llama"}\\n{"n_layer": 4, "n_em')
os.abort()
"""
    monkeypatch.setattr(probing, "_CHILD", dies)
    found = lt.probe(tiny_path)
    assert (found.loads, found.states, found.arch, found.n_layer) == (True, False, "llama", None)
    assert "SIGABRT" in str(found.error)
    monkeypatch.setattr(probing, "_CHILD", "import time; time.sleep(60)")
    assert "0.3 seconds" in str(lt.probe(tiny_path, timeout=0.3).error)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_what_else_the_child_prints_is_no_result(
    where: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start, in the middle of it, and at its end."""
    noise = tmp_path / "site"
    noise.mkdir()
    (noise / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "def say(*_):\n"
        f"    print('hello', file=sys.{where})\n"
        '    os.write(1, b\'{"loads": false, "error": "none of ours"}\\n\')\n'
        "say()\n"
        "atexit.register(say)\n"
        "class Finder:\n"
        "    find_spec = staticmethod(say)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(noise))
    child = subprocess.run([sys.executable, "-c", ""], capture_output=True, text=True)
    assert "hello" in child.stdout + child.stderr
    found = lt.probe(tiny_path)
    assert (found.loads, found.states, found.error, found.arch) == (True, True, None, "llama")
    assert len(found.layers) == 6
    assert "no such file" in str(lt.probe(tmp_path / "missing.gguf").error)


def rewritten(source: Path, target: Path, **values: float) -> Path:
    """A copy of a GGUF file with other scalars, in place."""
    target.write_bytes(source.read_bytes())
    reader = gguf.GGUFReader(target, "r+")
    for key, value in values.items():
        field = reader.fields[key.replace("__", ".")]
        field.parts[field.data[0]][0] = value
    reader.data.flush()
    return target


def test_a_file_that_is_not_complete_says_so(tiny_path: Path, tmp_path: Path) -> None:
    whole = tiny_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-1000])
    with pytest.raises(lt.ModelLoadError, match=rf"end at byte \d+, but the file has {len(whole) - 1000}"):
        lt.Model(cut)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "not a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "must not be negative"),
        ("llama.rope.freq_base", math.inf, "not a finite number"),
        ("llama.block_count", 3, r"blk\.3\..* is beyond the 3 blocks"),
        ("llama.block_count", 0, "is beyond the 0 blocks"),
        ("llama.block_count", 2**31, "n_layer"),
        ("llama.attention.head_count", 0, "."),
        ("llama.embedding_length", 63, "."),
        ("llama.rope.dimension_count", 12, "n_rot"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, key: str, value: float, message: str
) -> None:
    path = rewritten(tiny_path, tmp_path / "spoilt.gguf", **{key.replace(".", "__"): value})
    with pytest.raises((lt.ModelLoadError, lt.EngineError, lt.UnsupportedError), match=message):
        lt.extract(lt.Model(path), [1, 2, 3])
    # An assertion of the engine was an exception, and left nothing behind.
    first, second = (lt.extract(tiny_model, [5, 6, 7]).array for _ in range(2))
    assert relative(first, second) == 0


def test_weights_of_integers_are_refused(tmp_path: Path) -> None:
    tiny = TinyLlama()
    weights = tiny.weights["blk.1.attn_output.weight"]
    tiny.weights["blk.1.attn_output.weight"] = weights.view(np.int32)
    with pytest.raises(lt.ModelLoadError, match=r"blk\.1\.attn_output\.weight is of type i32"):
        lt.Model(tiny.write(tmp_path / "i32.gguf"))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("bert", "token_types.weight"),
        ("gemma4", "blk.0.layer_output_scale.weight"),
        ("gemma4", "output_norm.weight"),
        ("rwkv6", "blk.0.time_mix_lerp_x.weight"),
        ("rwkv7", "blk.0.time_mix_k_k.weight"),
    ],
)
def test_what_is_used_element_by_element_is_of_float32(tmp_path: Path, file: str, name: str) -> None:
    """The engine would abort in the middle of its computation, where that cannot be caught."""
    tiny = FILES[file]()
    tiny.f16 = (name,)
    message = f"{name} is of type f16; tensors used element by element must be f32"
    with pytest.raises(lt.ModelLoadError, match=message):
        lt.Model(tiny.write(tmp_path / "f16.gguf"))


@pytest.mark.fuzz
@computes_with_nan
def test_spoilt_files_never_end_the_process(tmp_path: Path, arch_models: Path) -> None:
    """Over two thousand spoilt files, each in a child process: a result or an error, never a signal."""
    for seed in (0, 1):
        TinyLlama(n_layer=2, seed=seed).write(tmp_path / f"llama-{seed}.gguf", chat_template="{{ messages }}")
    llamas = [str(path) for path in sorted(tmp_path.glob("*.gguf"))]
    ours = [str(write().write(tmp_path / f"{name}.gguf")) for name, write in FILES.items()]
    engines = [str(path) for path in sorted(arch_models.glob("*.gguf"))]
    for files, count in ((llamas, 1200), (ours, 300), (engines, 600)):
        command = [sys.executable, "-m", "fuzz.run", *files, "--count", str(count)]
        result = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        assert sum(found["counts"].values()) == count
        assert found["bad"] == []
        # Spoilt files are spoilt, and not all of them at the first look.
        assert found["counts"]["ModelLoadError"] > count / 4
        assert found["counts"]["ok"] > count / 20
