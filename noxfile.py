"""Tests and programs that want environments or builds of their own: ``nox --list``, ``nox -s debug``.

An environment lies in ``.nox/NAME`` and is kept; ``nox -R`` skips its installs. ``TORCH=...`` is
the requirement for PyTorch that pip gets: a version pinned there may be a smaller build, without CUDA.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).parent
TORCH = os.environ.get("TORCH", "torch").split()
GROUPS = nox.project.load_toml("pyproject.toml")
#: The usual environment, as ``make`` builds it: the package, and what tests it.
USUAL = str(ROOT / ".venv" / "bin" / "python")
USUAL_TARGETS = (".venv/.tools", ".venv/.installed")

#: As ``make test``: one process a core, each takes whole test files.
PARALLEL = ("--numprocesses", "auto", "--maxprocesses", "8", "--dist", "loadfile")

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.stop_on_first_error = True
# Without a name none runs: each takes minutes.
nox.options.sessions = []


def make(session: nox.Session, *targets: str) -> None:
    session.run("make", *targets, external=True)


def install(session: nox.Session, *options: str, extras: str = "") -> None:
    """llamatap, built here, with what its tests need."""
    session.install("pip>=25.1", *nox.project.dependency_groups(GROUPS, "build", "test"))
    session.install("--no-build-isolation", f".{extras}", *options)


def peer(session: nox.Session, *tests: str) -> None:
    """Tests in the usual environment, beside the one of this session, which holds the peer alone."""
    make(session, *USUAL_TARGETS)
    python = session.virtualenv.bin + "/python"
    session.run(USUAL, "-m", "pytest", *tests, *session.posargs, env={"PEER_PYTHON": python}, external=True)


@nox.session(tags=["peers"])
def speculators(session: nox.Session) -> None:
    """The library that trains drafters: with our server as verifier, our data sets, and its checkpoints."""
    session.install(*TORCH, "speculators==0.9.0")
    python = session.virtualenv.bin + "/python"
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        # The index's torchvision goes with the index's torch alone; texts do without.
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio")
    peer(
        session,
        "tests/peers/test_speculators.py",
        "tests/peers/test_convert.py",
        "tests/peers/test_heads.py",
        "tests/python/dataset/test_trainers.py",
        "-k",
        "not specforge",
    )


@nox.session(tags=["peers"])
def specforge(session: nox.Session) -> None:
    """SpecForge reading our data sets. The engines that it pins are for other things."""
    session.install(*TORCH, "numpy")
    session.install("--no-deps", "specforge==0.2.0")
    peer(session, "tests/python/dataset/test_trainers.py", "-k", "specforge")


@nox.session(name="lm-eval", tags=["peers"])
def lm_eval(session: nox.Session) -> None:
    """lm-eval scoring a model through the server."""
    session.install("lm-eval[api]==0.4.13")
    peer(session, "tests/peers/test_lm_eval.py")


@nox.session(tags=["peers"])
def train(session: nox.Session) -> None:
    """Training with PyTorch, beside the code of a trainer; connectors; its weights; `datasets`; examples."""
    install(session)
    session.install(*TORCH, "speculators==0.9.0")
    files = (
        "train",
        "connectors",
        "convert/test_torch.py",
        "dataset/test_layouts.py",
        "dataset/test_saved.py",
        "repository/test_examples.py",
    )
    session.run("python", "-m", "pytest", *(f"tests/python/{name}" for name in files), *session.posargs)


@nox.session(tags=["peers"])
def ray(session: nox.Session) -> None:
    """Data sets by workers of Ray, two of them on this machine."""
    install(session)
    session.install("ray[data]==2.60.0", "pyarrow>=14")
    session.run("python", "-m", "pytest", "tests/python/ray", *session.posargs)


@nox.session(tags=["peers"])
def neighbours(session: nox.Session) -> None:
    """PyTorch and another package's llama.cpp in one process with ours."""
    install(session)
    session.install(*TORCH)
    # Without GGML_NATIVE=OFF that one dies by itself on CPUs with AMX (llama.cpp#26954).
    flags = os.environ.get("CMAKE_ARGS", "") + " -DGGML_NATIVE=OFF"
    session.install("--no-cache-dir", "llama-cpp-python", env={"CMAKE_ARGS": flags})
    session.run("python", "-m", "pytest", "tests/neighbours", *session.posargs)


def _transformers(session: nox.Session) -> str:
    session.install(*TORCH)
    session.install("transformers", "gguf", "accelerate", "numpy", "diffusers")
    return session.virtualenv.bin + "/python"


@nox.session
def golden(session: nox.Session) -> None:
    """Writes the oracle rows of tests/data anew, from transformers and diffusers."""
    python = _transformers(session)
    make(session, *USUAL_TARGETS)
    session.run(USUAL, "vendor/fetch.py", "--set", "peers", external=True)
    smollm2 = session.run(USUAL, "-m", "llamatap", "fetch", "smollm2", external=True, silent=True)
    for program, source, target in (
        ("make_smollm2", [str(smollm2).strip()], "smollm2_golden.npz"),
        ("make_z_image", ["vendor/llama.cpp/models"], "z_image_golden.npz"),
        ("make_layer_numbers", [], "layer_numbers.json"),
        ("make_states", [], "states_golden.npz"),
    ):
        session.run(python, f"tests/golden/{program}.py", *source, f"tests/data/{target}", external=True)


@nox.session
def fidelity(session: nox.Session) -> None:
    """Writes docs/fidelity.md: every layer and file type against transformers; fails beyond its bounds."""
    python = _transformers(session)
    make(session, *USUAL_TARGETS, "build/fidelity/quantize")
    session.run(USUAL, "tests/fidelity/measure.py", "--peer", python, *session.posargs, external=True)


@nox.session(name="bench-transformers")
def bench_transformers(session: nox.Session) -> None:
    """Tokens per second beside transformers; JSON in bench/results/."""
    python = _transformers(session)
    make(session, *USUAL_TARGETS, "build/fidelity/quantize")
    session.run(USUAL, "bench/against_transformers.py", "--peer", python, *session.posargs, external=True)


@nox.session
def debug(session: nox.Session) -> None:
    """The tests against a Debug build, assertions on."""
    # With a release's arithmetic: other compiler options would change the engine's rounding.
    make(session, *USUAL_TARGETS, "build/archs/test-llama-archs")
    flags = [f"cmake.define.CMAKE_{language}_FLAGS_DEBUG=-g -O3" for language in ("C", "CXX")]
    options = ["-C", "cmake.build-type=Debug", *(word for flag in flags for word in ("-C", flag))]
    install(session, *options, extras="[dataset,demo,server]")
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """The tests against a core and an engine built with AddressSanitizer and UBSan."""
    make(session, *USUAL_TARGETS, "build/archs/test-llama-archs")
    settings = ("cmake.build-type=RelWithDebInfo", "cmake.define.LLAMATAP_SANITIZE=address,undefined")
    options = [word for setting in (*settings, "build-dir=build/sanitize") for word in ("-C", setting)]
    install(session, *options, extras="[dataset,demo,server]")
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # Python itself is not instrumented: preload the runtime, ignore what CPython leaks at exit.
    # Spoilt files are left out: the engine reads enums of values without an enumerator and checks later.
    session.run(
        *("python", "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", "-k", "not spoilt_files"),
        *PARALLEL,
        *session.posargs,
        env={
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    )
