"""Break the code on purpose, one place at a time, and show that a test fails: tests/mutations.md.

    python tools/mutate.py [--only NAME] [--packages FOLDER]

Works on the checkout it lies in, which must be clean, with its own environment (.venv) and persistent build
folder; puts every file back. A mutation that no longer applies, or that its test survives, is an error.

Some tests need PyTorch, which .venv lacks: its packages come from FOLDER, by default from what
`nox -s train` installed.

mutmut is not used: it mutates Python alone, and runs the tests for thousands of mutants that mean little.
These are chosen, many of them in C++, and each runs the one test that must fail.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.md"
PYTHON = ROOT / ".venv" / "bin" / "python"

HEAD = """# Mutations

Made by `python tools/mutate.py`: each line is one place of the code, broken on purpose, and the first test
that failed for it.

| what is broken | where | the test that fails |
| --- | --- | --- |
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pytest_command(packages: Path | None) -> list[str]:
    """Run pytest of .venv, with the packages of another environment where it lacks them."""
    if packages is None:
        return [str(PYTHON), "-m", "pytest"]
    code = f"import sys, pytest; sys.path.append({str(packages)!r}); sys.exit(pytest.main())"
    return [str(PYTHON), "-c", code]


def first_failure(tests: str, packages: Path | None) -> str | None:
    """Install the checkout and run the tests: the first that fails, if any does."""
    installed = run(["make", ".venv/.tools", ".venv/.installed"])
    if installed.returncode != 0:
        sys.exit(f"the mutant does not build:\n{installed.stdout[-3000:]}{installed.stderr[-3000:]}")
    result = run([*pytest_command(packages), "-x", "-q", "--tb=no", *tests.split()])
    for line in result.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            # "FAILED name - reason", where a name may hold spaces.
            return line.partition(" ")[2].partition(" - ")[0].removeprefix("tests/python/")
    # An abort leaves no summary.
    return f"{tests} (signal {-result.returncode})" if result.returncode < 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code, and show that tests fail.")
    parser.add_argument("--only", help="a part of a mutation's name")
    parser.add_argument("--packages", type=Path, help="site-packages with PyTorch")
    arguments = parser.parse_args()
    packages = arguments.packages or next(ROOT.glob(".nox/train/lib/python*/site-packages"), None)
    if run(["git", "status", "--porcelain", "csrc", "python"]).stdout:
        sys.exit("csrc/ or python/ has changes that are not committed")
    for mutation in MUTATIONS:
        count = (ROOT / mutation.path).read_text().count(mutation.old)
        if count != 1:
            sys.exit(f"{mutation.what}: {mutation.old!r} occurs {count} times in {mutation.path}")
    chosen = [one for one in MUTATIONS if not arguments.only or arguments.only in one.what]
    if packages is None and any(one.torch for one in chosen):
        sys.exit("some tests need PyTorch: give --packages, or run `nox -s train` before")
    lines = []
    survived = []
    for mutation in chosen:
        path = ROOT / mutation.path
        good = path.read_text()
        path.write_text(good.replace(mutation.old, mutation.new))
        try:
            failed = first_failure(mutation.tests, packages if mutation.torch else None)
        finally:
            path.write_text(good)
        print(f"{mutation.what}: {failed or 'SURVIVED'}", flush=True)
        if failed is None:
            survived.append(mutation.what)
        lines.append(f"| {mutation.what} | {mutation.path} | {failed} |")
    run(["make", ".venv/.tools", ".venv/.installed"])
    if survived:
        sys.exit("not seen by any test: " + "; ".join(survived))
    if not arguments.only:
        TABLE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
