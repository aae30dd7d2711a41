"""Which samples are trained on, which are held out, and the tokens that a draft vocabulary has."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from llamatap.errors import InvalidInputError
from llamatap.train.drafters.sample_tensors import SampleTensors

__all__ = ["draft_vocabulary", "prompt_of", "split_by_prompt", "token_counts"]


def prompt_of(samples: SampleTensors, i: int) -> NDArray[np.int64]:
    """The tokens of a sample before the first one that counts for the loss."""
    part = slice(samples.offsets[i], samples.offsets[i + 1])
    counting = samples.loss_mask[part].nonzero()
    end = int(counting[0]) if len(counting) else part.stop - part.start
    found: NDArray[np.int64] = samples.tokens[part][:end].cpu().numpy().astype(np.int64)
    return found


def _identity(samples: SampleTensors, i: int) -> bytes:
    """The prompt of a sample, or all of it if it has none."""
    prompt = prompt_of(samples, i)
    part = slice(samples.offsets[i], samples.offsets[i + 1])
    return (prompt if len(prompt) else samples.tokens[part].cpu().numpy().astype(np.int64)).tobytes()


def split_by_prompt(samples: SampleTensors, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Choose held-out samples, at most an eighth of all; the samples to train on have none of their
    prompts (or texts, where there is no prompt).

    A prompt that was trained on is not held out when samples are added, if as many are held out as before:
    a head that is trained further is not measured on what it has seen.

    :returns: the samples to train on, and the held-out ones.
    :raises InvalidInputError: nothing is left to train on.
    """
    n = min(held_out, len(samples) // 8)
    names = [_identity(samples, i) for i in range(len(samples))]
    salt = f"{seed}:".encode()
    order = sorted(range(len(samples)), key=lambda i: (sha256(salt + names[i]).digest(), i))
    chosen = sorted(order[:n])
    held = {names[i] for i in chosen}
    taken = set(chosen)
    training = [i for i in range(len(samples)) if i not in taken and names[i] not in held]
    if not training:
        raise InvalidInputError(f"there is nothing to train on: {len(samples)} samples, {n} of them held out")
    return training, chosen


def token_counts(samples: SampleTensors, training: Sequence[int], n_vocab: int) -> NDArray[np.int64]:
    """How often each token is to be predicted, int64 ``(n_vocab,)``."""
    counts = np.zeros(n_vocab, np.int64)
    for i in training:
        part = slice(samples.offsets[i], samples.offsets[i + 1])
        counts += np.bincount(samples.tokens[part][samples.loss_mask[part]].cpu().numpy(), minlength=n_vocab)
    return counts


def draft_vocabulary(counts: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], float]:
    """The most frequent tokens.

    :returns: their ids in ascending order, int64 ``(size,)``, and the share of all counts that they have.
    """
    tokens = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)
    return tokens, float(counts[tokens].sum() / max(int(counts.sum()), 1))
