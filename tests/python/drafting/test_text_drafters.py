"""TextDrafter: the arguments of `guess`, and how much of its result is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT
from support.paths import ROOT
from support.tiny_models import rigged

import llamatap as lt

DOCS = ROOT / "docs" / "drafting.md"
PROMPT = [1, 9, 30, 12, 13]


class Seeing(lt.TextDrafter):
    """A TextDrafter with a fixed guess that records its arguments."""

    def __init__(self, guessed: Any) -> None:
        super().__init__()
        self.guessed = guessed
        self.seen: list[tuple[NDArray[np.int32], int]] = []

    def guess(self, tokens: NDArray[np.int32], n_max: int) -> Any:
        self.seen.append((tokens, n_max))
        return self.guessed


def drafted(drafter: lt.Drafter, *request: int, seq: int = 0) -> list[int]:
    found: list[int] = drafter.draft({seq: lt.DraftRequest(*request)})[seq].tokens.tolist()
    return found


def test_a_guess_is_given_the_text_that_stands() -> None:
    drafter = Seeing([20, 21, 22, 23])
    drafter.process(lt.Batch.of([5, 6, 7]))
    assert drafted(drafter, 8, 3, 2) == [20, 21]
    drafter.process(lt.Batch.of([8, 20, 21], pos0=3))
    drafter.accept(0, 1)
    drafter.n_max = 3
    assert drafted(drafter, 9, 5, 100) == [20, 21, 22]
    (first, n_first), (second, n_second) = drafter.seen
    assert (n_first, n_second) == (2, 3)
    assert first.dtype == np.dtype(np.int32)
    assert first.tolist() == [5, 6, 7, 8]
    assert second.tolist() == [5, 6, 7, 8, 20, 9]
    # The receiver owns the list that it was given.
    second[:] = 0
    drafter.process(lt.Batch.of([9], pos0=5))
    drafter.accept(0, 0)
    drafted(drafter, 4, 6, 4)
    assert drafter.seen[-1][0].tolist() == [5, 6, 7, 8, 20, 9, 4]
    assert first.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_that_grow_and_shrink_are_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafter = Seeing([])
    texts: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(150):
        batch = lt.Batch()
        added = {}
        for seq, text in texts.items():
            if text and rng.random() < 0.05:
                del text[int(rng.integers(0, len(text))) :]
            added[seq] = rng.integers(0, 1000, int(rng.integers(1, 40))).tolist()
            for position, token in enumerate(added[seq], len(text)):
                batch.add(token, position, seq)
        drafter.process(batch)
        for seq, text in texts.items():
            kept = int(rng.integers(1, len(added[seq]) + 1))
            drafter.accept(seq, kept - 1)
            text += added[seq][:kept]
            drafted(drafter, 5, len(text), 4, seq=seq)
            assert drafter.seen[-1][0].tolist() == [*text, 5]
    assert max(map(len, texts.values())) > 600


def test_a_batch_costs_no_more_when_the_text_is_long() -> None:
    """Copying the text for each batch would cost as much as ten thousand entries."""
    drafter = Seeing([])
    drafter.process(lt.Batch.of(range(3, 10_003)))
    array = drafter._buffers[0]._array
    for position in range(10_000, 10_100):
        drafter.process(lt.Batch.of([5], pos0=position))
        drafter.accept(0, 0)
    assert drafter._buffers[0]._array is array


def written_model(folder: Path) -> Path:
    return rigged.write_rigged_model(folder / "target.gguf", rigged.cycle())


def test_the_example_of_the_docs_drafts(tmp_path: Path) -> None:
    (code,) = [one for one in DOCS.read_text().split("```") if "class Again" in one]
    code = code.removeprefix("python\n")
    names: dict[str, Any] = {"lt": lt, "np": np}
    exec(code, names)
    with lt.Model(written_model(tmp_path)) as model, model.context(n_ctx=512, **EXACT) as context:
        plain = next(lt.generate(context, PROMPT, max_tokens=200, ignore_eos=True))
        found = next(lt.generate(context, PROMPT, names["Again"](), max_tokens=200, ignore_eos=True))
        assert found.tokens.tolist() == plain.tokens.tolist()
        assert found.stats.acceptance > 0.6
        assert found.stats.tokens_per_round > 1.5


class LlamaDraftModel(ABC):
    """llama-cpp-python's base class, to the letter of its signature."""

    @abstractmethod
    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        raise NotImplementedError


class PromptLookup(LlamaDraftModel):
    """Like llama-cpp-python's own: the first earlier occurrence of the last n tokens."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        for n in range(min(self.max_ngram_size, len(input_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids, (n,))
            for at in np.nonzero((windows == input_ids[-n:]).all(axis=1))[0]:
                found: NDArray[np.intc] = input_ids[at + n : at + n + self.num_pred_tokens]
                if len(found):
                    return found
        return np.array([], dtype=np.intc)


def test_a_draft_model_of_llama_cpp_python_is_a_drafter(tmp_path: Path) -> None:
    with lt.Model(written_model(tmp_path)) as model, model.context(n_ctx=512, **EXACT) as context:
        plain = next(lt.generate(context, PROMPT, max_tokens=200, ignore_eos=True))
        for drafter in (PromptLookup(), lt.CallableDrafter(PromptLookup(3, 6), n_max=4), [PromptLookup()]):
            found = next(lt.generate(context, PROMPT, drafter, max_tokens=200, ignore_eos=True))
            assert found.tokens.tolist() == plain.tokens.tolist()
            assert found.stats.acceptance > 0.6
            assert found.stats.tokens_per_round > 1.5
