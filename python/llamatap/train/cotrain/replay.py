"""The samples of a cycle: what is trained on and what is measured on, chosen from the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamatap._system_limits import require_memory
from llamatap.storage.tensor_files import read_tensors
from llamatap.train.cotrain.folder import CoTrainFolder
from llamatap.train.cotrain.sample_writer import sample_numbers
from llamatap.train.drafters.sample_tensors import SampleTensors

__all__ = ["CycleSamples", "Replay"]

# One of so many prompts is held out.
_HELD_OUT_SHARE = 8
# Fewer prompts than that are no sample of the traffic: then texts are told apart as a whole.
_FEWEST_PROMPTS = 16


@dataclass(frozen=True)
class _About:
    """What is kept of a sample between cycles.

    :ivar prompt: hash of the tokens before the first one that counts for the loss.
    :ivar text: hash of all tokens.
    """

    n_tokens: int
    prompt: bytes
    text: bytes


@dataclass(frozen=True, eq=False)
class CycleSamples:
    """Samples in memory.

    :ivar training: indices of those to train on.
    :ivar held_out: indices of those to measure on.
    """

    samples: SampleTensors
    training: list[int]
    held_out: list[int]


class Replay:
    """The samples in the folder. They stay there; a cycle loads some of them.

    :param model_sha256: hash of the target's file.
    :param columns: the layers that the head reads, and H_n.
    :param n_embd: width of a state.
    :param n_vocab: tokens are 0..n_vocab-1.
    :ivar unusable: number of samples of another target, without these layers, or damaged.
    :ivar newest: number of the newest sample; -1 without any.
    """

    def __init__(
        self,
        folder: CoTrainFolder,
        model_sha256: str | None,
        columns: Sequence[int],
        n_embd: int,
        n_vocab: int,
    ) -> None:
        self._folder = folder.samples
        self._sha256 = model_sha256
        self._columns = list(columns)
        self._n_embd, self._n_vocab = n_embd, n_vocab
        self._known: dict[int, _About | None] = {}

    @property
    def unusable(self) -> int:
        return sum(one is None for one in self._known.values())

    @property
    def newest(self) -> int:
        return max(self._known, default=-1)

    def look(self) -> None:
        """Look for new samples, and forget those that are gone."""
        there = sample_numbers(self._folder)
        known = self._known
        self._known = {}
        for number in there:
            self._known[number] = known[number] if number in known else self._about(number)

    def _path(self, number: int) -> Path:
        return self._folder / f"hs_{number}.safetensors"

    def _about(self, number: int) -> _About | None:
        try:
            tensors, made, _ = read_tensors(self._path(number), ("token_ids", "loss_mask"))
            tokens, mask = tensors["token_ids"].astype(np.int64), tensors["loss_mask"] > 0
            fits = (
                made.get("model_sha256") in (None, self._sha256)
                and set(self._columns) <= set(made["layers"])
                and tokens.ndim == 1
                and tokens.shape == mask.shape
                and mask[1:].any()
                # Elsewhere PyTorch would end the process.
                and 0 <= tokens.min() <= tokens.max() < self._n_vocab
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not fits:
            return None
        prompt = tokens[: int(mask.argmax())].tobytes()
        return _About(len(tokens), _hash(prompt), _hash(tokens.tobytes()))

    def sides(self) -> tuple[list[int], list[int]]:
        """The numbers of the samples to train on and of the held-out ones, oldest first. The side of a
        sample follows from its prompt, so it is the same in each cycle; from the whole text while there are
        few prompts."""
        usable = {number: one for number, one in self._known.items() if one is not None}
        whole = len({one.prompt for one in usable.values()}) < _FEWEST_PROMPTS
        sides: tuple[list[int], list[int]] = ([], [])
        for number, one in usable.items():
            identity = one.text if whole else one.prompt
            sides[identity[0] % _HELD_OUT_SHARE == 0].append(number)
        return sides

    def n_tokens(self, numbers: Sequence[int]) -> int:
        """Tokens of some samples."""
        return sum(one.n_tokens for number in numbers if (one := self._known[number]) is not None)

    def choose(
        self, newer_than: int, cycle_tokens: int, held_out: int, rng: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        """The samples of a cycle: the new ones, newest first, and a random choice of the older ones.

        :param newer_than: number of the newest sample that was there in the cycle before.
        :param cycle_tokens: maximum number of tokens to train on.
        :param held_out: maximum number of samples to measure on: the newest.
        """
        training, held = self.sides()
        new = [number for number in reversed(training) if number > newer_than]
        old = [number for number in training if number <= newer_than]
        chosen: list[int] = []
        left = cycle_tokens
        for number in [*new, *rng.permutation(np.asarray(old, np.int64)).tolist()]:
            size = self.n_tokens([number])
            if size > left and chosen:
                break
            chosen.append(number)
            left -= size
        return chosen, held[-held_out:]

    def load(self, training: Sequence[int], held_out: Sequence[int]) -> CycleSamples:
        """Load samples; those that are gone by now, or have others' states, are left out.

        :raises OutOfMemoryError: they do not fit into memory.
        """
        n_tokens = self.n_tokens([*training, *held_out])
        require_memory(
            2 * n_tokens * len(self._columns) * self._n_embd,
            f"the states of {n_tokens} tokens take",
            "give fewer (cycle_tokens, --cycle-tokens; held_out, --held-out)",
        )
        found = SampleTensors.empty(n_tokens, len(self._columns), self._n_embd)
        indices: tuple[list[int], list[int]] = ([], [])
        for side, numbers in enumerate((training, held_out)):
            for number in numbers:
                about = self._known[number]
                if about is None or self._about(number) != about:
                    # Another one by now: a new server counts from 0 if it finds none.
                    self._known.pop(number)
                    continue
                try:
                    names = ("token_ids", "loss_mask", "hidden_states")
                    tensors, made, _ = read_tensors(self._path(number), names)
                    layers, states = made["layers"], tensors["hidden_states"]
                    states = states[:, [layers.index(layer) for layer in self._columns]].astype(np.float32)
                    if states.shape[0::2] != (about.n_tokens, self._n_embd) or not np.isfinite(states).all():
                        raise ValueError
                except (OSError, ValueError, KeyError, IndexError, TypeError):
                    self._known[number] = None
                    continue
                found.add(tensors["token_ids"].astype(np.int32), tensors["loss_mask"] > 0, states)
                indices[side].append(len(found) - 1)
        return CycleSamples(found, *indices)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
