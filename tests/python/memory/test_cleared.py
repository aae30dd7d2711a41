"""NaN that a sequence leaves in the KV cache reaches no later one; only written cells are cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.numerics import EXACT, computes_with_nan
from support.tiny import TinyGemma3, TinyLlama

import llamatap as lt
from llamatap._native import native_of

KINDS: dict[str, Callable[[], TinyLlama]] = {
    "llama": lambda: TinyLlama(n_layer=2),
    "gemma3": lambda: TinyGemma3(n_layer=7),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "flash attention": {"n_threads": 1, "flash_attn": True},
    "streams": {**EXACT, "kv_unified": False},
    "small window": {**EXACT, "swa_full": False, "n_ubatch": 32},
}
CLEAN, DIRTY = 5, 7


@pytest.fixture(scope="module", params=list(KINDS))
def poisoned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lt.Model]:
    """A model whose embedding of token 7 is NaN."""
    tiny = KINDS[request.param]()
    tiny.weights["token_embd.weight"][DIRTY, 3] = np.nan
    with lt.Model(tiny.write(tmp_path_factory.mktemp("nan") / "tiny.gguf")) as model:
        yield model


def spoil_late_cells(context: lt.Context) -> None:
    """Leave NaN in cells behind the last used one and behind the last written one."""
    context.decode(lt.Batch.of([CLEAN] * 60, seq=0))
    context.decode(lt.Batch.of([DIRTY] * 40, seq=1))
    context.memory.remove(1)
    context.decode(lt.Batch.of([CLEAN], seq=0, pos0=60))
    context.memory.remove(0)


def spoil_a_prompt(context: lt.Context) -> None:
    """Leave NaN by a prompt of which no token is an output."""
    batch = lt.Batch()
    for position in range(50):
        batch.add(DIRTY, position)
    context.decode(batch)
    context.memory.remove(0)


def spoil_what_does_not_fit(context: lt.Context) -> None:
    """Leave NaN by a batch that does not fit: a part is computed, then rolled back."""
    with pytest.raises(lt.ContextFullError):
        context.decode(lt.Batch.of([DIRTY] * 600))
    context.decode(lt.Batch.of([CLEAN]))
    context.memory.remove(0)


def spoil_and_restore(context: lt.Context) -> None:
    context.decode(lt.Batch.of([CLEAN] * 40, seq=0))
    context.decode(lt.Batch.of([DIRTY] * 30, seq=1))
    state = context.save(1)
    context.memory.clear()
    context.decode(lt.Batch.of([CLEAN] * 40, seq=0))
    context.restore(1, state)
    context.memory.remove(1)
    context.memory.remove(0)


def spoil_a_copy(context: lt.Context) -> None:
    context.decode(lt.Batch.of([DIRTY] * 40, seq=0))
    context.memory.copy(0, 1)
    context.memory.keep(1)
    context.memory.remove(1)


def spoil_an_extraction(context: lt.Context) -> None:
    lt.extract(context, [CLEAN] * 5 + [DIRTY] * 40, [1])


SPOILT = [
    spoil_late_cells,
    spoil_a_prompt,
    spoil_what_does_not_fit,
    spoil_and_restore,
    spoil_a_copy,
    spoil_an_extraction,
]


@pytest.mark.sampled(4)
@computes_with_nan
@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("options", list(OPTIONS))
def test_an_emptied_memory_holds_no_nan(
    poisoned: lt.Model, spoil: Callable[[lt.Context], None], options: str
) -> None:
    chosen = {"n_ctx": 512, "n_batch": 64, "n_seq_max": 2, **OPTIONS[options]}
    with poisoned.context(**chosen) as context:

        def logits() -> list[np.ndarray[Any, Any]]:
            found = []
            for seq in (0, 1):
                context.decode(lt.Batch.of([CLEAN] * 100, seq=seq))
                found.append(context.logits())
            context.memory.remove(0)
            context.memory.remove(1)
            return found

        expected = logits()
        assert np.isfinite(expected).all()
        spoil(context)
        assert np.array_equal(logits(), expected)


def test_only_cells_that_were_written_are_cleared(tiny_path: Path) -> None:
    with lt.Model(tiny_path) as model, model.context(n_ctx=4096, n_seq_max=2) as context:
        native = native_of(context)
        context.decode(lt.Batch.of([5] * 20, seq=0))
        context.decode(lt.Batch.of([6] * 10, seq=1))
        context.memory.remove(0)
        assert native.zeroed_cells == 0
        context.memory.remove(1)
        assert native.zeroed_cells == 30
        context.decode(lt.Batch.of([5] * 7))
        context.memory.remove(0, 4)
        context.memory.remove(0)
        assert native.zeroed_cells == 37
        lt.extract(context, [5] * 50, [1])
        assert native.zeroed_cells == 37
        list(lt.generate(context, [[5, 6, 7]], max_tokens=3, ignore_eos=True))
        # Cells written by the extraction are among them.
        assert native.zeroed_cells == 37 + 50
        context.memory.clear()
        assert native.zeroed_cells == 87 + 4096
