"""The programs in examples/ work as their docstrings say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.numerics import EXACT
from support.paths import ROOT
from support.tiny import TinyLlama
from support.tiny_models import drafters, rigged

import llamatap as lt

EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["random", "right", "some", "wrong"])
def test_the_own_loop_gives_what_generate_gives(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    own_loop = load("own_loop")
    if kind == "random":
        target = TinyLlama().write(tmp_path / "target.gguf")
        draft = drafters.write_eagle3(tmp_path / "draft.gguf", n_draft_vocab=100)
        prompt = rng.integers(3, 259, 40).tolist()
    else:
        f = rigged.cycle()
        wrong = {"right": range(0), "some": range(12, 64, 4), "wrong": range(64)}[kind]
        target = rigged.write_rigged_model(tmp_path / "target.gguf", f)
        draft = rigged.write_rigged_eagle3(tmp_path / "draft.gguf", f, rigged.wrong_at(f, wrong))
        prompt = [1, 9, 30, 12, 13]
    with lt.Model(target) as model, model.context(n_ctx=512, **EXACT) as context:
        spec = lt.SpeculativeContext(context, draft, **EXACT)
        found = own_loop.generate(context, spec, prompt, 50)
        context.memory.clear()
        spec.memory.clear()
        expected = next(lt.generate(context, prompt, max_tokens=50, ignore_eos=True))
        assert found == expected.tokens.tolist()
        drafter = lt.Eagle3Drafter(spec, n_max=3)
        drafted = next(lt.generate(context, prompt, drafter, max_tokens=50, ignore_eos=True))
        assert found == drafted.tokens.tolist()
    source = (EXAMPLES / "own_loop.py").read_text().splitlines()
    assert len(source) < 60


def test_the_own_drafter_learns_from_earlier_texts(tmp_path: Path) -> None:
    f = rigged.cycle()
    target = rigged.write_rigged_model(tmp_path / "target.gguf", f)
    drafter = load("own_drafter").PairDrafter()
    prompt = [1, 9, 30, 12, 13]
    with lt.Model(target) as model, model.context(n_ctx=512, **EXACT) as context:
        plain = next(lt.generate(context, prompt, max_tokens=30, ignore_eos=True))
        first = next(lt.generate(context, prompt, drafter, max_tokens=30, ignore_eos=True))
        again = next(lt.generate(context, prompt, drafter, max_tokens=30, ignore_eos=True))
    assert first.tokens.tolist() == again.tokens.tolist() == plain.tokens.tolist()
    assert first.stats.drafted == 0
    # The drafter has seen this text before, except for its beginning.
    assert again.stats.acceptance == 1.0
    assert again.stats.tokens_per_round > 4


@pytest.mark.slow
def test_they_run_as_programs(tmp_path: Path) -> None:
    f = rigged.cycle()
    target = rigged.write_rigged_model(tmp_path / "target.gguf", f)
    draft = rigged.write_rigged_eagle3(tmp_path / "draft.gguf", f, f)
    for arguments in (["own_loop.py", target, draft, "abc"], ["own_drafter.py", target, "abc", "abd"]):
        done = subprocess.run(
            [sys.executable, EXAMPLES / str(arguments[0]), *map(str, arguments[1:])],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.slow
def test_rollouts_train_their_drafter(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")
    target = TinyLlama(n_layer=7, seed=3).write(tmp_path / "target.gguf")
    program = EXAMPLES / "rollout_trainer.py"
    done = subprocess.run(
        [sys.executable, program, target, tmp_path / "drafters"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *steps, last = done.stdout.splitlines()
    assert [line.split(":")[0] for line in steps] == [f"step {step}" for step in range(5)]
    assert steps[0].startswith("step 0: 1.00 tokens per round")
    losses = [float(line.split()[-1]) for line in steps]
    assert losses[-1] < losses[0]
    assert Path(last) == tmp_path / "drafters" / "drafter-4.gguf"
    example = load("rollout_trainer")
    put: list[lt.Generation] = []
    with lt.Model(target) as model, model.context(n_ctx=1024, n_seq_max=8, **EXACT) as context:
        example.rollouts(context, Path(last), 0, put.append)
    assert len(put) == 8
    assert sum(one.stats.drafted for one in put) > 0
    assert all(one.states is not None and one.states.layers == (2, 3, 4, 7) for one in put)
    assert len(program.read_text().splitlines()) < 120


@pytest.mark.slow
def test_z_image_encodes_without_diffusers(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "tiny.gguf")
    preset = tmp_path / "mine.toml"
    preset.write_text(
        'name = "mine"\n[prompt]\ntemplate = "<{{ prompt }}>"\n'
        '[states]\nconvention = "transformers"\nlayers = [-2]\n'
    )
    found = load("z_image").encode(str(path), "a {{ b }}", str(preset))
    with lt.Model(path) as model:
        expected = lt.extract(model, "<a {{ b }}>", layers=[3], dtype="bfloat16")[3]
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "z_image.py", path, "a {{ b }}", "--preset", preset],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"prompt_embeds {expected.shape} bfloat16\n"
    for arguments in (["missing.gguf", "a"], [path, "a"]):
        done = subprocess.run(
            [sys.executable, EXAMPLES / "z_image.py", *arguments], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
