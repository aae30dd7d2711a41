from __future__ import annotations

import ast
import re

from support.paths import TESTS


def test_every_test_that_a_case_names_is_there() -> None:
    table = (TESTS / "cases.md").read_text()
    named = re.findall(r"`([\w/]+/test_\w+)::(test_\w+)`", table)
    assert len(named) > 60
    cases = [int(case) for case in re.findall(r"^\| (\d+) \|.*`[\w/]+/test_", table, re.M)]
    assert cases == sorted({*cases, *range(1, 52), 53, 54})
    missing = []
    for module in {module for module, _ in named}:
        tree = ast.parse((TESTS / "python" / f"{module}.py").read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing += [f"{name}::{test}" for name, test in named if name == module and test not in there]
    assert not missing
