"""Costs of drafting beside its decodes: Python calls and memory."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.drafting import EACH, PAIRS, opened, random_text
from support.numerics import PEAK_MEMORY
from support.tiny import TinyLlama
from support.tiny_models import drafters
from support.tiny_models.block_drafters import write_dflash

import llamatap as lt
from llamatap._native import _core


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts of calls of Python functions, and of the core from them, by name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        del calls["setprofile"]


@pytest.mark.parametrize("name", EACH)
def test_python_is_entered_once_for_a_draft_however_long(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A whole round of three sequences: drafts, the target's batch with them, and acceptance."""
    pair = PAIRS[name](tmp_path)
    longest = 3 if "heads" in name else 6
    rounds: dict[int, Any] = {}
    for n in (2, longest):
        with opened(pair, n_seq_max=3, n_max=8) as loop:
            loop.start({seq: random_text(np.random.default_rng(seq), 9) for seq in range(3)})
            loop.verify(loop.draft(n=n), rng)  # what is done once is done
            requests = loop.requests(n=n)
            with counted() as drafting:
                drafts = loop.drafter.draft(requests)
            assert max(len(draft.tokens) for draft in drafts.values()) == n
            batch = lt.Batch()
            for seq, request in requests.items():
                tokens = [request.last_token, *drafts[seq].tokens.tolist()]
                for at, token in enumerate(tokens, request.position):
                    batch.add(token, at, seq)
            with loop.context.tap(layers=loop.drafter.target_layers or [0]) as tap:
                loop.context.decode(batch)
                with counted() as processing:
                    loop.drafter.process(batch, tap.states)
                    for seq in requests:
                        loop.drafter.accept(seq, 1)
            rounds[n] = (dict(drafting), dict(processing))
    assert rounds[2] == rounds[longest]
    assert drafting["draft"] == 2  # the drafter's own, and the core's


WRITERS: dict[str, Any] = {
    "eagle3": drafters.write_eagle3,
    "mtp": lambda path: drafters.write_mtp_block(path, n_layer=4),
    "dflash": write_dflash,
    "model": TinyLlama(n_layer=2).write,
}


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists() or bool(_core.build_info()["sanitize"]),
    reason="resident memory is read from /proc, and AddressSanitizer keeps what was freed",
)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_draft_context_is_no_larger_for_more_sequences(kind: str, tmp_path: Path) -> None:
    """Memory added to the process once all sequences have drafted, for the same total of tokens."""
    target = TinyLlama().write(tmp_path / "target.gguf")
    draft = WRITERS[kind](tmp_path / "draft.gguf")
    code = f"""{PEAK_MEMORY}
import sys
import llamatap as lt
n_seq = int(sys.argv[1])
makers = dict(
    eagle3=lt.Eagle3Drafter, mtp=lt.MtpDrafter, dflash=lt.DFlashDrafter,
    model=lambda spec: lt.ModelDrafter(spec.target, spec)
)
with lt.Model({str(target)!r}) as model, model.context(n_ctx=8192, n_seq_max=64, n_threads=1) as context:
    draft = lt.Model({str(draft)!r}, load_mtp=True)
    batch = lt.Batch()
    for seq in range(n_seq):
        for at in range(64 // n_seq):
            batch.add(5 + at, at, seq)
    with context.tap(range(5)) as tap:
        context.decode(batch)
        before = peak_memory("VmRSS")
        spec = lt.SpeculativeContext(
            context, draft, n_seq_max=n_seq, n_ctx=8192, n_threads=1, as_model={kind == "model"}
        )
        drafter = makers[{kind!r}](spec)
        drafter.process(batch, tap.states)
    drafts = drafter.draft({{seq: lt.DraftRequest(9, 64 // n_seq, 4) for seq in range(n_seq)}})
    assert len(drafts) == n_seq
    print(peak_memory("VmRSS") - before)
"""

    def added(n_seq: int) -> float:
        command = [sys.executable, "-c", code, str(n_seq)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    one, many = added(1), added(64)
    assert many < one + 10
