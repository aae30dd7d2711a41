"""What is trained is what the engine drafts with: heads of PyTorch, and the files that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import END, EXACT, Pair, assert_drafted, opened, random_text
from support.tiny import TinyLlama, TinyQwen3

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from support.heads import (  # noqa: E402
    HEADS,
    LAYERS,
    Sample,
    draft_vocabulary,
    drafted_by,
    head_of,
    padded,
)

import llamatap as lt  # noqa: E402
from llamatap.convert import to_gguf  # noqa: E402
from llamatap.train.drafters.head_checkpoints import write_head  # noqa: E402
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead  # noqa: E402
from llamatap.train.drafters.multi_step_loss import multi_step_loss  # noqa: E402
from llamatap.train.drafters.target_weights import TargetWeights  # noqa: E402

STEPS = 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMATAP_CACHE", str(tmp_path_factory.mktemp("cache")))


@dataclass
class Trained:
    """A head beside its target."""

    head: DraftHead
    path: Path
    target: TargetWeights

    def states(self, model: lt.Model, tokens: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The features that the head reads, and H_n, of each token."""
        mtp = self.head.kind == "mtp"
        with model.context(n_ctx=256, **EXACT) as context:
            found = lt.extract(context, [list(tokens)], [*(() if mtp else LAYERS), -1])[0].array
        last = found[:, -1].copy()
        return (last if mtp else found[:, :-1].reshape(len(tokens), -1).copy()), last

    def draft_file(self, folder: Path, joined: bool = False) -> Path:
        """The file that the engine drafts with: GGUF, or an MTP block beside the target."""
        mtp = self.head.kind == "mtp"
        written = write_head(
            folder / ("head.safetensors" if mtp else "head"), self.head, self.target, dtype="float32"
        )
        if mtp and not joined:
            return written
        return to_gguf(written, self.path, folder / "draft.gguf", type="f32").path

    def pair(self, model: lt.Model, draft: Path) -> Pair:
        """With the drafting of PyTorch as the oracle."""

        def oracle(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
            return drafted_by(self.head, text, self.states(model, text[:-1])[0], n)

        return Pair(self.path, draft, self.head.kind, oracle)


@pytest.mark.parametrize("tiny", [TinyLlama(), TinyQwen3()], ids=lambda tiny: str(tiny.arch))
@pytest.mark.parametrize("name", [*HEADS, "mtp, joined"])
def test_drafts_are_those_of_the_head(
    name: str, tiny: TinyLlama, tmp_path: Path, rng: np.random.Generator
) -> None:
    """On the target's own states, after rejections too."""
    path = tiny.write(tmp_path / "target.gguf")
    target = TargetWeights.read(path)
    trained = Trained(head_of(name.partition(", joined")[0], target), path, target)
    draft = trained.draft_file(tmp_path, joined="joined" in name)
    with lt.Model(path) as model:
        pair = trained.pair(model, draft)
        with opened(pair) as loop:
            loop.start({0: random_text(rng, 50)})
            different = set()
            for _ in range(5):
                drafts = loop.draft()
                assert_drafted(drafts[0], pair.oracle, loop.texts[0], 4)
                different |= set(drafts[0].tokens.tolist())
                loop.verify(drafts, rng)
            assert len(different) > 6


def texts_of(path: Path, n: int, max_tokens: int) -> list[lt.Generation]:
    """Greedy continuations of random prompts."""
    rng = np.random.default_rng(3)
    with lt.Model(path) as model, model.context(n_ctx=2048, n_seq_max=8, **EXACT) as context:
        prompts = [random_text(rng, int(rng.integers(2, 12))) for _ in range(n)]
        return list(lt.generate(context, prompts, max_tokens=max_tokens))


def sample_of(trained: Trained, model: lt.Model, text: lt.Generation) -> Sample:
    tokens = np.concatenate([text.prompt, text.tokens]).astype(np.int64)
    features, last = trained.states(model, tokens.tolist())
    mask = np.arange(len(tokens)) >= len(text.prompt)
    return Sample(tokens, features, last, mask, np.append(tokens[1:], 0))


def new_head(name: str, target: TargetWeights) -> DraftHead:
    """A head before any training."""
    torch.manual_seed(0)
    if name == "mtp":
        return MtpHead(target)
    tokens = draft_vocabulary(target.n_vocab, 200) if name.endswith("few tokens") else None
    return Eagle3Head(target, LAYERS, tokens)


def fit(head: DraftHead, samples: Sequence[Sample], n_steps: int = 50) -> None:
    """Train a head until it is right now and then."""
    trained = [one for one in head.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0)
    batch = padded(samples)
    for _ in range(n_steps):
        loss, _ = multi_step_loss(head, batch, STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def argmax_of(samples: Sequence[Sample]) -> Any:
    found = np.zeros((len(samples), max(len(one.tokens) for one in samples)), np.int64)
    for row, one in zip(found, samples, strict=True):
        assert one.argmax is not None
        row[: len(one.argmax)] = one.argmax
    return torch.from_numpy(found)


def accepted_from(head: DraftHead, sample: Sample, start: int) -> int:
    """How many tokens of the draft after the token ``start`` the loss counts as accepted."""
    found = []
    for step in range(min(STEPS, len(sample.tokens) - 1 - start)):
        # Only the tokens of this draft, so that the last step counts it alone.
        at = np.arange(len(sample.tokens))
        alone = dataclasses.replace(sample, mask=(at > start) & (at <= start + step + 1))
        with torch.no_grad():
            _, counts = multi_step_loss(head, padded([alone]), step + 1, 1.0, argmax_of([alone]))
        assert counts.drafted[step] == 1
        found.append(int(counts.accepted[step]))
    assert found == sorted(found, reverse=True)
    return sum(found)


def by_round(head: DraftHead, sample: Sample) -> tuple[list[int], list[int], int]:
    """What a generation of the sample's text should count: drafted_at, accepted_at and rounds."""
    drafted, accepted, n_rounds = [0] * STEPS, [0] * STEPS, 0
    # The target itself gives the first token, and one in each round.
    at = int(np.flatnonzero(sample.mask)[0])
    while at < len(sample.tokens) - 1:
        # A draft ends with an end token.
        draft, _ = drafted_by(head, sample.tokens[: at + 1].tolist(), sample.features[:at], STEPS)
        whole = draft.index(END) + 1 if END in draft else STEPS
        n_drafted = min(whole, len(sample.tokens) - 2 - at)
        n_right = min(accepted_from(head, sample, at), n_drafted)
        for step in range(n_drafted):
            drafted[step] += 1
            accepted[step] += step < n_right
        at += n_right + 1
        n_rounds += 1
    return drafted, accepted, n_rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_generation_accepts_what_the_loss_counts(name: str, tmp_path: Path) -> None:
    """Round by round, on texts of the target, which the head was trained on."""
    path = TinyLlama().write(tmp_path / "target.gguf")
    target = TargetWeights.read(path)
    trained = Trained(new_head(name, target), path, target)
    texts = [one for one in texts_of(path, 24, 24) if one.finish_reason == "length"]
    with lt.Model(path) as model:
        samples = [sample_of(trained, model, text) for text in texts]
        fit(trained.head, samples)
        with model.context(n_ctx=512, n_seq_max=4, **EXACT) as context:
            drafter = lt.load_drafter(context, trained.draft_file(tmp_path), n_max=STEPS)
            prompts = [text.prompt.tolist() for text in texts[:10]]
            found = list(lt.generate(context, prompts, drafter, max_tokens=24))
            assert isinstance(drafter, lt.Eagle3Drafter | lt.MtpDrafter)
            drafter.spec.close()
    total = np.zeros(STEPS, int)
    for generation, text, sample in zip(found, texts, samples, strict=False):
        assert generation.tokens.tolist() == text.tokens.tolist()
        stats = generation.stats
        assert (stats.drafted_at, stats.accepted_at, stats.rounds) == by_round(trained.head, sample)
        total += stats.accepted_at
    assert total[0] > total[1] > total[2] > 10
