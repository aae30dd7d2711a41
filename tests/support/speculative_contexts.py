"""Draft contexts with random weights beside their targets, and their oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from support.drafting import EXACT
from support.numerics import relative
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.qwen35 import Qwen35WithMtp

import llamatap as lt
from reference import decoder, eagle3, mtp, mtp_qwen35

#: Tokens, states, positions and a head to logits and the next states, of one sequence.
Formula: TypeAlias = (
    "Callable[[Sequence[int], NDArray[np.float32], Sequence[int], int], "
    "tuple[NDArray[np.float64], NDArray[np.float64]]]"
)
N = 24  # pairs of a sequence

EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "inherited": {"own_embedding": False, "own_head": False},
    "an embedding of its own": {"own_head": False},
    "a head of its own": {"own_embedding": False},
    "d2t": {"n_draft_vocab": 100},
    "d2t of all": {"n_draft_vocab": 259},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "first and last layer": {"target_layers": (0, 2, 4)},
    "layers backwards": {"target_layers": (4, 3, 1)},
    "narrow": {"n_embd": 48},
    "all at once": {
        "n_embd": 48,
        "n_draft_vocab": 50,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_layers": (1, 3, 4),
        "seed": 3,
    },
}
MTP: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_norm layer": {"head_norm": "layer"},
    "head_norm trunk": {"head_norm": "trunk"},
    "a head of its own": {"own_head": True},
    "an embedding of its own": {"own_embedding": True},
    "three heads": {"n_nextn": 3},
    "three heads, all their own": {"n_nextn": 3, "own_head": True, "own_embedding": True, "seed": 4},
    "a window": {"n_layer": 2, "window": 8},
}
QWEN35: dict[str, dict[str, Any]] = {
    "plain": {},
    "the trunk's norm": {"own_norm": False},
    "a head and an embedding of its own": {"own_head": True, "own_embedding": True, "seed": 4},
}


@dataclass
class SpecUnderTest:
    """A draft context and its oracle."""

    spec: lt.SpeculativeContext
    formula: Formula
    eagle3: eagle3.Weights | None = None

    @property
    def allowed(self) -> NDArray[np.intp]:
        """The tokens that its head covers."""
        if self.eagle3 is None or self.eagle3.d2t is None:
            return np.arange(drafters.N_VOCAB)
        return self.eagle3.d2t

    def states(self, rng: np.random.Generator, n: int = N) -> NDArray[np.float32]:
        return rng.standard_normal((n, self.spec.n_state)).astype(np.float32)

    def given(self, states: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """The states as `decode` takes them: None where their width is 0."""
        return states if self.spec.n_state else None

    def check(
        self, found: lt.DraftOutput, logits: NDArray[np.float64], after: NDArray[np.float64] | None
    ) -> None:
        """Check that the output has these logits and next states."""
        assert found.logits is not None
        assert found.logits.shape == logits.shape
        others = np.setdiff1d(np.arange(logits.shape[1]), self.allowed)
        assert np.isneginf(found.logits[:, others]).all()
        assert relative(found.logits[:, self.allowed], logits[:, self.allowed]) < 1e-5
        if after is None or self.spec.n_state == 0:
            assert found.states is None
        else:
            assert found.states is not None
            assert found.states.shape == after.shape
            assert relative(found.states, after) < 1e-5
        assert np.array_equal(found.ids[:, 0], logits.argmax(axis=1))
        order = np.argsort(-found.logits, axis=1, kind="stable")
        assert np.array_equal(found.ids, order[:, : found.ids.shape[1]])
        expected = np.take_along_axis(eagle3.softmax(logits), found.ids.astype(np.int64), axis=1)
        assert np.abs(found.probs - expected).max() < 1e-4


@contextmanager
def beside(target: Path, draft: Path | None, **options: Any) -> Iterator[lt.SpeculativeContext]:
    """A draft context beside a target; None for blocks in the target's file."""
    with (
        lt.Model(target, load_mtp=True) as model,
        model.context(n_ctx=1024, n_seq_max=4, **EXACT) as context,
        lt.SpeculativeContext(context, draft or model, **{**EXACT, **options}) as spec,
    ):
        yield spec


@contextmanager
def eagle3_spec(folder: Path, name: str = "plain", **options: Any) -> Iterator[SpecUnderTest]:
    target = TinyLlama().write(folder / "target.gguf")
    draft = drafters.write_eagle3(folder / "draft.gguf", **EAGLE3[name])
    weights = eagle3.Weights.read(draft, target)

    def formula(tokens: Any, states: Any, positions: Any, head: int) -> Any:
        assert head == 0
        return eagle3.decode(tokens, states, positions, weights)

    with beside(target, draft, **options) as spec:
        yield SpecUnderTest(spec, formula, weights)


@contextmanager
def mtp_spec(
    folder: Path, name: str = "plain", whole: bool = True, **options: Any
) -> Iterator[SpecUnderTest]:
    draft = None
    if whole:
        target = file = drafters.write_mimo2(folder / "target.gguf", **MTP[name])
    else:
        n_layer = MTP[name].get("n_layer", 4)
        target = TinyLlama(n_layer=n_layer).write(folder / "target.gguf")
        draft = file = drafters.write_mtp_block(folder / "draft.gguf", **{**MTP[name], "n_layer": n_layer})
    weights = mtp.Weights.read(file)
    with beside(target, draft, **options) as spec:
        yield SpecUnderTest(
            spec, lambda tokens, states, at, head: mtp.decode(tokens, states, at, weights, head)
        )


@contextmanager
def qwen35_spec(
    folder: Path, name: str = "plain", whole: bool = True, **options: Any
) -> Iterator[SpecUnderTest]:
    tiny = Qwen35WithMtp(trunk=whole, **QWEN35[name])
    file = tiny.write(folder / "draft.gguf")
    target = file if whole else TinyLlama().write(folder / "target.gguf")
    with beside(target, None if whole else file, **options) as spec:
        yield SpecUnderTest(
            spec,
            lambda tokens, states, at, head: mtp_qwen35.decode(tokens, states, tiny.weights, tiny.shape()),
        )


@contextmanager
def model_spec(folder: Path, **options: Any) -> Iterator[SpecUnderTest]:
    tiny = TinyLlama(seed=5, n_layer=2)
    draft = tiny.write(folder / "draft.gguf")

    def formula(tokens: Any, states: Any, positions: Any, head: int) -> Any:
        entering = tiny.entering(np.asarray(tokens, np.int32))
        return decoder.forward(tiny.shape(), tiny.weights, entering)[2], states

    with beside(TinyLlama().write(folder / "target.gguf"), draft, **options) as spec:
        yield SpecUnderTest(spec, formula)


#: One of each kind that decodes pairs, or tokens.
SPECS: dict[str, Callable[..., Any]] = {
    "eagle3": lambda folder, **options: eagle3_spec(folder, "all at once", **options),
    "mtp": mtp_spec,
    "mtp block": lambda folder, **options: mtp_spec(folder, "three heads", whole=False, **options),
    "mtp of qwen35": qwen35_spec,
    "mtp block of qwen35": lambda folder, **options: qwen35_spec(folder, whole=False, **options),
    "model": model_spec,
}
#: Kinds whose tokens come with states, at positions without a gap. (Where positions have several axes, as in
#: qwen35, a picture may lie between two tokens.)
OF_PAIRS = ("eagle3", "mtp", "mtp block")
