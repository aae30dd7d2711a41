"""Golden translations: which state an id of another system names, written out by hand for n = 36."""

from __future__ import annotations

import pytest

from llamatap import InvalidInputError, LayerId
from llamatap.layers import CONVENTIONS, default_eagle3_layers, normalize, slots, translate

N = 36

#: (system, its id, llamatap's id), n = 36, e.g. Qwen3-4B. From the table of the module's docstring.
GOLDEN: list[tuple[str, int, LayerId]] = [
    ("transformers", 0, 0),
    ("transformers", 35, 35),
    ("transformers", 36, "norm"),
    ("transformers", -1, "norm"),
    ("transformers", -2, 35),
    ("transformers", -37, 0),
    ("vllm", 2, 2),
    ("vllm", 18, 18),
    ("vllm", 33, 33),
    ("vllm", 36, 36),
    ("speculators", 36, 36),
    ("eagle3-gguf", 2, 2),
    ("eagle3-gguf", 33, 33),
    ("sglang", 1, 2),
    ("sglang", 17, 18),
    ("sglang", 35, 36),
    ("specforge", 32, 33),
    ("torchspec", 0, 1),
    ("dflash", 1, 2),
    ("dflash", 35, 36),
    ("dspark", 9, 10),
    ("dflash-gguf", 2, 2),
    ("llamatap", -1, 36),
    ("llamatap", -2, 35),
    ("llamatap", -37, 0),
]


@pytest.mark.parametrize(("system", "theirs", "ours"), GOLDEN)
def test_golden(system: str, theirs: int, ours: LayerId) -> None:
    assert translate([theirs], source=system, n_layer=N) == [ours]
    back = translate([ours], target=system, n_layer=N)
    assert translate(back, source=system, n_layer=N) == [ours]


def test_defaults_of_two_systems_are_the_same_tensors() -> None:
    assert default_eagle3_layers(N) == [2, 18, 33]
    assert translate([1, N // 2 - 1, N - 4], source="specforge", n_layer=N) == [2, 18, 33]
    assert translate([2, 18, 33], target="sglang", n_layer=N) == [1, 17, 32]
    assert translate([-2], source="transformers", target="vllm", n_layer=N) == [35]


@pytest.mark.parametrize(
    ("system", "wrong"),
    [
        ("transformers", 37),
        ("transformers", -38),
        ("vllm", 37),
        ("vllm", -1),
        ("sglang", 36),
        ("sglang", -1),
        ("dflash", 36),
        ("eagle3-gguf", "norm"),
        ("transformers", "norm"),
        ("llamatap", 37),
        ("llamatap", "pre"),
        ("vllm", 1.5),
        ("vllm", True),
        ("huggingface", 1),
    ],
)
def test_wrong_ids_raise(system: str, wrong: LayerId) -> None:
    with pytest.raises(InvalidInputError):
        translate([wrong], source=system, n_layer=N)


@pytest.mark.parametrize(
    ("system", "layer"),
    [("transformers", 36), ("vllm", "norm"), ("sglang", 0), ("sglang", "norm"), ("dflash", 0)],
)
def test_states_that_a_system_cannot_name(system: str, layer: LayerId) -> None:
    with pytest.raises(InvalidInputError, match="no id"):
        translate([layer], target=system, n_layer=N)


def test_every_convention_goes_there_and_back() -> None:
    for convention in CONVENTIONS.values():
        for n in (1, 2, 36):
            for k in range(n - convention.offset + 1):
                ours = convention.to_llamatap(k, n)
                assert convention.from_llamatap(ours, n) == k


def test_a_model_without_a_final_norm() -> None:
    """The last entry of transformers is then what leaves the last block."""
    assert translate([-1, 0], source="transformers", n_layer=12) == ["norm", 0]
    assert translate([-1, 0], source="transformers", n_layer=12, final_norm=False) == [12, 0]
    assert translate([12], target="transformers", n_layer=12, final_norm=False) == [12]
    with pytest.raises(InvalidInputError):
        translate(["norm"], n_layer=12, final_norm=False)


def test_normalize_and_slots() -> None:
    assert normalize([0, -1, "norm", -2, 2], 4) == (0, 4, "norm", 3, 2)
    assert normalize(-1, 4) == (4,)
    assert normalize("norm", 4) == ("norm",)
    assert slots([0, 4, "norm"], 4) == [0, 4, 5]
    with pytest.raises(InvalidInputError):
        normalize([], 4)
