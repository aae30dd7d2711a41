"""Layer ids, and their translation from and to other systems.

``H_i`` is the residual stream that enters block i, for i in 0..n-1; ``H_n`` is the residual after the
last block, before the final norm ("pre-norm"); ``norm(H_n)`` is what the output head reads. In llamatap
a layer id is that i, in 0..n; negative ids count back from n+1 (-1 is H_n, -2 is H_{n-1}); ``"norm"`` is
norm(H_n).

In post-norm encoders (BERT and its family) each block ends with a norm: the stream that enters block i is the
output of the last norm of block i-1, H_0 is the normed sum of the embeddings, and H_n is the model's last
output. They have no final norm, so asking for ``"norm"`` raises :class:`llamatap.UnsupportedError`, and the
last of transformers' ``hidden_states`` is H_n.

Other systems number differently, and states of a wrong layer raise no error anywhere. So ids of other systems
are translated by the name of the system and, for transformers, of the architecture:

>>> translate([-2], source="transformers", n_layer=36, arch="qwen3")
[35]
>>> translate([-1], source="transformers", n_layer=36, arch="qwen3")
['norm']
>>> translate([-2], source="transformers", n_layer=36, arch="mamba")
[36]
>>> translate([1, 17, 32], source="specforge", n_layer=36)
[2, 18, 33]

============================  ======================  ==========================================
``source`` / ``target``       its id k means          its last entry
============================  ======================  ==========================================
``llamatap``                  H_k                     k = n is H_n, pre-norm
``transformers``              H_k for k < n           k = n is norm(H_n)
- Mamba, Mamba 2, RWKV-6      H_{k+1} for k < n       k = n is norm(H_n)
- BERT and its family         H_k                     k = n is H_n
``vllm``, ``speculators``     H_k                     k = n is H_n, pre-norm
``eagle3-gguf``               H_k                     ``eagle3.target_layers``: three ids
``sglang``, ``specforge``,    H_{k+1}                 k = n-1 is H_n; SpecForge's ``hidden_state``
``torchspec``                                         is norm(H_n)
``dflash``, ``dspark``        H_{k+1}                 checkpoints' ``target_layer_ids``
``dflash-gguf``               H_k                     ``dflash.target_layers`` has the +1 already
============================  ======================  ==========================================

Negative ids count from the end in ``llamatap`` and ``transformers``, and are refused elsewhere.

``transformers`` is its ``hidden_states[k]``, as version 5 counts; about a hundred of its model classes were
run to check that (tests/data/layer_numbers.json). The code of some checkpoints (``trust_remote_code``) may
count otherwise. Without an architecture, ids are counted as for Llama: for a loaded model, pass
``arch=model.arch``, or use :func:`translate_for`, which does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, SupportsIndex, runtime_checkable

from llamatap._validate import flag, integer, shown
from llamatap.errors import InvalidInputError

__all__ = [
    "CONVENTIONS",
    "Convention",
    "LayerId",
    "default_eagle3_layers",
    "normalize",
    "slots",
    "translate",
    "translate_for",
]

#: A layer of llamatap's own numbering: 0..n, negative from the end, or "norm".
LayerId = int | Literal["norm"]


class LayerMap(Protocol):
    """The part of a model's layer map that translation needs."""

    @property
    def has_norm(self) -> bool:
        """Whether there is a norm after the last block."""


@runtime_checkable
class LayeredModel(Protocol):
    """The part of a model that translation needs; :class:`llamatap.Model` has it."""

    @property
    def arch(self) -> str:
        """The architecture, as its file names it."""

    @property
    def n_layer(self) -> int:
        """The number of blocks."""

    @property
    def layer_map(self) -> LayerMap:
        """Its layers."""


