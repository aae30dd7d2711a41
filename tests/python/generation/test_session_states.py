"""States in sessions: requests that ask get them, and no pass is tapped or run without need."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, Guessing, Noting, is_empty, ragged
from support.numerics import relative
from support.sessions import CUT, Workload, drafter_of, finals
from support.tiny import TinyGemma3, TinyQwen35

import llamatap as lt
from llamatap._engine_context import EngineContext

EVERY: tuple[lt.LayerId, ...] = (0, 1, 2, 3, 4, "norm")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any, int]]:
    """For each pass: its entries, the tapped layers (None without a tap), and the captured rows."""
    found = []
    decode = EngineContext.decode

    def seeing(context: EngineContext, batch: lt.Batch) -> None:
        decode(context, batch)
        states = None if context.capture is None else context.capture.states
        found.append(
            (len(batch), None, 0) if states is None else (len(batch), states.layers, len(states.array))
        )

    monkeypatch.setattr(EngineContext, "decode", seeing)
    return found


def extracted(workload: Workload, text: Any, layers: Any) -> NDArray[np.float32]:
    with lt.Extractor(workload.model, **EXACT) as extractor:
        array: NDArray[np.float32] = extractor(text, layers).array
    return array


def test_a_pass_is_tapped_for_those_who_ask(workload: Workload, passes: list[tuple[int, Any, int]]) -> None:
    """A pass is tapped for the layers that current requests ask for."""
    with workload.model.context(n_seq_max=4, **CUT) as context, lt.Session(context) as session:
        options: dict[str, Any] = {"ignore_eos": True}

        def step() -> list[tuple[int, Any, int]]:
            passes.clear()
            session.step()
            return list(passes)

        session.add(workload.prompts[2], max_tokens=20, **options)
        assert step() == [(32, None, 0)]
        assert step() == [(8, None, 0)]
        assert step() == [(1, None, 0)]
        # States of the prompt only: both chunks are tapped, then no pass.
        session.add(workload.prompts[2], prompt_states=True, layers=[1, "norm"], max_tokens=3, **options)
        assert step() == [(32, (1, "norm"), 32)]
        assert step() == [(10, (1, "norm"), 10)]
        assert step() == [(2, None, 0)]
        assert step() == [(2, None, 0)]
        # States of the text only: the prompt's pass is not tapped.
        session.add(workload.prompts[0], states="full", layers=[3], max_tokens=5, **options)
        assert step() == [(10, None, 0)]
        assert step() == [(2, (3,), 2)]
        # Beside a prompt without states: of its rows only the output is captured.
        session.add(workload.prompts[0], max_tokens=1, **options)
        assert step() == [(11, (3,), 3)]
        # Two requests in one pass: the layers of both are tapped.
        session.add(
            workload.prompts[0], states="last", prompt_states=True, layers=-1, max_tokens=1, **options
        )
        assert step() == [(11, (3, 4), 11), (1, (4,), 1)]
        assert step() == [(2, (3,), 2), (1, (3,), 1)]
        assert step() == [(1, None, 0)]
        found = finals(session)
        assert list(found) == [0]


def test_a_drafter_has_its_states_of_every_pass(
    workload: Workload, passes: list[tuple[int, Any, int]]
) -> None:
    """The drafter gets its states whatever layers requests ask for; only requests that ask get any."""

    class Seeing(Noting):
        target_layers = (1, -1)

        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            super().process(batch, states)
            assert states is not None
            assert states.layers == (1, 4)
            assert states.array.shape == (len(batch), 2, 64)

    with workload.model.context(n_seq_max=2, **CUT) as context, lt.Session(context, Seeing()) as session:
        session.add(workload.prompts[0], max_tokens=3, ignore_eos=True)
        session.add(workload.prompts[3], max_tokens=2, states="full", layers=[4, 0], ignore_eos=True)
        found = finals(session)
    assert passes == [(25, (1, 4), 25), (2, (1, 4, 0), 2), (1, (4, 0), 1), (1, (1, 4), 1)]
    assert (found[0].states, found[0].prompt_states, found[1].prompt_states) == (None, None, None)
    states = found[1].states
    assert states is not None
    text = [*workload.prompts[3], *found[1].tokens.tolist()]
    assert relative(states.array, extracted(workload, text, [4, 0])[-2:]) < 1e-5


@pytest.mark.sampled(15)
@pytest.mark.parametrize("kind", ["none", "ngram", "model", "eagle3"])
@pytest.mark.parametrize("n_batch", [16, 64, 2048])
@pytest.mark.parametrize("layers", [(-1,), ("norm", 0), (2, 2, -2), EVERY], ids=str)
def test_states_of_prompts_are_those_of_extract(
    layers: tuple[lt.LayerId, ...], n_batch: int, kind: str, workload: Workload
) -> None:
    """H_n and norm(H_n) of all rows included; longer than a batch and shorter, in company and alone."""
    options: dict[str, Any] = {"prompt_states": True, "layers": layers, "max_tokens": 5, "ignore_eos": True}
    prompts = [workload.prompts[at] for at in (10, 1, 0, 5)]
    with workload.model.context(n_seq_max=3, **{**CUT, "n_batch": n_batch}) as context:
        drafter = drafter_of(kind, workload, context)
        found = list(lt.generate(context, prompts, drafter, **options))
        found += [next(lt.generate(context, prompt, drafter, **options)) for prompt in prompts]
        assert is_empty(context)
    for prompt, one in zip(prompts * 2, found, strict=True):
        states = one.prompt_states
        assert one.states is None
        assert states is not None
        assert states.tokens.tolist() == prompt
        assert states.layers == lt.layers.normalize(layers, 4)
        assert states.array.shape == (len(prompt), len(layers), 64)
        expected = extracted(workload, prompt, layers)
        assert max(relative(a, b) for a, b in zip(states.array, expected, strict=True)) < 1e-5
        assert states.provenance["rows"] == "prompt"
        with pytest.raises(ValueError, match="read-only"):
            states.array[0] = 0


@pytest.mark.parametrize("n_batch", [16, 2048])
def test_states_of_prompts_cost_no_pass(
    n_batch: int, workload: Workload, passes: list[tuple[int, Any, int]]
) -> None:
    with workload.model.context(n_seq_max=1, **{**CUT, "n_batch": n_batch}) as context:
        for asked in (False, True):
            passes.clear()
            list(
                lt.generate(context, workload.prompts[10], max_tokens=4, ignore_eos=True, prompt_states=asked)
            )
            sizes = [16] * 5 + [10] if n_batch == 16 else [90]
            assert [n for n, _, _ in passes] == [*sizes, 1, 1, 1]
            assert [n for _, _, n in passes] == [*(sizes if asked else [0] * len(sizes)), 0, 0, 0]


@pytest.mark.slow
def test_states_of_prompts_are_in_memory_once(workload: Workload) -> None:
    """Pieces are copied to their place; of a pass for themselves they stay where they were captured."""
    prompt = np.random.default_rng(3).integers(3, 259, 2000).tolist()
    n_bytes = 2000 * len(EVERY) * 64 * 4
    for n_batch, most in ((32, 1.15), (2048, 0.15)):
        with workload.model.context(**{**CUT, "n_ctx": 2048, "n_batch": n_batch}) as context:
            made = lt.generate(context, prompt, max_tokens=1, prompt_states=True, layers=EVERY)
            tracemalloc.start()
            try:
                (found,) = made
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert found.prompt_states is not None
        assert found.prompt_states.array.nbytes == n_bytes
        assert peak < most * n_bytes
        assert relative(found.prompt_states.array, extracted(workload, prompt, EVERY)) < 1e-5


def test_states_of_prompts_come_with_the_last_event(workload: Workload) -> None:
    with workload.model.context(n_seq_max=2, **CUT) as context:
        options: dict[str, Any] = {"states": "full", "prompt_states": True, "layers": [1], "max_tokens": 3}
        events = list(lt.generate(context, workload.prompts[0], stream=True, ignore_eos=True, **options))
    assert [None if event.states is None else len(event.states) for event in events] == [1, 1, 1]
    final = events[-1].final
    assert final is not None
    assert final.states is not None
    assert final.prompt_states is not None
    text = [*workload.prompts[0], *final.tokens.tolist()]
    both = np.concatenate([final.prompt_states.array, final.states.array])
    assert relative(both, extracted(workload, text, [1])) < 1e-5


def test_an_open_tap_stops_nobody_s_text(workload: Workload) -> None:
    """The tap sees passes while no request wants states; a step that needs states is refused."""
    with workload.model.context(n_seq_max=1, **CUT) as context, lt.Session(context) as session:
        session.add(workload.prompts[0], max_tokens=4, ignore_eos=True)
        session.add(workload.prompts[3], max_tokens=2, states="last", layers=1, ignore_eos=True)
        with context.tap([2]) as tap:
            for _ in range(4):
                (event,) = session.step()
                assert event.index == 0
                assert tap.states.layers == (2,)
            for _ in range(2):
                with pytest.raises(lt.InvalidInputError, match="tap is open"):
                    session.step()
                assert (session.pending, session.dropped) == (1, ())
        found = finals(session)[1]
        assert found.states is not None
        text = [*workload.prompts[3], *found.tokens.tolist()]
        assert relative(found.states.array, extracted(workload, text, [1])[-1:]) < 1e-5


MEMORIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen35": (TinyQwen35, {}),
    "qwen35 that takes back": (TinyQwen35, {"n_rs_seq": 4}),
    "gemma3": (TinyGemma3, {}),
    "gemma3 with windows": (TinyGemma3, {"swa_full": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORIES)
def test_memories_that_cannot_take_back_all(name: str, tmp_path: Path) -> None:
    """Recurrent layers and windows: passes are cut there, and what comes of them is the same."""
    make, options = MEMORIES[name]
    layers: tuple[lt.LayerId, ...] = (0, -1, "norm")
    with lt.Model(make().write(tmp_path / "model.gguf")) as model:
        prompts = ragged(np.random.default_rng(4), model.n_vocab, (40, 9, 70, 3))
        with lt.Extractor(model, **EXACT) as extractor, model.context(**CUT) as context:
            alone = [next(lt.generate(context, one, max_tokens=15, ignore_eos=True)) for one in prompts]
            texts = [[*p, *one.tokens.tolist()] for p, one in zip(prompts, alone, strict=True)]
            expected = [extractor(text, layers).array for text in texts]
        drafter = Guessing(model.n_vocab, texts, wrong=0.3, longest=3)
        with model.context(n_seq_max=3, **CUT, **options) as context, lt.Session(context, drafter) as session:
            for i, prompt in enumerate(prompts):
                asked: Any = {"prompt_states": i != 1, "states": (None, "full", "last", "full")[i]}
                session.add(prompt, max_tokens=15, ignore_eos=True, layers=layers, **asked)
                session.step()
            found = finals(session)
    for i, prompt in enumerate(prompts):
        assert found[i].tokens.tolist() == alone[i].tokens.tolist()
        for states, rows in (
            (found[i].prompt_states, expected[i][: len(prompt)]),
            (found[i].states, expected[i][-1 if i == 2 else len(prompt) :]),
        ):
            assert states is None or relative(states.array, rows) < 1e-4
    assert found[1].prompt_states is None
    assert found[0].states is None
    assert sum(one.stats.accepted for one in found.values()) > 10
