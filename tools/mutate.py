"""Break the code on purpose, one place at a time, and show that a test fails: tests/mutations.md.

    python tools/mutate.py [--only NAME]

Works on the checkout it lies in, which must be clean, with its own environment (.venv) and persistent build
folder; puts every file back. A mutation that no longer applies, or that its test survives, is an error.

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


def first_failure(tests: str) -> str | None:
    """Install the checkout and run the tests: the first that fails, if any does."""
    installed = run(["make", ".venv/.tools", ".venv/.installed"])
    if installed.returncode != 0:
        sys.exit(f"the mutant does not build:\n{installed.stdout[-3000:]}{installed.stderr[-3000:]}")
    result = run([str(PYTHON), "-m", "pytest", "-x", "-q", "--tb=no", *tests.split()])
    for line in result.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            # "FAILED name - reason", where a name may hold spaces.
            return line.partition(" ")[2].partition(" - ")[0].removeprefix("tests/python/")
    # An abort leaves no summary.
    return f"{tests} (signal {-result.returncode})" if result.returncode < 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code, and show that tests fail.")
    parser.add_argument("--only", help="a part of a mutation's name")
    arguments = parser.parse_args()
    if run(["git", "status", "--porcelain", "csrc", "python"]).stdout:
        sys.exit("csrc/ or python/ has changes that are not committed")
    for mutation in MUTATIONS:
        count = (ROOT / mutation.path).read_text().count(mutation.old)
        if count != 1:
            sys.exit(f"{mutation.what}: {mutation.old!r} occurs {count} times in {mutation.path}")
    lines = []
    survived = []
    for mutation in MUTATIONS:
        if arguments.only and arguments.only not in mutation.what:
            continue
        path = ROOT / mutation.path
        good = path.read_text()
        path.write_text(good.replace(mutation.old, mutation.new))
        try:
            failed = first_failure(mutation.tests)
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
