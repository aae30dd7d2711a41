"""The weights of a target that a drafter shares: token embedding, final norm and output head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamatap.convert.gguf_files import GgufSource
from llamatap.errors import UnsupportedError

__all__ = ["TargetWeights"]

# Keys of architectures whose logits are more than norm(H_n) @ head, or whose stream does not begin with the
# embedding's row.
_BEYOND_A_HEAD = (".final_logit_softcapping", ".logit_scale", ".embedding_scale")


@dataclass(frozen=True, slots=True, eq=False)
class TargetWeights:
    """The weights around a target's blocks, as float32, and the sizes that a drafter's block copies.

    :ivar arch: the architecture, as the GGUF file names it.
    :ivar embedding: ``(n_vocab, n_embd)``.
    :ivar norm: weight of the final RMS norm, ``(n_embd,)``.
    :ivar head: output head ``(n_vocab, n_embd)``; the embedding where a file has none of its own.
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
        :raises UnsupportedError: a weight is missing, the final norm has a bias, or the logits are scaled or
            capped, so that they are not ``head @ norm(H_n)``.
        :raises MissingPackageError: the ``gguf`` package is missing.
        """
        source = GgufSource(path)
        for name in ("token_embd.weight", "output_norm.weight"):
            if name not in source.names:
                raise UnsupportedError(
                    f"{path.name} ({source.arch}) has no {name}, which a drafter shares with it"
                )
        if "output_norm.bias" in source.names:
            raise UnsupportedError(
                f"{path.name} ({source.arch}) has a final norm with a bias; drafters have none"
            )
        if beyond := [key for key in _BEYOND_A_HEAD if source.key(key, None)]:
            raise UnsupportedError(
                f"{path.name} has {source.arch}{beyond[0]}: its logits are more than a norm and a head, "
                "which the training of drafters does not compute"
            )
        # Copies where the file is mapped: PyTorch wants memory that it may write to.
        embedding = np.require(source.values("token_embd.weight"), requirements="W")
        own_head = "output.weight" in source.names
        n_head = _largest(source.key(".attention.head_count"))
        return cls(
            source.arch,
            embedding,
            np.require(source.values("output_norm.weight"), requirements="W"),
            np.require(source.values("output.weight"), requirements="W") if own_head else embedding,
            int(source.key(".block_count")),
            n_head,
            _largest(source.key(".attention.head_count_kv", n_head)),
            int(source.key(".attention.key_length", embedding.shape[1] // n_head)),
            _largest(source.key(".feed_forward_length")),
            float(source.key(".attention.layer_norm_rms_epsilon")),
            float(source.key(".rope.freq_base", 10000.0)),
            int(source.key(".context_length")),
        )


def _largest(value: object) -> int:
    """A number, or the largest of those that a file gives by block."""
    return int(max(value)) if isinstance(value, list) else int(value)  # type: ignore[call-overload]
