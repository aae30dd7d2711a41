"""The loss of several drafting steps beside drafting by hand, one entry at a time, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import states_of
from support.numerics import relative
from support.tiny import TinyLlama

torch = pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")

from support.heads import (  # noqa: E402
    HEADS,
    LAYERS,
    Drafts,
    Oracle,
    Sample,
    drafts_of,
    expected_loss,
    head_of,
    moved,
    padded,
)

from llamatap.train.drafters.heads import DraftHead  # noqa: E402
from llamatap.train.drafters.multi_step_loss import StepCounts, multi_step_loss  # noqa: E402
from llamatap.train.drafters.target_weights import TargetWeights  # noqa: E402

TINY = TinyLlama()
STEPS = 4
LENGTHS = (21, 5, 13, 2, 1, 17)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetWeights:
    return TargetWeights.read(TINY.write(tmp_path_factory.mktemp("target") / "target.gguf"))


def samples_of(name: str, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Sample]:
    """Texts of several lengths, whose masks have holes, begin late and end early."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        tokens = rng.integers(3, TINY.n_vocab, length)
        states = states_of(TINY, tokens.tolist()).astype(np.float32)
        features = states[-1] if name == "mtp" else np.concatenate([states[layer] for layer in LAYERS], 1)
        mask = rng.random(length) < 0.8
        found.append(Sample(tokens, features, states[-1].copy(), mask))
    found[0].mask[:] = True
    return found


def drafts_agree(oracle: Oracle, samples: Sequence[Sample], drafts: Sequence[Drafts], given: bool) -> None:
    """Have the target go on as the head drafts, for a part of the drafts: random heads are never right."""
    rng = np.random.default_rng(5)
    output = TINY.weights["output.weight"].astype(np.float64)
    gain = TINY.weights["output_norm.weight"]
    for sample, found in zip(samples, drafts, strict=True):
        n = len(sample.tokens)
        if given:
            sample.argmax = rng.integers(3, TINY.n_vocab, n)
        start, end = 0, found.logits.shape[1]
        while start < end:
            # Some drafts of the full length, some that fail on the way.
            right = min(int(rng.choice([0, 2, STEPS, STEPS])), end - start)
            for step in range(right):
                token = oracle.tokens[found.logits[step, start + step].argmax()]
                own = start + step + oracle.first_token
                if sample.argmax is not None:
                    sample.argmax[own] = token
                else:
                    sample.last[own] = (output[token] / gain * 3).astype(np.float32)
            start += max(right, 1)


class Recorded:
    """What a head computes inside the loss."""

    def __init__(self, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[NDArray[np.float32]] = []
        self.logits: list[NDArray[np.float32]] = []
        step, logits = head.step, head.logits

        def recorded_step(*arguments: Any) -> Any:
            found = step(*arguments)
            self.states.append(found.detach().numpy())
            return found

        def recorded_logits(state: Any) -> Any:
            found = logits(state)
            self.logits.append(found.detach().numpy())
            return found

        monkeypatch.setattr(head, "step", recorded_step)
        monkeypatch.setattr(head, "logits", recorded_logits)


def target_argmax(samples: Sequence[Sample]) -> Any:
    if samples[0].argmax is None:
        return None
    found = np.zeros((len(samples), max(len(one.tokens) for one in samples)), np.int64)
    for row, one in zip(found, samples, strict=True):
        assert one.argmax is not None
        row[: len(one.argmax)] = one.argmax
    return torch.from_numpy(found)


def counts(found: StepCounts) -> list[list[int]]:
    return [part.int().tolist() for part in (found.predicted, found.drafted, found.agreed, found.accepted)]


@pytest.mark.parametrize("given", [False, True], ids=["of the draft vocabulary", "given"])
@pytest.mark.parametrize("name", HEADS)
def test_every_step_is_that_of_drafting_by_hand(
    name: str, given: bool, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = head_of(name, target)
    oracle = Oracle.of(head, TINY, target, tmp_path)
    samples = samples_of(name)
    drafts = [drafts_of(oracle, one.tokens.tolist(), one.features, STEPS) for one in samples]
    drafts_agree(oracle, samples, drafts, given)
    expected = expected_loss(oracle, TINY, samples, drafts, STEPS, 0.7)
    recorded = Recorded(head, monkeypatch)
    loss, found = multi_step_loss(head, padded(samples), STEPS, 0.7, target_argmax(samples))

    for step in range(STEPS):
        row = 0
        for index, (sample, draft) in enumerate(zip(samples, drafts, strict=True)):
            for entry in range(draft.states.shape[1]):
                if entry >= step:
                    state = recorded.states[step][index, entry]
                    assert relative(state, draft.states[step, entry]) < 1e-5
                if sample.mask[entry + oracle.first_token + 1 :][:1].any():
                    if entry >= step:
                        assert relative(recorded.logits[step][row], draft.logits[step, entry]) < 1e-5
                    row += 1
        assert row == len(recorded.logits[step])
    assert loss.item() == pytest.approx(expected.loss, rel=1e-5)
    assert found.loss.tolist() == pytest.approx(expected.sums.tolist(), rel=1e-5)
    assert counts(found) == [expected.predicted, expected.drafted, expected.agreed, expected.accepted]
    assert min(expected.accepted) > 2
    for some, more in ((expected.accepted, expected.drafted), (expected.drafted, expected.predicted)):
        assert all(one < other for one, other in zip(some[1:], more[1:], strict=True))
    share = sum(a / d for a, d in zip(expected.accepted, expected.drafted, strict=True))
    assert found.tokens_per_round == pytest.approx(1 + share)


@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_is_that_of_the_loss(name: str, target: TargetWeights, tmp_path: Path) -> None:
    """Through all steps: beside the difference quotient of the loss by hand."""
    head = head_of(name, target)
    samples = samples_of(name, lengths=(9, 6))
    losses = []
    width = 3e-4
    for sign in (1, -1):
        other, directions = moved(head, sign * width)
        folder = tmp_path / str(sign)
        folder.mkdir()
        oracle = Oracle.of(other, TINY, target, folder)
        drafts = [drafts_of(oracle, one.tokens.tolist(), one.features, STEPS) for one in samples]
        losses.append(expected_loss(oracle, TINY, samples, drafts, STEPS, 0.9).loss)
    loss, _ = multi_step_loss(head, padded(samples), STEPS, 0.9)
    loss.backward()
    found = {one: values.grad for one, values in head.named_parameters() if values.requires_grad}
    slope = sum(float((values.double().numpy() * directions[one]).sum()) for one, values in found.items())
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * width), rel=2e-3)
    assert head.target_norm.weight.grad is None


