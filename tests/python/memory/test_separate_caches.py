from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.drafting import EACH, PAIRS, assert_drafted, opened, random_text
from support.numerics import EXACT, random_tokens
from support.separate_caches import Way, check_streams
from support.tiny import TinyGemma3, TinyLlama, TinyQwen35

import llamatap as lt


@pytest.mark.sampled(4)
@pytest.mark.parametrize("in_turns", [False, True], ids=["one after the other", "in turns"])
@pytest.mark.parametrize("lengths", [(21, 9), (3, 40), (17, 17, 1, 30)], ids=str)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (TinyLlama, "callback"),
        (TinyGemma3, "callback"),
        (TinyQwen35, "callback"),
        (TinyLlama, "hooks"),
        (TinyQwen35, "hooks"),
        (TinyLlama, "copies"),
        (TinyGemma3, "copies"),
        (TinyQwen35, "copies"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_rows_are_those_of_each_sequence_alone(
    kind: type[TinyLlama],
    way: Way,
    lengths: tuple[int, ...],
    in_turns: bool,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    with lt.Model(kind().write(tmp_path / "tiny.gguf")) as model:
        texts = [random_tokens(rng, model, n).tolist() for n in lengths]
        # The engine looks GELU up in a table of float16: what differs by rounding may come to differ by more.
        bound = 1e-3 if kind is TinyGemma3 else 2e-5
        check_streams(model, texts, way, in_turns=in_turns, bound=bound, **EXACT)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", EACH)
def test_sixteen_sequences_are_drafted_for_as_one(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = PAIRS[kind](tmp_path)
    texts = {seq: random_text(rng, int(rng.integers(3, 40))) for seq in range(16)}
    with opened(pair, n_seq_max=16, n_ctx=16 * 256, n_ubatch=32, kv_unified=False) as together:
        together.start(texts)
        drafts = together.draft()
    for seq, text in texts.items():
        with opened(pair) as alone:
            alone.start({0: text})
            draft = alone.draft()[0]
        assert drafts[seq].tokens.tolist() == draft.tokens.tolist(), f"sequence {seq}"
        assert_drafted(drafts[seq], pair.oracle, text, 4)
