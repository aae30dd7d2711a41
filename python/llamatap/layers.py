"""Layer ids, and their translation from and to other systems.

``H_i`` is the residual stream that enters block i, for i in 0..n-1; ``H_n`` is the residual after the
last block, before the final norm ("pre-norm"); ``norm(H_n)`` is what the output head reads. In llamatap
a layer id is that i, in 0..n; negative ids count back from n+1 (-1 is H_n, -2 is H_{n-1}); ``"norm"`` is
norm(H_n).

Post-norm encoders (BERT and its family) norm what each block gives: the stream that enters block i is the
output of the last norm of block i-1, H_0 is the normed sum of the embeddings, and H_n is the model's last
output. They have no final norm, so asking for ``"norm"`` raises :class:`llamatap.UnsupportedError`, and the
last of transformers' ``hidden_states`` is H_n there.

Other systems number differently, and a state of the wrong layer is still fluent. So ids of other systems
are translated by the name of the system:

>>> translate([-2], source="transformers", n_layer=36)
[35]
>>> translate([-1], source="transformers", n_layer=36)
['norm']
>>> translate([1, 17, 32], source="specforge", n_layer=36)
[2, 18, 33]

============================  ======================  ==========================================
``source`` / ``target``       its id k means          its last entry
============================  ======================  ==========================================
``llamatap``                  H_k                     k = n is H_n, pre-norm
``transformers``              H_k for k < n           k = n is norm(H_n) in Llama-like models
``vllm``, ``speculators``     H_k                     k = n is H_n, pre-norm
``eagle3-gguf``               H_k                     ``eagle3.target_layers``: three ids
``sglang``, ``specforge``,    H_{k+1}                 k = n-1 is H_n; SpecForge's ``hidden_state``
``torchspec``                                         is norm(H_n)
``dflash``, ``dspark``        H_{k+1}                 checkpoints' ``target_layer_ids``
``dflash-gguf``               H_k                     ``dflash.target_layers`` has the +1 already
============================  ======================  ==========================================

Negative ids count from the end in ``llamatap`` and ``transformers``, and are refused elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, SupportsIndex

from llamatap.errors import InvalidInputError

__all__ = [
    "CONVENTIONS",
    "Convention",
    "LayerId",
    "default_eagle3_layers",
    "normalize",
    "slots",
    "translate",
]

#: A layer of llamatap's own numbering: 0..n, negative from the end, or "norm".
LayerId = int | Literal["norm"]


@dataclass(frozen=True)
class Convention:
    """How a system numbers the states of a model with n blocks."""

    name: str
    #: H of its id 0: 0 when its id k is H_k, 1 when it is H_{k+1}.
    offset: int
    #: Whether its id n is norm(H_n) rather than H_n.
    last_is_norm: bool = False
    #: Whether negative ids count from the end.
    negative: bool = False

    def to_llamatap(self, layer: LayerId, n_layer: int) -> LayerId:
        """The llamatap id (0..n or "norm") of this system's id."""
        last = n_layer - self.offset
        if isinstance(layer, str):
            if layer == "norm" and self.name == "llamatap":
                return "norm"
            known = 'an integer or "norm"' if self.name == "llamatap" else "an integer"
            raise InvalidInputError(
                f"a layer id of {self.name} is {known}, not {layer!r}; all are range({last + 1})"
            )
        index = _index(layer, self.name)
        if self.negative and index < 0:
            index += last + 1
        if not 0 <= index <= last:
            low = f"{-last - 1}..{last}" if self.negative else f"0..{last}"
            raise InvalidInputError(
                f"layer id {layer} is not in {low}, the ids of {self.name} for a model of {n_layer} blocks"
            )
        if self.last_is_norm and index == n_layer:
            return "norm"
        return index + self.offset

    def from_llamatap(self, layer: LayerId, n_layer: int) -> LayerId:
        """This system's id of a llamatap id (normalised: 0..n or "norm")."""
        if layer == "norm":
            if self.name == "llamatap":
                return "norm"
            if self.last_is_norm:
                return n_layer
            raise InvalidInputError(f"{self.name} has no id for norm(H_{n_layer})")
        if self.last_is_norm and layer == n_layer:
            raise InvalidInputError(
                f"{self.name} has no id for H_{n_layer}: its last entry is norm(H_{n_layer})"
            )
        if layer < self.offset:
            raise InvalidInputError(f"{self.name} has no id for H_{layer}")
        return layer - self.offset