@dataclass(frozen=True)
class Convention:
    """A system's numbering of the states of a model with n blocks."""

    name: str
    #: H of its id 0: 0 when its id k is H_k, 1 when it is H_{k+1}.
    offset: int
    #: Whether its last entry is norm(H_n).
    last_is_norm: bool = False
    #: Whether negative ids count from the end.
    negative: bool = False
    #: Whether H_n has an id.
    has_last: bool = True
    #: Ids whose entries are not an H_i: the "first", or the "inner" ones between the first and the last.
    unnamed: Literal["none", "first", "inner"] = "none"
    #: Meaning of those entries, for errors.
    why: str = ""

    def last_id(self, n_layer: int) -> int:
        """The largest id of this numbering."""
        return n_layer - self.offset - (not self.has_last) + self.last_is_norm

    def without_norm(self) -> Convention:
        """This numbering for a model without a final norm: its last entry is H_n."""
        return replace(self, last_is_norm=False, has_last=True)

    def to_llamatap(self, layer: LayerId, n_layer: int) -> LayerId:
        """The llamatap id (0..n or "norm") of this system's id."""
        last = self.last_id(n_layer)
        if isinstance(layer, str):
            if layer == "norm" and self.name == "llamatap":
                return "norm"
            known = 'an integer or "norm"' if self.name == "llamatap" else "an integer"
            raise InvalidInputError(
                f"a layer id of {self.name} is {known}, not {shown(layer)}; all are range({last + 1})"
            )
        index = _index(layer, self.name)
        if self.negative and index < 0:
            index += last + 1
        if not 0 <= index <= last:
            low = f"{-last - 1}..{last}" if self.negative else f"0..{last}"
            raise InvalidInputError(
                f"layer id {shown(layer)} is not in {low}, the ids of {self.name} for a model of {n_layer} "
                "blocks"
            )
        if self.last_is_norm and index == last:
            return "norm"
        self._check_named(f"layer id {shown(layer)} of {self.name}", index, n_layer)
        return index + self.offset

    def from_llamatap(self, layer: LayerId, n_layer: int) -> LayerId:
        """This system's id of a llamatap id (normalised: 0..n or "norm")."""
        if layer == "norm":
            if self.name == "llamatap":
                return "norm"
            if self.last_is_norm:
                return self.last_id(n_layer)
            raise InvalidInputError(f"{self.name} has no id for norm(H_{n_layer})")
        if not self.has_last and layer == n_layer:
            raise InvalidInputError(
                f"{self.name} has no id for H_{n_layer}: its last entry is norm(H_{n_layer})"
            )
        if layer < self.offset:
            raise InvalidInputError(f"{self.name} has no id for H_{layer}")
        index = layer - self.offset
        self._check_named(f"H_{layer} in {self.name}", index, n_layer)
        return index

    def _check_named(self, what: str, index: int, n_layer: int) -> None:
        if (self.unnamed == "first" and index == 0) or (self.unnamed == "inner" and index > 0):
            raise InvalidInputError(f"{what} cannot be translated: {self.why}. Give an id of llamatap")


