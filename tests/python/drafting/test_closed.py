"""A closed draft context has freed its memory, and its drafters say that it is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.drafting import PAIRS, opened, random_text
from support.numerics import EXACT
from support.tiny import TinyLlama
from support.tiny_models import drafters, rigged
from support.tiny_models.block_drafters import write_dflash

import llamatap as lt
from llamatap._native import _core

RESIDENT = """
import gc, resource, sys
import llamatap as lt

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

drafters = []

def grown():
    # Growth while the draft context is open, and what is left of it.
    before = resident()
    spec = lt.SpeculativeContext(context, sys.argv[2], n_ctx=2**18, n_threads=1)
    drafters.append(lt.load_drafter(context, spec))
    opened = resident()
    spec.close()
    return opened - before

with lt.Model(sys.argv[1]) as model, model.context(n_ctx=256, n_threads=1) as context:
    grown(), grown()
    before = resident()
    print(min(grown() for _ in range(3)), resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or bool(_core.build_info()["sanitize"]),
    reason="reads /proc, and AddressSanitizer keeps what was freed",
)
def test_closing_gives_memory_back_although_a_drafter_lives(tmp_path: Path) -> None:
    target = TinyLlama().write(tmp_path / "target.gguf")
    draft = TinyLlama(seed=5, n_layer=2).write(tmp_path / "draft.gguf")
    command = [sys.executable, "-c", RESIDENT, str(target), str(draft)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    grown, left = map(int, done.stdout.split())
    assert grown > 40 * 2**20
    assert left < 4 * 2**20


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp 3 heads", "model"])
def test_a_drafter_whose_context_was_closed_says_so(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with opened(PAIRS[name](tmp_path)) as loop:
        loop.start({0: random_text(rng, 9)})
        assert loop.draft()
        drafter = loop.drafter
        assert isinstance(drafter, lt.SpeculativeDrafter)
        drafter.spec.close()
        with pytest.raises(lt.ClosedError, match="draft context"):
            loop.draft()
        with pytest.raises(lt.ClosedError, match="draft context"):
            loop.feed([(5, 8, 0)])
        with pytest.raises(lt.ClosedError, match="draft context"):
            drafter.accept(0, 0)
        drafter.reset(0)
        with pytest.raises(lt.ClosedError):
            type(drafter)(drafter.spec)


def test_a_generation_whose_drafter_is_closed_ends_and_leaves_the_target(tmp_path: Path) -> None:
    f = rigged.cycle()
    target = rigged.write_rigged_model(tmp_path / "target.gguf", f)
    draft = rigged.write_rigged_eagle3(tmp_path / "draft.gguf", f, f)
    with lt.Model(target) as model, model.context(n_ctx=512, **EXACT) as context:
        expected = next(lt.generate(context, [1, 9, 30], max_tokens=20, ignore_eos=True)).tokens.tolist()
        for chained in (False, True):
            with lt.SpeculativeContext(context, draft, **EXACT) as spec:
                drafter: lt.Drafter = lt.Eagle3Drafter(spec)
                if chained:
                    drafter = lt.DrafterChain(lt.NGramDrafter(), drafter)
                events = lt.generate(
                    context, [1, 9, 30], drafter, max_tokens=20, ignore_eos=True, stream=True
                )
                next(events)
            with pytest.raises(lt.ClosedError, match="draft context"):
                list(events)
            found = next(lt.generate(context, [1, 9, 30], max_tokens=20, ignore_eos=True))
            assert found.tokens.tolist() == expected


def test_a_model_that_was_loaded_for_the_draft_is_closed_with_it(tmp_path: Path) -> None:
    target = TinyLlama().write(tmp_path / "target.gguf")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf")
    block = write_dflash(tmp_path / "block.gguf")
    with lt.Model(target) as model, model.context(n_ctx=256, **EXACT) as context, lt.Model(draft) as given:
        for path in (draft, block):
            spec = lt.SpeculativeContext(context, path)
            drafter = lt.load_drafter(context, spec)
            spec.close()
            assert spec.closed
            assert spec.model.closed
            with pytest.raises(lt.ClosedError):
                drafter.draft({})
            spec.close()
        with lt.SpeculativeContext(context, given) as spec:
            one, other = lt.Eagle3Drafter(spec), lt.Eagle3Drafter(spec)
            assert (one.draft({}), other.draft({})) == ({}, {})
        assert not given.closed
        with pytest.raises(lt.ClosedError):
            other.draft({})