CONVENTIONS: dict[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention("llamatap", 0, negative=True),
        Convention("transformers", 0, last_is_norm=True, negative=True),
        Convention("vllm", 0),
        Convention("speculators", 0),
        Convention("eagle3-gguf", 0),
        Convention("sglang", 1),
        Convention("specforge", 1),
        Convention("torchspec", 1),
        Convention("dflash", 1),
        Convention("dspark", 1),
        Convention("dflash-gguf", 0),
    )
}


def _index(layer: SupportsIndex, name: str) -> int:
    try:
        if not isinstance(layer, bool):
            return operator.index(layer)
    except TypeError:
        pass
    known = 'an integer or "norm"' if name == "llamatap" else "an integer"
    raise InvalidInputError(f"a layer id of {name} is {known}, not {layer!r}")


def _convention(name: str) -> Convention:
    try:
        return CONVENTIONS[name]
    except KeyError:
        raise InvalidInputError(f"unknown convention {name!r}; known are {', '.join(CONVENTIONS)}") from None


def translate(
    ids: Iterable[LayerId],
    *,
    source: str = "llamatap",
    target: str = "llamatap",
    n_layer: int,
    final_norm: bool = True,
) -> list[LayerId]:
    """Translate layer ids between systems.

    :param ids: ids as ``source`` numbers them.
    :param source: the system that they are from, a name of the table above.
    :param target: the system that they are for.
    :param n_layer: the number of blocks of the model.
    :param final_norm: whether the model has a norm after its last block (``model.layer_map.has_norm``). BERT
        has none, for its blocks end in norms: the last entry of transformers is H_n then.
    :raises InvalidInputError: an unknown system, an id out of its range, or a state that the target
        has no id for.
    """
    if n_layer < 1:
        raise InvalidInputError(f"n_layer must be at least 1, not {n_layer}")
    reading, writing = _convention(source), _convention(target)
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidInputError(f"ids must be a list of layer ids, not {ids!r}")
    ids = list(ids)
    if not final_norm:
        if "norm" in ids:
            raise InvalidInputError('a model without a final norm has no layer "norm"')
        reading, writing = (replace(system, last_is_norm=False) for system in (reading, writing))
    return [writing.from_llamatap(reading.to_llamatap(k, n_layer), n_layer) for k in ids]


def normalize(layers: Iterable[LayerId] | LayerId, n_layer: int) -> tuple[LayerId, ...]:
    """Ids of llamatap without negative ones: each is in 0..n or "norm".

    :param layers: ids, or a single one.
    :raises InvalidInputError: none given, or one out of range.
    """
    if isinstance(layers, (bytes, bytearray)):
        raise InvalidInputError(f"layers must be layer ids, not {layers!r}")
    # An array of no dimensions says that it is iterable, and is not.
    if isinstance(layers, str) or not isinstance(layers, Iterable) or getattr(layers, "ndim", 1) == 0:
        layers = [layers]  # type: ignore[list-item]
    own = CONVENTIONS["llamatap"]
    result = tuple(own.to_llamatap(layer, n_layer) for layer in layers)
    if not result:
        raise InvalidInputError("layers is empty; give at least one layer id")
    return result


def slots(layers: Iterable[LayerId], n_layer: int) -> list[int]:
    """The native core's numbers of normalised ids: i for H_i, n+1 for norm(H_n)."""
    return [n_layer + 1 if layer == "norm" else int(layer) for layer in layers]


def default_eagle3_layers(n_layer: int) -> list[int]:
    """The three layers that EAGLE-3 drafters are trained on unless said otherwise.

    ``[2, n//2, n-3]``: vLLM's and llama.cpp's defaults, and what SpecForge calls ``[1, n//2-1, n-4]``.
    """
    if n_layer < 5:
        raise InvalidInputError(f"a model of {n_layer} blocks has no three such layers")
    return [2, n_layer // 2, n_layer - 3]