CONVENTIONS: dict[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention("llamatap", 0, negative=True),
        Convention("transformers", 0, last_is_norm=True, negative=True, has_last=False),
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

_AFTER_BLOCKS = Convention("transformers", 1, last_is_norm=True, negative=True)
_NO_FINAL_NORM = CONVENTIONS["transformers"].without_norm()

#: Conventions of transformers for architectures (general.architecture of a file) that differ from Llama's.
_OF_TRANSFORMERS: dict[str, Convention] = {
    # These append a state after each block, and none before the first.
    "mamba": _AFTER_BLOCKS,
    "mamba2": _AFTER_BLOCKS,
    "rwkv6": _AFTER_BLOCKS,
    # transformers' names of the architecture that files call mamba, and of RWKV-4.
    "falcon_mamba": _AFTER_BLOCKS,
    "rwkv": _AFTER_BLOCKS,
    # Their blocks end in norms, and no norm follows the last block.
    "bert": _NO_FINAL_NORM,
    "jina-bert-v2": _NO_FINAL_NORM,
    "jina-bert-v3": _NO_FINAL_NORM,
    "nomic-bert": _NO_FINAL_NORM,
    "nomic-bert-moe": _NO_FINAL_NORM,
    "hrm_text": replace(
        CONVENTIONS["transformers"],
        unnamed="inner",
        why="transformers' hidden_states of hrm_text are what leaves each block, which at the end of a stack "
        "is not what enters the next block",
    ),
    "rwkv7": replace(
        CONVENTIONS["transformers"],
        unnamed="first",
        why="hidden_states[0] of RWKV-7 is the embedding before the norm, and H_0 the one after it",
    ),
}


def _index(layer: SupportsIndex, name: str) -> int:
    try:
        if not isinstance(layer, bool):
            return operator.index(layer)
    except TypeError:
        pass
    known = 'an integer or "norm"' if name == "llamatap" else "an integer"
    raise InvalidInputError(f"a layer id of {name} is {known}, not {shown(layer)}")


def _convention(name: str, arch: str | None) -> Convention:
    if not isinstance(name, str):
        raise InvalidInputError(f"a convention is one of {', '.join(CONVENTIONS)}, not {shown(name)}")
    if name == "transformers" and arch in _OF_TRANSFORMERS:
        return _OF_TRANSFORMERS[arch]
    try:
        return CONVENTIONS[name]
    except KeyError:
        raise InvalidInputError(
            f"unknown convention {shown(name)}; known are {', '.join(CONVENTIONS)}"
        ) from None


def translate(
    ids: Iterable[LayerId],
    *,
    source: str = "llamatap",
    target: str = "llamatap",
    n_layer: int,
    final_norm: bool = True,
    arch: str | None = None,
) -> list[LayerId]:
    """Translate layer ids between systems.

    :param ids: ids as ``source`` numbers them.
    :param source: the system to translate from, a name of the table above.
    :param target: the system to translate to.
    :param n_layer: the number of blocks of the model.
    :param final_norm: whether the model has a norm after its last block (``model.layer_map.has_norm``). BERT
        has none, as its blocks end in norms; the last entry of transformers is then H_n.
    :param arch: the model's architecture as its file names it (``model.arch``): transformers counts some
        differently from Llama. None: as for Llama.
    :raises InvalidInputError: an unknown system, an id out of its range, a state that the target
        has no id for, or an argument of another type.
    """
    n_layer = integer("n_layer", n_layer, 1)
    final_norm = flag("final_norm", final_norm)
    if arch is not None and not isinstance(arch, str):
        raise InvalidInputError(f"arch must be the name of an architecture, as model.arch, not {shown(arch)}")
    reading, writing = _convention(source, arch), _convention(target, arch)
    # A zero-dimensional array claims to be iterable and is not.
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
        raise InvalidInputError(f"ids must be a list of layer ids, not {shown(ids)}")
    ids = list(ids)
    if not final_norm or _convention("transformers", arch) is _NO_FINAL_NORM:
        if any(isinstance(layer, str) and layer == "norm" for layer in ids):
            raise InvalidInputError('a model without a final norm has no layer "norm"')
        reading, writing = reading.without_norm(), writing.without_norm()
    return [writing.from_llamatap(reading.to_llamatap(k, n_layer), n_layer) for k in ids]


def translate_for(
    model: LayeredModel, ids: Iterable[LayerId], *, source: str = "llamatap", target: str = "llamatap"
) -> list[LayerId]:
    """Translate layer ids between systems, for a loaded model: its depth, final norm and architecture.

    :param ids: ids as ``source`` numbers them.
    :raises InvalidInputError: as :func:`translate`.
    :raises UnsupportedError: the model carries no single residual stream.
    """
    if not isinstance(model, LayeredModel):
        raise InvalidInputError(f"model must be a Model, not {type(model).__name__}")
    has_norm = model.layer_map.has_norm
    return translate(
        ids, source=source, target=target, n_layer=model.n_layer, final_norm=has_norm, arch=model.arch
    )


def normalize(layers: Iterable[LayerId] | LayerId, n_layer: int) -> tuple[LayerId, ...]:
    """Normalise layer ids: each becomes 0..n or "norm".

    :param layers: ids, or a single one.
    :raises InvalidInputError: none given, or one out of range.
    """
    if isinstance(layers, (bytes, bytearray)):
        raise InvalidInputError(f"layers must be layer ids, not {shown(layers)}")
    # A zero-dimensional array claims to be iterable and is not.
    if isinstance(layers, str) or not isinstance(layers, Iterable) or getattr(layers, "ndim", 1) == 0:
        layers = [layers]  # type: ignore[list-item]
    own = CONVENTIONS["llamatap"]
    result = tuple(own.to_llamatap(layer, n_layer) for layer in layers)
    if not result:
        raise InvalidInputError("layers is empty; give at least one layer id")
    return result


def slots(layers: Iterable[LayerId], n_layer: int) -> list[int]:
    """The core's numbers of normalised ids: i for H_i, n+1 for norm(H_n)."""
    return [n_layer + 1 if layer == "norm" else int(layer) for layer in layers]


def default_eagle3_layers(n_layer: int) -> list[int]:
    """The three layers that EAGLE-3 drafters are trained on by default.

    ``[2, n//2, n-3]``: the defaults of vLLM and llama.cpp; SpecForge numbers them ``[1, n//2-1, n-4]``.
    """
    n_layer = integer("n_layer", n_layer, 1)
    if n_layer < 5:
        raise InvalidInputError(f"a model of {n_layer} blocks has too few layers for EAGLE-3, which needs 5")
    return [2, n_layer // 2, n_layer - 3]