def gradients(head: DraftHead, loss: Any) -> NDArray[np.float32]:
    head.zero_grad()
    loss.backward()
    parts = [values.grad.float().numpy().ravel() for values in head.parameters() if values.grad is not None]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", HEADS)
def test_padding_does_not_matter(name: str, target: TargetWeights, rng: np.random.Generator) -> None:
    head = head_of(name, target)
    samples = samples_of(name)
    loss, found = multi_step_loss(head, padded(samples), STEPS)
    other, again = multi_step_loss(head, padded(samples, rng), STEPS)
    assert other.item() == loss.item()
    assert counts(again) == counts(found)
    assert again.loss.tolist() == found.loss.tolist()
    first = gradients(head, loss)
    assert np.isfinite(first).all()
    assert np.array_equal(gradients(head, other), first)


@pytest.mark.parametrize("name", HEADS)
def test_samples_do_not_see_each_other(name: str, target: TargetWeights) -> None:
    head = head_of(name, target, n_tokens=4)
    samples = samples_of(name)
    with torch.no_grad():
        _, together = multi_step_loss(head, padded(samples), STEPS)
        alone = [multi_step_loss(head, padded([one]), STEPS)[1] for one in samples]
    added = alone[0]
    for one in alone[1:]:
        added += one
    assert counts(added) == counts(together)
    assert added.loss.tolist() == pytest.approx(together.loss.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_to_predict(name: str, target: TargetWeights) -> None:
    head = head_of(name, target)
    samples = samples_of(name, lengths=(1, 4))
    samples[0].mask[:] = samples[1].mask[:] = False
    for chosen in (samples, samples[:1]):
        loss, found = multi_step_loss(head, padded(chosen), STEPS)
        assert loss.item() == 0
        assert counts(found) == [[0] * STEPS] * 4
        assert found.tokens_per_round == 1
    # The first token is not predicted, whatever its mask says.
    first = dataclasses.replace(samples[1], mask=np.arange(4) == 0)
    assert multi_step_loss(head, padded([first]), STEPS)[0].item() == 0


@pytest.mark.parametrize("way", ["states", "autocast", "head"])
@pytest.mark.parametrize("name", HEADS)
def test_bfloat16(name: str, way: str, target: TargetWeights) -> None:
    """States in bfloat16, as they are kept; and the arithmetic too."""
    head = head_of(name, target)
    batch = padded(samples_of(name))
    rounded = dataclasses.replace(batch, features=batch.features.bfloat16(), last=batch.last.bfloat16())
    exact = dataclasses.replace(batch, features=rounded.features.float(), last=rounded.last.float())
    loss, found = multi_step_loss(head, exact, STEPS)
    if way == "head":
        head = head.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        other, again = multi_step_loss(head, rounded, STEPS)
    assert other.dtype == torch.float32
    if way == "states":
        assert other.item() == loss.item()
    assert other.item() == pytest.approx(loss.item(), rel=3e-2)
    assert counts(again)[:2] == counts(found)[:2]
    assert np.isfinite(gradients(head, other)).all()
