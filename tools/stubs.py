"""Write the stubs of the native core, or check that the committed ones are what it would write.

python tools/stubs.py            writes python/llamatap/_core.pyi
python tools/stubs.py --check    compares, then runs mypy.stubtest
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "llamatap" / "_core.pyi"
ALLOWLIST = ROOT / "tools" / "stubtest-allowlist.txt"
BIN = Path(sys.executable).parent


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "llamatap._core", "-o", folder]
        command += ["--exit-code", "--numpy-array-use-type-var"]
        subprocess.run(command, check=True, cwd=folder)
        stub = (Path(folder) / "llamatap" / "_core.pyi").read_text()
    formatted = subprocess.run(
        [BIN / "ruff", "format", "--stdin-filename", str(STUB), "-"],
        input=stub,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return formatted.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    fresh = generate()
    if not arguments.check:
        STUB.write_text(fresh)
        return 0
    if STUB.read_text() != fresh:
        changes = difflib.unified_diff(
            STUB.read_text().splitlines(), fresh.splitlines(), "committed", "generated", lineterm=""
        )
        print("\n".join(changes))
        print("the stubs are stale: run make stubs", file=sys.stderr)
        return 1
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "llamatap._core",
            "--allowlist",
            str(ALLOWLIST),
            "--mypy-config-file",
            "pyproject.toml",
        ],
        check=False,
        env=environment,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
