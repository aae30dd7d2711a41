"""Packing prompts into batches."""

from __future__ import annotations

from collections.abc import Sequence

from llamatap._native import _core

__all__ = ["batch_sequence_limit", "pack_prompts"]

# Maximum number of prompts in one batch. Recurrent models hold a state for each, and compute prompts of
# different lengths one after the other.
_MOST_SEQUENCES = 64
_MOST_RECURRENT_SEQUENCES = 8


def batch_sequence_limit(model: _core.Model) -> int:
    """Maximum number of prompts in one batch of a model, in a unified KV cache."""
    if not model.batches_sequences:
        return 1
    return _MOST_RECURRENT_SEQUENCES if model.is_recurrent or model.is_hybrid else _MOST_SEQUENCES


def pack_prompts(lengths: Sequence[int], room: int, n_seq_max: int) -> list[list[int]]:
    """Group prompts so that each group fits into ``room`` tokens and ``n_seq_max`` sequences.

    First fit, longest first; a prompt longer than ``room`` gets its own group.
    """
    packs: list[list[int]] = []
    shortest = min(lengths)
    open_packs: list[tuple[list[int], int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        for slot, (pack, free) in enumerate(open_packs):
            if length <= free:
                pack.append(index)
                free -= length
                # Close a pack that nothing fits into any more.
                if free < shortest or len(pack) == n_seq_max:
                    del open_packs[slot]
                else:
                    open_packs[slot] = (pack, free)
                break
        else:
            packs.append([index])
            if room - length >= shortest and n_seq_max > 1:
                open_packs.append((packs[-1], room - length))
    return packs
