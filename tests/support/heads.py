"""Drafting heads of PyTorch with seeded random weights, and the drafting that they stand for, by hand.

Needs PyTorch: tests import it after ``pytest.importorskip("torch")``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from support import checkpoints
from support.tiny import TinyLlama

from llamatap.train.drafters.draft_block import StepCache
from llamatap.train.drafters.head_checkpoints import write_head
from llamatap.train.drafters.heads import DraftHead, Eagle3Head, MtpHead
from llamatap.train.drafters.multi_step_loss import PaddedBatch
from llamatap.train.drafters.target_weights import TargetWeights
from reference import decoder, eagle3_checkpoint, mtp_checkpoint
from reference.eagle3 import softmax

Array: TypeAlias = "NDArray[np.float64]"

#: The layers that the EAGLE-3 heads of the tests read.
LAYERS = (1, 2, 3)
#: Names of :func:`head_of`.
HEADS = ("eagle3", "eagle3, few tokens", "mtp")


def draft_vocabulary(n_vocab: int, n: int) -> NDArray[np.int64]:
    found = np.random.default_rng(n).choice(np.arange(3, n_vocab), n, replace=False)
    return np.sort(found).astype(np.int64)


def head_of(name: str, target: TargetWeights, n_tokens: int = 100, seed: int = 0) -> DraftHead:
    """A head with random weights under which drafted tokens vary.

    :param name: one of HEADS.
    :param n_tokens: size of the draft vocabulary of "eagle3, few tokens".
    """
    head: DraftHead
    if name == "mtp":
        head = MtpHead(target, n_ff=80)
    else:
        tokens = draft_vocabulary(target.n_vocab, n_tokens) if name.endswith("few tokens") else None
        head = Eagle3Head(target, LAYERS, tokens, n_ff=80)
    rng = np.random.default_rng(seed)
    for part, values in head.named_parameters():
        if part == "target_norm.weight":
            continue
        shape = tuple(values.shape)
        if len(shape) == 1:
            found = rng.uniform(0.5, 1.5, shape)
        else:
            found = rng.standard_normal(shape) / np.sqrt(shape[1])
        if name != "mtp" and part in {f"block.{one}_proj.weight" for one in "qkv"}:
            found[:, : target.n_embd] *= 3  # else the state carried on gives the same token again and again
        if part == "lm_head.weight":
            found *= 4
        values.data = torch.from_numpy(found.astype(np.float32))
    return head


def moved(head: DraftHead, by: float, seed: int = 1) -> tuple[DraftHead, dict[str, Array]]:
    """A copy of a head with all trained weights moved along a random direction, and the direction."""
    other = copy.deepcopy(head)
    rng = np.random.default_rng(seed)
    directions = {}
    for name, values in other.named_parameters():
        if values.requires_grad:
            directions[name] = rng.standard_normal(tuple(values.shape)) * float(values.detach().std() + 0.1)
            values.data += torch.from_numpy((by * directions[name]).astype(np.float32))
    return other, directions


@dataclass(frozen=True)
class Oracle:
    """A head's checkpoint in float64, read back from the file that :func:`write_head` makes.

    :ivar first_token: as :attr:`DraftHead.first_token`.
    :ivar first_states: the states of step 0 of all entries, from the target's states of all tokens.
    :ivar decode: logits and next states, from tokens and states of all pairs at positions 0, 1, ...; the
        formulas of tests/reference, which know no steps and no masks of steps.
    :ivar tokens: the draft vocabulary.
    """

    first_token: int
    first_states: Callable[[Array], Array]
    decode: Callable[[Sequence[int], Array], tuple[Array, Array]]
    tokens: NDArray[np.int64]

    @classmethod
    def of(cls, head: DraftHead, tiny: TinyLlama, target: TargetWeights, folder: Path) -> Oracle:
        everything = np.arange(tiny.n_vocab)
        if isinstance(head, MtpHead):
            path = write_head(folder / "oracle.safetensors", head, target, dtype="float32")
            with safe_open(path, framework="np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                config = json.loads(file.metadata()["config"])
            weights = tiny.weights
            output = weights.get("output.weight", weights["token_embd.weight"])
            block = mtp_checkpoint.Block(
                tensors,
                config["num_attention_heads"],
                config["num_key_value_heads"],
                config["rope_theta"],
                config["rms_norm_eps"],
                weights["token_embd.weight"],
                output,
            )
            zeros = np.zeros((1, tiny.n_embd))
            return cls(
                0,
                lambda last: np.concatenate([zeros, last[:-1]]),
                lambda tokens, states: mtp_checkpoint.decode(tokens, states, block),
                everything,
            )
        folder = write_head(folder / "oracle", head, target, dtype="float32")
        tensors = checkpoints.read(folder)
        inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        tensors["embed_tokens.weight"] = tiny.weights["token_embd.weight"]
        eagle = eagle3_checkpoint.Block(
            tensors,
            "layers.0.",
            inner["num_attention_heads"],
            inner["num_key_value_heads"],
            inner["rope_theta"],
            inner["rms_norm_eps"],
            tiny.n_vocab,
        )
        ids = everything
        if "d2t" in tensors:
            ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))

        def decode(tokens: Sequence[int], states: Array) -> tuple[Array, Array]:
            logits, after = eagle3_checkpoint.decode(tokens, states, eagle)
            return logits[:, ids], after

        return cls(1, lambda features: eagle3_checkpoint.encode(features[:-1], eagle), decode, ids)


@dataclass(frozen=True)
class Drafts:
    """The drafts that begin at every entry of a text, with the text's own tokens put in for the drafted ones.

    :ivar states: (steps, entries, width): what the block gave for an entry in the step; NaN for entries
        before the step's number.
    :ivar logits: (steps, entries, tokens of the draft vocabulary); likewise.
    """

    states: Array
    logits: Array


def drafts_of(oracle: Oracle, tokens: Sequence[int], features: NDArray[Any], n_steps: int) -> Drafts:
    """Draft after each entry, one pair at a time, as an engine does.

    :param tokens: of the whole text.
    :param features: the target's states of all tokens that the head reads.
    """
    entries = [int(token) for token in tokens[oracle.first_token :]]
    first = oracle.first_states(np.asarray(features, np.float64))
    n, width = len(entries), first.shape[1]
    states = np.full((n_steps, n, width), np.nan)
    logits = np.full((n_steps, n, len(oracle.tokens)), np.nan)
    for start in range(n):
        seen = first[: start + 1]
        for step in range(min(n_steps, n - start)):
            entry = start + step
            found, after = oracle.decode(entries[: entry + 1], seen)
            states[step, entry], logits[step, entry] = after[-1], found[-1]
            seen = np.concatenate([seen, after[-1:]])
    return Drafts(states, logits)


@dataclass(frozen=True)
class Expected:
    """Loss and counts by step, by hand."""

    loss: float
    sums: Array
    predicted: list[int]
    drafted: list[int]
    agreed: list[int]
    accepted: list[int]


def expected_loss(
    oracle: Oracle,
    tiny: TinyLlama,
    samples: Sequence[Sample],
    drafts: Sequence[Drafts],
    n_steps: int,
    decay: float,
) -> Expected:
    """The loss of some samples, from the drafts that begin at each of their entries."""
    output = tiny.weights.get("output.weight", tiny.weights["token_embd.weight"]).astype(np.float64)
    gain = tiny.weights["output_norm.weight"].astype(np.float64)
    sums = np.zeros(n_steps)
    predicted, drafted, agreed, accepted = ([0] * n_steps for _ in range(4))
    for sample, found in zip(samples, drafts, strict=True):
        n = len(sample.tokens)
        normed = decoder.rms_norm(sample.last.astype(np.float64), gain, tiny.eps)
        wanted = softmax(normed @ output[oracle.tokens].T)
        best = oracle.tokens[wanted.argmax(1)] if sample.argmax is None else sample.argmax
        for start in range(n - oracle.first_token):
            whole, right = True, True
            for step in range(n_steps):
                entry = start + step
                # The entry's own token, and the one that it predicts.
                own = entry + oracle.first_token
                if own + 1 >= n:
                    break
                logits = found.logits[step, entry]
                counts = bool(sample.mask[own + 1])
                match = oracle.tokens[logits.argmax()] == best[own]
                whole = whole and counts
                right = right and match
                predicted[step] += counts
                agreed[step] += counts and match
                drafted[step] += whole
                accepted[step] += whole and right
                if counts:
                    shifted = logits - logits.max()
                    sums[step] -= (wanted[own] * (shifted - np.log(np.exp(shifted).sum()))).sum()
    means = [total / max(count, 1) for total, count in zip(sums, predicted, strict=True)]
    loss = sum(decay**step * mean for step, mean in enumerate(means))
    return Expected(float(loss), sums, predicted, drafted, agreed, accepted)


@dataclass
class Sample:
    """A text with the target's states.

    :ivar features: (n, features that the head reads).
    :ivar last: (n, width): H_n.
    :ivar mask: True where a token is to be predicted.
    :ivar argmax: the target's most likely token after each; None: that of the draft vocabulary.
    """

    tokens: NDArray[np.int64]
    features: NDArray[np.float32]
    last: NDArray[np.float32]
    mask: NDArray[np.bool_]
    argmax: NDArray[np.int64] | None = None


def padded(samples: Sequence[Sample], rng: np.random.Generator | None = None) -> PaddedBatch:
    """The samples side by side; the padding is zeros, or random."""
    n = max(len(one.tokens) for one in samples)

    def filled(rows: Sequence[NDArray[Any]], random: Callable[[tuple[int, ...]], NDArray[Any]]) -> Any:
        shape = (len(rows), n, *rows[0].shape[1:])
        found = np.zeros(shape, rows[0].dtype) if rng is None else random(shape).astype(rows[0].dtype)
        for row, values in zip(found, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(found)

    mask = np.zeros((len(samples), n), np.bool_)
    for row, one in zip(mask, samples, strict=True):
        row[: len(one.mask)] = one.mask
    generator = np.random.default_rng() if rng is None else rng
    return PaddedBatch(
        filled([one.tokens for one in samples], lambda shape: generator.integers(0, 200, shape)),
        filled([one.features for one in samples], lambda shape: generator.normal(0, 30, shape)),
        filled([one.last for one in samples], lambda shape: generator.normal(0, 30, shape)),
        torch.from_numpy(mask),
    )


def drafted_by(
    head: DraftHead, tokens: Sequence[int], features: NDArray[np.float32], n: int
) -> tuple[list[int], Array]:
    """Draft greedily after a text with the head alone, by the steps of its training.

    :param features: the target's states of all tokens but the last.
    :returns: the drafted tokens, and the probability of each.
    """
    found: list[int] = []
    probabilities = []
    ids = np.arange(head.embedding.shape[0]) if head.draft_tokens is None else head.draft_tokens.numpy()
    first = head.first_state(torch.from_numpy(np.asarray(features, np.float32))[None])
    if head.first_token == 0:
        first = torch.cat([torch.zeros(1, 1, first.shape[2]), first], 1)
    with torch.no_grad():
        for n_drafted in range(n):
            entries = [*tokens[head.first_token :], *found]
            # The target gave nothing yet for the drafted tokens.
            state = torch.cat([first, torch.zeros(1, n_drafted, first.shape[2])], 1)
            positions = torch.arange(len(entries))
            cache = StepCache()
            for step in range(n_drafted + 1):
                state = head.step(torch.tensor([entries]), state, positions, cache)
                if step < n_drafted:
                    state = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], 1)
            share = softmax(head.logits(state)[0, -1:].double().numpy())[0]
            found.append(int(ids[share.argmax()]))
            probabilities.append(share.max())
    return found, np.array(probabilities)
