"""The weights of a target that a drafter shares: token embedding, final norm and output head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.gguf_files import GgufSource, shortest
from llamatap.errors import UnsupportedError

__all__ = ["TargetWeights"]

# Keys of architectures whose logits are more than norm(H_n) @ head, or whose stream does not begin with the
# embedding's row.
_BEYOND_A_HEAD = (".final_logit_softcapping", ".logit_scale", ".embedding_scale")

# Architectures whose logits are scaled, capped or partly hidden without such a key, too.
_NEVER_A_HEAD_ALONE = ("chameleon", "gemma2", "gemma3n", "gemma4", "grok", "minicpm", "muse-glimmer")
# Architectures whose final norm subtracts the mean, and has no bias that would show it.
_LAYER_NORM = ("cohere2", "command-r", "dbrx")


@dataclass(frozen=True, slots=True, eq=False)
class TargetWeights:
    """The weights around a target's blocks, as float32, and the sizes that a drafter's block copies.

    :ivar arch: the architecture, as the GGUF file names it.
    :ivar embedding: ``(n_vocab, n_embd)``.
    :ivar norm: weight of the final RMS norm, ``(n_embd,)``.
    :ivar head: output head ``(n_vocab, n_embd)``; the embedding where a file has none of its own.
    :ivar n_layer: number of blocks, without those of multi-token prediction.
    :ivar n_ctx: trained length in tokens.
    """

    arch: str
    embedding: NDArray[np.float32]
    norm: NDArray[np.float32]
    head: NDArray[np.float32]
    n_layer: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_ff: int
    rms_eps: float
    rope_base: float
    n_ctx: int

    @property
    def n_embd(self) -> int:
        """Features of a state."""
        return int(self.embedding.shape[1])

    @property
    def n_vocab(self) -> int:
        """Entries of the vocabulary."""
        return int(self.embedding.shape[0])

    @classmethod
    def read(cls, path: Path) -> TargetWeights:
        """Read and dequantise the weights of a GGUF file.

        :raises ModelNotFoundError: there is no such file.
        :raises ModelLoadError: it cannot be read as GGUF.
        :raises UnsupportedError: a weight or a size is missing, the final norm is no RMS norm, it or the head
            has a bias, or the logits are scaled or capped, so that they are not ``head @ norm(H_n)``.
        :raises MissingPackageError: the ``gguf`` package is missing.
        """
        source = GgufSource(path)
        called = f"{path.name} ({source.arch})"
        for name in ("token_embd.weight", "output_norm.weight"):
            if name not in source.names:
                raise UnsupportedError(f"{called} has no {name}, which a drafter shares with it")
        for name, part in (("output_norm.bias", "final norm"), ("output.bias", "head")):
            if name in source.names:
                raise UnsupportedError(f"{called} has a {part} with a bias; drafters have none")
        if beyond := [key for key in _BEYOND_A_HEAD if source.key(key, None)]:
            raise UnsupportedError(
                f"{path.name} has {source.arch}{beyond[0]}: its logits are more than a norm and a head, "
                "which the training of drafters does not compute"
            )
        if source.arch in _NEVER_A_HEAD_ALONE:
            raise UnsupportedError(
                f"{called} has logits that are more than a norm and a head, "
                "which the training of drafters does not compute"
            )
        rms_eps = source.key(".attention.layer_norm_rms_epsilon", None)
        if rms_eps is None or source.arch in _LAYER_NORM:
            raise UnsupportedError(f"{called} has a final norm that is no RMS norm, which drafters have")

        def weight(name: str) -> NDArray[np.float32]:
            # Those of a float32 file are a read-only view of it, which PyTorch does not take.
            return np.require(source.values(name), requirements="W")

        def size(name: str, default: Any = None) -> int:
            found = source.key(name, default)
            # Some files give one by block.
            largest = max(found) if isinstance(found, list) else found
            if not largest:
                raise UnsupportedError(
                    f"{called} has no {source.arch}{name}, which a drafter's block takes from its target"
                )
            return int(largest)

        embedding = weight("token_embd.weight")
        n_head = size(".attention.head_count")
        return cls(
            source.arch,
            embedding,
            weight("output_norm.weight"),
            weight("output.weight") if "output.weight" in source.names else embedding,
            source.n_layer,
            n_head,
            size(".attention.head_count_kv", n_head),
            size(".attention.key_length", embedding.shape[1] // n_head),
            size(".feed_forward_length"),
            shortest(rms_eps),
            shortest(source.key(".rope.freq_base", 10000.0)),
            size(".context_length"),
        )
