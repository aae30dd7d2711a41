"""Options of contexts, and which of them the results depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from llamatap._options import Option, read_options

__all__ = ["ContextOption", "ContextOptions", "engine_switch", "fingerprint_of", "provenance_of"]


@dataclass(frozen=True)
class ContextOption(Option):
    """Option of a context, which says whether the results depend on it."""

    #: Where its value is recorded: "states" in the provenance of states and the fingerprint of saved
    #: sequences, "saved" only in that fingerprint, "no" nowhere, as neither depends on it.
    recorded: Literal["states", "saved", "no"] = field(kw_only=True)
    #: Key of the provenance, where it is not the option's name.
    provenance_key: str = field(default="", kw_only=True)


def _recorded(declaration: type[Any], *kinds: str) -> list[ContextOption]:
    options = read_options(declaration).values()
    return [one for one in options if isinstance(one, ContextOption) and one.recorded in kinds]


def fingerprint_of(declaration: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a context that a saved sequence depends on.

    :param values: the values in use, by option.
    """
    return {one.name: values[one.name] for one in _recorded(declaration, "saved", "states")}


def provenance_of(declaration: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a context that its states depend on.

    :param values: the values in use, by option.
    """
    return {one.provenance_key or one.name: values[one.name] for one in _recorded(declaration, "states")}


class ContextOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Context`."""

    n_ctx: Annotated[
        int,
        ContextOption(
            0,
            "capacity in tokens, for all sequences together; 0 for the length that the model was trained "
            "with. The engine rounds up to a multiple of 256: 64 becomes 256; :attr:`n_ctx` has the result",
            low=0,
            recorded="no",
        ),
    ]
    n_batch: Annotated[
        int,
        ContextOption(
            2048,
            "maximum number of tokens in one engine call, at least n_seq_max; larger batches take several",
            low=1,
            recorded="no",
        ),
    ]
    n_ubatch: Annotated[
        int, ContextOption(512, "maximum number of tokens computed at once", low=1, recorded="no")
    ]
    n_seq_max: Annotated[int, ContextOption(1, "sequence ids are 0..n_seq_max-1", low=1, recorded="no")]
    n_threads: Annotated[
        int | None,
        ContextOption(
            None,
            "None for the number of physical cores, within the CPU quota of a container; more threads than "
            "CPUs, or than the quota, give a RuntimeWarning",
            low=1,
            recorded="no",
        ),
    ]
    type_k: Annotated[
        str,
        ContextOption(
            "f16",
            "type of the K cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1",
            recorded="states",
        ),
    ]
    type_v: Annotated[str, ContextOption("f16", "type of the V cache", recorded="states")]
    flash_attn: Annotated[
        bool | None,
        ContextOption(
            None, "None leaves it to the engine", recorded="states", provenance_key="flash_attention"
        ),
    ]
    kv_unified: Annotated[
        bool,
        ContextOption(
            True,
            "one cache for all sequences; False gives each its own n_ctx / n_seq_max tokens",
            recorded="saved",
        ),
    ]
    swa_full: Annotated[
        bool,
        ContextOption(
            True,
            "keep all positions of sliding-window layers, so that suffixes can be removed",
            recorded="saved",
        ),
    ]
    n_rs_seq: Annotated[
        int,
        ContextOption(
            0,
            "tokens that a recurrent or hybrid model can roll back, where it does so exactly",
            low=0,
            recorded="no",
        ),
    ]
    n_outputs_max: Annotated[
        int,
        ContextOption(
            0,
            "maximum number of outputs in one engine call, at least n_seq_max; 0 for n_batch. A small number "
            "saves memory in proportion to the vocabulary",
            low=0,
            recorded="no",
        ),
    ]


def engine_switch(value: bool | None) -> int:
    """A switch as the core takes it: -1 (the engine decides), 0 or 1."""
    return -1 if value is None else int(value)
