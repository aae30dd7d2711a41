"""Helpers of the data set tests: inputs, and comparison of data sets file by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from support.tiny import TinyLlama

from reference import decoder

#: An assistant's turn ends in </s>, and blanks around what is said are cut.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% if m.role == 'assistant' %}</s>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines; a str is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def random_rows(seed: int, count: int, longest: int = 60) -> list[dict[str, Any]]:
    """Rows of token ids and loss masks, the first token never in it."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in rng.integers(2, longest, count).tolist():
        mask = [0, 1, *rng.integers(0, 2, length - 2).tolist()]
        rows.append({"input_ids": rng.integers(3, 250, length).tolist(), "loss_mask": mask})
    return rows


def read_states(path: Path) -> tuple[NDArray[Any], NDArray[Any], dict[str, str]]:
    """Token ids, states and metadata of a file."""
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["hidden_states", "token_ids"]
        return file.get_tensor("token_ids"), file.get_tensor("hidden_states"), file.metadata()


def expected_states(tiny: TinyLlama, tokens: list[int], layers: list[int]) -> NDArray[np.float64]:
    """States by NumPy's formulas, (n, layers, n_embd)."""
    streams, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))
    return np.stack([streams[layer] for layer in layers], 1)


def visible_files(folder: Path) -> list[Path]:
    """The files of a data set, without what is there while it is written."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in files if path.parts[0] != ".llamatap"]


def assert_same(found: Path, expected: Path) -> None:
    """Assert that two data sets are equal bit for bit, except for the order of safetensors metadata."""
    assert visible_files(found) == visible_files(expected)
    for name in visible_files(expected):
        if name.suffix == ".safetensors":
            *arrays, metadata = read_states(found / name)
            *expected_arrays, expected_metadata = read_states(expected / name)
            assert metadata == expected_metadata
            for one, other in zip(arrays, expected_arrays, strict=True):
                assert isinstance(one, np.ndarray)
                assert isinstance(other, np.ndarray)
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes(), name
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
